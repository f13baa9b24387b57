"""One pass gives every table, for healthy logs and for all others."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replay.analysis import Analysis, ReplayOptions, analyse
from replay.errors import ReplayError
from replay.selectors import selector_from_name
from schemas.events import NO_DRAFTER, Rounds, VerificationEvent
from tests.replay.logs import rich_events, write_rich_log
from tests.replay.synthetic import log, make_request, split, window_rows, write_log


def analysis_of(
    data: Path, events: Sequence[VerificationEvent], policies: Sequence[str] = ()
) -> Analysis:
    write_log(data, log(events))
    return analyse(data, np.random.default_rng(0), policies=policies)


def without_windows(event: VerificationEvent) -> VerificationEvent:
    return replace(event, windows=window_rows(event.windows, 0, 0))


def without_drafters(event: VerificationEvent) -> VerificationEvent:
    windows = event.windows
    return replace(
        event,
        drafters=(),
        prior_probabilities=np.empty(0),
        windows=replace(
            windows,
            acceptance_probability=windows.acceptance_probability[:, :, :0],
            realised_acceptance=windows.realised_acceptance[:, :, :0],
        ),
    )


def uniform(sequence: int) -> VerificationEvent:
    """Return a request whose drafters were selected by a policy that never learned."""
    return make_request(
        sequence=sequence, request_id=f"r{sequence}", policy_name="hedge", score_block=1000
    )


def zero_rounds() -> VerificationEvent:
    one = make_request(num_tokens=3)
    rounds = replace(
        one.rounds, **{name: getattr(one.rounds, name)[:0] for name in one.rounds.__slots__}
    )
    return replace(one, rounds=rounds, num_positions=0, windows=window_rows(one.windows, 0, 0))


def every_number(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in every_number(item)]
    if isinstance(value, list):
        return [number for item in value for number in every_number(item)]
    return [value] if isinstance(value, float) else []


def test_the_tables_add_up(tmp_path: Path) -> None:
    events = rich_events()
    summary = analysis_of(tmp_path, events).summary
    assert summary.total.num_tokens == sum(event.num_positions for event in events)
    assert summary.total.num_tokens == sum(row.num_tokens for row in summary.streams)
    assert summary.total.num_rounds == sum(row.num_rounds for row in summary.streams)
    assert summary.total.mean_acceptance_length == pytest.approx(
        summary.total.num_tokens / summary.total.num_rounds
    )
    # Each synthetic round takes 0.06 seconds.
    assert summary.total.tokens_per_second == pytest.approx(
        summary.total.num_tokens / (0.06 * summary.total.num_rounds)
    )
    for drafter_id in ("suffix", "hydra-code"):
        rows = [row for row in summary.drafters if row.drafter_id == drafter_id]
        (total,) = (row for row in rows if row.stream is None)
        parts = [row for row in rows if row.stream is not None]
        assert total.num_windows == sum(row.num_windows for row in parts)
        assert total.num_rounds == sum(row.num_rounds for row in parts)
        assert total.exact_length == pytest.approx(
            sum(row.num_windows * (row.exact_length or 0.0) for row in parts) / total.num_windows
        )


def test_acceptance_is_per_token_that_was_really_drafted(tmp_path: Path) -> None:
    """A20: drafts of 8, 3, 0 and 1 tokens make 12, not 4 x 8; A19: none makes no rate."""
    event = make_request(num_tokens=15, num_speculative_tokens=8, hit_rates=[0.0, 0.0])
    rounds = Rounds(
        first_position=np.array([7, 8, 14, 17, 18, 20], np.int32),
        drafter_index=np.array([NO_DRAFTER, 0, 0, 0, 0, 1], np.int16),
        num_draft_tokens=np.array([0, 8, 3, 0, 1, 0], np.int16),
        num_accepted_tokens=np.array([0, 5, 2, 0, 1, 0], np.int16),
        num_emitted_tokens=np.array([1, 6, 3, 1, 2, 1], np.int16),
        num_scored_windows=np.array([0, 0, 0, 0, 0, 0], np.int16),
        selection_probability=np.full(6, 0.5, np.float32),
        draft_seconds=np.zeros(6, np.float32),
        verify_seconds=np.zeros(6, np.float32),
        score_seconds=np.zeros(6, np.float32),
    )
    event = without_windows(replace(event, rounds=rounds, num_positions=14))
    rows = analysis_of(tmp_path, [event]).summary.drafters
    rates = {row.drafter_id: row.acceptance_rate for row in rows if row.stream is None}
    assert rates == {"drafter-0": pytest.approx(8 / 12), "drafter-1": None}


def test_streams_are_kept_apart(tmp_path: Path) -> None:
    events = rich_events()
    summary = analysis_of(tmp_path, events).summary
    for row in summary.streams:
        only = [event for event in events if event.stream == row.stream]
        assert row.num_requests == len(only)
        assert row.num_rounds == sum(event.rounds.first_position.size for event in only)


def test_regret_shrinks_towards_the_ceiling_as_more_switches_are_allowed(tmp_path: Path) -> None:
    summary = analysis_of(tmp_path, rich_events()).summary
    rows = [row for row in summary.regrets if row.stream is None and "at most" in row.comparator]
    losses = [row.loss for row in rows]
    assert losses == sorted(losses)
    ceiling = next(row for row in summary.regrets if "ceiling" in row.comparator)
    assert ceiling.loss >= losses[-1]
    for row in summary.regrets:
        assert row.tokens_low is not None and row.tokens_high is not None
        assert row.tokens_low <= row.tokens_high


def test_the_log_is_checked_against_itself(tmp_path: Path) -> None:
    events = rich_events()
    check = analysis_of(tmp_path, events).summary.check
    assert (check.num_disagreements, check.examples) == (0, ())
    assert check.num_rounds == sum(event.rounds.first_position.size for event in events)
    # The last rounds of the cut request have no complete window.
    assert check.num_rounds - 4 < check.num_checked < check.num_rounds


def test_logged_selection_is_checked_with_the_logged_policy(tmp_path: Path) -> None:
    events = rich_events()
    write_log(tmp_path, log(events))
    check = analyse(tmp_path, np.random.default_rng(0)).summary.check
    assert check.num_selections == sum(
        int((event.rounds.drafter_index >= 0).sum()) for event in events
    )
    assert check.num_selections_checked == check.num_selections
    assert check.num_disagreements == 0


def test_the_check_of_selection_keeps_to_its_room(tmp_path: Path) -> None:
    events = rich_events()
    write_log(tmp_path, log(events))
    room = events[0].windows.start.size + events[1].windows.start.size
    check = analyse(
        tmp_path, np.random.default_rng(0), options=ReplayOptions(max_relearned=room)
    ).summary.check
    assert check.num_selections_checked == sum(
        int((event.rounds.drafter_index >= 0).sum()) for event in events[:2]
    )


def test_another_selector_than_the_workers_is_told_from_it(tmp_path: Path) -> None:
    write_log(tmp_path, log(rich_events()))
    other = selector_from_name("hedge")
    check = analyse(
        tmp_path, np.random.default_rng(0), options=ReplayOptions(worker_selector=other)
    ).summary.check
    assert check.num_disagreements > 100
    assert len(check.examples) == 5


def test_an_unknown_logged_policy_is_said_and_not_counted_as_wrong(tmp_path: Path) -> None:
    check = analysis_of(tmp_path, [make_request(policy_name="of-tomorrow")]).summary.check
    assert (check.num_selections_checked, check.num_disagreements) == (0, 0)
    assert "selection was not re-run: unknown policy 'of-tomorrow'" in check.examples[0]


def test_policies_are_re_run_over_the_same_text(tmp_path: Path) -> None:
    policies = ("normal_hedge", "fixed:suffix", "fixed:prompt-lookup")
    summary = analysis_of(tmp_path, rich_events(), policies).summary
    assert [row.policy for row in summary.policies] == list(policies)
    lengths = [row.mean_acceptance_length or 0.0 for row in summary.policies]
    assert lengths[0] > max(lengths[1:])
    for row in summary.policies:
        assert row.num_tokens + row.num_skipped_tokens == summary.total.num_tokens


def test_progress_is_told_per_request(tmp_path: Path) -> None:
    write_log(tmp_path, log(rich_events()))
    told: list[int] = []
    analyse(tmp_path, np.random.default_rng(0), on_request=lambda: told.append(1))
    assert len(told) == 36


@pytest.mark.parametrize(
    ("make_events", "note"),
    [
        (lambda: [without_windows(make_request())], "No scoring"),
        (lambda: [make_request(hit_rates=[0.7])], "One drafter only"),
        (lambda: [without_drafters(make_request(no_drafter_share=1.0))], "No drafters"),
        (lambda: [zero_rounds()], "No rounds"),
        (lambda: [split(make_request(), 5)[0]], "1 of 1 requests are incomplete"),
        (lambda: [split(make_request(), 5)[1]], "1 of 1 requests are incomplete"),
        (
            lambda: [
                make_request(),
                make_request(num_speculative_tokens=2, sequence=1, request_id="b"),
            ],
            "Mixed K (2, 4)",
        ),
        (lambda: rich_events(), "hydra-maths was not scored in"),
    ],
)
def test_what_is_missing_is_said_and_no_number_is_nan(
    tmp_path: Path, make_events: Callable[[], list[VerificationEvent]], note: str
) -> None:
    policies = () if note == "No drafters" else ("normal_hedge",)
    summary = analysis_of(tmp_path, make_events(), policies).summary
    assert any(note in sentence for sentence in summary.notes), summary.notes
    plain = summary.to_json()
    json.dumps(plain, allow_nan=False)
    assert all(math.isfinite(number) for number in every_number(plain))


def test_a_healthy_log_has_no_notes(tmp_path: Path) -> None:
    summary = analysis_of(tmp_path, [uniform(index) for index in range(5)]).summary
    assert summary.notes == ()
    assert summary.check.num_disagreements == 0


def test_unreadable_files_and_duplicates_are_counted_in_the_summary(tmp_path: Path) -> None:
    write_rich_log(tmp_path)
    summary = analyse(tmp_path, np.random.default_rng(0)).summary
    assert (summary.log.num_unreadable_files, summary.log.num_duplicates) == (1, 1)
    assert summary.log.num_events == 30
    assert "Partial: 1 unreadable file (listed under Log)." in summary.notes


def test_equal_seeds_give_equal_summaries(tmp_path: Path) -> None:
    write_log(tmp_path, log(rich_events()))
    policies = ("hedge",)
    one, other = (
        analyse(tmp_path, np.random.default_rng(3), policies=policies).summary for _ in range(2)
    )
    assert one == other


def test_two_hundred_thousand_windows_take_seconds(tmp_path: Path) -> None:
    one = make_request(hit_rates=[0.8, 0.6, 0.4, 0.2], num_tokens=2000, score_block=16)
    events = [
        replace(one, sequence=i, event_id=f"e{i}", request_id=f"r{i}", stream=f"s{i % 4}")
        for i in range(100)
    ]
    write_log(tmp_path, log(events), rows_per_file=10)
    began = time.process_time()
    summary = analyse(tmp_path, np.random.default_rng(0)).summary
    assert summary.num_windows == 199_800
    # About two seconds of this process, however busy the machine is with others.
    assert time.process_time() - began < 20.0


def test_invalid_policy_is_refused_before_the_log_is_read_to_its_end(tmp_path: Path) -> None:
    write_log(tmp_path, log(rich_events()))
    with pytest.raises(ReplayError, match=r"cannot re-run nobody: unknown policy.*hedge"):
        analyse(tmp_path, np.random.default_rng(0), policies=["nobody"])
