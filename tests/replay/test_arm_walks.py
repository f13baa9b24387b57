"""Policies that choose (drafter, K) by time are walked at the cost measured in the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replay.analysis import ReplayOptions, analyse
from replay.errors import ReplayError
from replay.summary import PolicyRow
from replay.walks import PolicyWalks, WalkOptions
from schemas.events import DrafterVersion, VerificationEvent
from tests.replay.synthetic import log, make_request, write_log

BY_TIME = "ada_normal_hedge_grid:objective=seconds"


def timed(event: VerificationEvent, *, draft: Sequence[float], verify: float) -> VerificationEvent:
    """Give rounds these seconds per drafted token of each drafter, and per verification."""
    rounds = event.rounds
    per_token = np.append(draft, 0.0)[rounds.drafter_index]
    return replace(
        event,
        rounds=replace(
            rounds,
            draft_seconds=(per_token * rounds.num_draft_tokens).astype(np.float32),
            verify_seconds=np.full(rounds.first_position.size, verify, dtype=np.float32),
            score_seconds=np.full(rounds.first_position.size, 1e-4, dtype=np.float32),
        ),
    )


def requests(draft: Sequence[float], count: int = 24, **options: object) -> list[VerificationEvent]:
    return [
        timed(
            make_request(
                num_tokens=200,
                sequence=index,
                request_id=f"r{index}",
                **options,  # type: ignore[arg-type]
            ),
            draft=draft,
            verify=0.02,
        )
        for index in range(count)
    ]


def rows_of(
    folder: Path, events: Sequence[VerificationEvent], *policies: str, **options: object
) -> dict[str, PolicyRow]:
    write_log(folder, log(events))
    walks = WalkOptions(policies=policies, **options)  # type: ignore[arg-type]
    summary = analyse(folder, np.random.default_rng(0), options=ReplayOptions(walks=walks)).summary
    return {row.policy: row for row in summary.policies}


def speed(row: PolicyRow) -> float:
    assert row.tokens_per_second is not None
    return row.tokens_per_second


def length(row: PolicyRow) -> float:
    assert row.mean_acceptance_length is not None
    return row.mean_acceptance_length


def test_where_drafts_are_nearly_free_the_best_drafter_is_found(tmp_path: Path) -> None:
    events = requests([1e-5, 1e-5, 1e-5])
    rows = rows_of(tmp_path, events, BY_TIME, "fixed:drafter-0", "fixed:drafter-2")
    assert speed(rows[BY_TIME]) > 0.9 * speed(rows["fixed:drafter-0"])
    assert speed(rows[BY_TIME]) > 1.5 * speed(rows["fixed:drafter-2"])
    assert rows[BY_TIME].num_tokens == 24 * 200


def test_where_drafts_cost_more_than_they_save_nothing_is_drafted(tmp_path: Path) -> None:
    events = requests([0.1, 0.1, 0.1])
    rows = rows_of(tmp_path, events, BY_TIME, "fixed:drafter-0")
    row = rows[BY_TIME]
    assert row.num_idle_rounds > 0.9 * row.num_rounds
    assert speed(row) > 2.0 * speed(rows["fixed:drafter-0"])
    # No speculation is 50 tokens a second; trying the others out has cost something.
    assert 40 < speed(row) <= 50


def test_a_cheap_drafter_is_preferred_to_a_better_one_that_costs_more(tmp_path: Path) -> None:
    events = requests([0.05, 1e-4, 1e-4], hit_rates=[0.8, 0.7, 0.1])
    rows = rows_of(tmp_path, events, BY_TIME, "normal_hedge:scope=stream")
    by_tokens = rows["normal_hedge:scope=stream"]
    assert length(rows[BY_TIME]) < length(by_tokens)
    assert speed(rows[BY_TIME]) > 1.2 * speed(by_tokens)


def test_levels_and_drafters_can_be_fewer(tmp_path: Path) -> None:
    events = requests([1e-5, 1e-5, 1e-5], count=6)
    rows = rows_of(
        tmp_path, events, BY_TIME, num_speculative_tokens=2, drafter_ids=("drafter-1", "drafter-2")
    )
    row = rows[BY_TIME]
    assert row.num_speculative_tokens == 2
    assert 1.0 < length(row) <= 3.0


def test_pools_that_change_are_walked_with_the_absent_asleep(tmp_path: Path) -> None:
    def pool(*ids: str) -> tuple[DrafterVersion, ...]:
        return tuple(DrafterVersion(drafter_id=one, weights_version=0) for one in ids)

    first = requests([1e-5, 1e-5], count=1, hit_rates=[0.9, 0.2], drafters=pool("a", "b"))
    second = requests([1e-5, 1e-5], count=1, hit_rates=[0.2, 0.9], drafters=pool("b", "c"))
    second = [replace(second[0], sequence=1, request_id="other")]
    rows = rows_of(tmp_path, [*first, *second], BY_TIME)
    assert rows[BY_TIME].num_tokens == 400
    assert rows[BY_TIME].num_requests == 2


def test_invalid_without_costs_it_is_refused() -> None:
    with pytest.raises(ReplayError, match="costs of the log are not known yet"):
        PolicyWalks(WalkOptions(policies=(BY_TIME,)), np.random.default_rng(0))


def test_invalid_log_that_times_nothing_is_refused(tmp_path: Path) -> None:
    event = make_request()
    zeros = np.zeros(event.rounds.first_position.size, dtype=np.float32)
    rounds = replace(event.rounds, draft_seconds=zeros, verify_seconds=zeros)
    with pytest.raises(ReplayError, match="the log times no verification"):
        rows_of(tmp_path, [replace(event, rounds=rounds)], BY_TIME)
