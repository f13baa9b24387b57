"""The row of a policy says what it would have done, against the log, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from replay.analysis import Analysis, ReplayOptions, analyse
from replay.summary import PolicyRow
from replay.walks import WalkOptions, score_weights
from schemas.events import AcceptanceRule, Rounds, VerificationEvent
from tests.replay.synthetic import log, make_request, window_rows, write_log
from tests.replay.test_rerun import joined, policy_selector


def requests(count: int = 24, **options: object) -> list[VerificationEvent]:
    """Return requests served by drafters drawn uniformly, the first of them the best."""
    return [
        make_request(
            num_tokens=150,
            sequence=index,
            request_id=f"r{index}",
            **options,  # type: ignore[arg-type]
        )
        for index in range(count)
    ]


def analysis_of(
    folder: Path, events: Sequence[VerificationEvent], *policies: str, **options: object
) -> Analysis:
    write_log(folder, log(events))
    walks = WalkOptions(policies=policies, **options)  # type: ignore[arg-type]
    return analyse(folder, np.random.default_rng(0), options=ReplayOptions(walks=walks))


def rows_of(
    folder: Path, events: Sequence[VerificationEvent], *policies: str, **options: object
) -> tuple[PolicyRow, ...]:
    return analysis_of(folder, events, *policies, **options).summary.policies


def test_the_logged_drafter_walked_again_is_the_log(tmp_path: Path) -> None:
    events = requests(selector=policy_selector("fixed:0"))
    (row,) = rows_of(tmp_path, events, "fixed:drafter-0")
    assert row.num_rounds == sum(event.rounds.first_position.size for event in events)
    assert (row.ratio, row.ratio_low, row.ratio_high) == (1.0, 1.0, 1.0)
    assert row.lowest_length == row.mean_acceptance_length == row.highest_length
    assert (row.estimated_share, row.num_skipped_tokens, row.num_switches) == (0.0, 0, 0)


def test_seconds_are_those_of_the_cost_measured_in_the_log(tmp_path: Path) -> None:
    """Every synthetic round drafts 0.01, verifies 0.04 and scores 0.01 seconds."""
    events = requests(selector=policy_selector("fixed:0"))
    (row,) = rows_of(tmp_path, events, "fixed:drafter-0")
    assert row.seconds is not None and row.speed_ratio is not None
    # A fixed drafter pays for no scoring; drafting is measured per token.
    assert row.seconds == pytest.approx(0.05 * row.num_rounds, rel=0.01)
    assert row.tokens_per_second == pytest.approx(row.num_tokens / row.seconds)
    assert row.speed_ratio == pytest.approx(0.06 / 0.05, rel=0.01)


def test_a_policy_that_reads_windows_pays_for_scoring_and_a_bandit_does_not(tmp_path: Path) -> None:
    events = requests()
    hedge, bandit = rows_of(tmp_path, events, "hedge", "ucb")
    num_windows = sum(event.windows.start.size for event in events)
    num_rounds = sum(event.rounds.first_position.size for event in events)
    per_window = 0.01 * num_rounds / num_windows
    without = [
        row.seconds - (per_window * num_windows if row.policy == "hedge" else 0.0)
        for row in (hedge, bandit)
        if row.seconds is not None
    ]
    assert without == pytest.approx([0.05 * hedge.num_rounds, 0.05 * bandit.num_rounds], rel=0.1)


def test_a_better_policy_is_better_beyond_its_interval(tmp_path: Path) -> None:
    best, worst = rows_of(tmp_path, requests(), "fixed:drafter-0", "fixed:drafter-2")
    assert best.ratio_low is not None and best.ratio_low > 1.2
    assert worst.ratio_high is not None and worst.ratio_high < 0.9
    for row in (best, worst):
        assert row.ratio is not None and row.ratio_low is not None and row.ratio_high is not None
        assert row.ratio_low < row.ratio < row.ratio_high


def test_one_request_has_a_ratio_and_no_interval(tmp_path: Path) -> None:
    (row,) = rows_of(tmp_path, requests(1), "hedge")
    assert row.ratio is not None
    assert (row.ratio_low, row.ratio_high) == (None, None)


def test_a_drafter_that_was_never_played_has_no_seconds_and_that_is_said(tmp_path: Path) -> None:
    events = requests(selector=policy_selector("fixed:0"))
    analysis = analysis_of(tmp_path, events, "fixed:drafter-2")
    (row,) = analysis.summary.policies
    assert row.mean_acceptance_length is not None
    assert (row.seconds, row.tokens_per_second, row.speed_ratio) == (None, None, None)
    assert any("whose cost the log never measured" in note for note in analysis.summary.notes)


def test_sampled_text_is_estimated_by_coins_and_says_so(tmp_path: Path) -> None:
    rule = AcceptanceRule.SPECULATIVE_SAMPLING
    (row,) = rows_of(tmp_path, requests(6, rule=rule), "hedge")
    assert row.estimated_share == 1.0


def sampled_scoring(event: VerificationEvent, chance: NDArray[np.float64]) -> VerificationEvent:
    """Keep the windows of rounds by their chance and note it: scoring by sample."""
    generator = np.random.default_rng([7, event.sequence])
    rounds = event.rounds
    drawn = generator.random(rounds.first_position.size) < chance
    starts = event.windows.start
    at = np.searchsorted(rounds.first_position, starts, side="right") - 1
    keep = np.flatnonzero(drawn[at])
    windows = replace(
        window_rows(event.windows, 0, 0),
        **{name: getattr(event.windows, name)[keep] for name in event.windows.__slots__},
    )
    values = {name: getattr(rounds, name) for name in Rounds.__dataclass_fields__}
    values["score_probability"] = chance.astype(np.float32)
    return replace(event, rounds=Rounds(**values), windows=windows)


def test_scoring_by_sample_is_weighed_bounded_and_said(tmp_path: Path) -> None:
    """Text is scored less where drafts are short, so plain means would be too long."""
    rates = np.tile([0.2, 0.2, 0.2], (150, 1))
    rates[75:] = 0.9
    whole = requests(60, hit_rates=rates)
    sampled = []
    for event in whole:
        late = event.rounds.first_position >= event.first_position + 75
        sampled.append(sampled_scoring(event, np.where(late, 0.8, 0.25)))
    (truth,) = rows_of(tmp_path / "whole", whole, "fixed:drafter-0")
    analysis = analysis_of(tmp_path / "sampled", sampled, "fixed:drafter-0")
    (row,) = analysis.summary.policies
    assert truth.mean_acceptance_length is not None and row.mean_acceptance_length is not None
    assert row.mean_acceptance_length == pytest.approx(truth.mean_acceptance_length, rel=0.06)
    plain = row.num_tokens / row.num_rounds
    assert plain > 1.15 * truth.mean_acceptance_length
    assert row.lowest_length is not None and row.highest_length is not None
    assert row.lowest_length < truth.mean_acceptance_length < row.highest_length
    assert row.estimated_share == pytest.approx(0.45, abs=0.12)
    assert any("have no window and are passed over" in note for note in analysis.summary.notes)


def test_weights_are_one_where_everything_was_scored() -> None:
    event = make_request(num_tokens=60)
    assert score_weights(joined(event)) is None
    half = sampled_scoring(event, np.full(event.rounds.first_position.size, 0.5))
    weights = score_weights(joined(half))
    assert weights is not None
    scored = np.isin(np.arange(7, 67), half.windows.start)
    assert weights.tolist() == np.where(scored, 2.0, 1.0).tolist()
