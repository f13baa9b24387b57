"""The columns of a log say what its events said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.measures import expected_acceptance_length
from replay import chunks
from replay.requests import join_requests, join_segments
from replay.trace import NO_WINDOW, Trace, VersionChange, build_trace
from schemas.events import NO_DRAFTER, AcceptanceRule, DrafterVersion, VerificationEvent
from tests.replay.synthetic import log, make_request, split


def trace_of(*events: VerificationEvent) -> Trace:
    return build_trace(join_requests(log(events)))


def pool(*ids: str, version: int = 0) -> tuple[DrafterVersion, ...]:
    return tuple(DrafterVersion(drafter_id=i, weights_version=version) for i in ids)


def test_lengths_are_those_of_the_estimators() -> None:
    event = make_request(rule=AcceptanceRule.SPECULATIVE_SAMPLING)
    trace = trace_of(event)
    windows = event.windows
    for name, estimator in (("exact_length", "exact"), ("published_length", "published")):
        expected = expected_acceptance_length(
            windows.acceptance_probability,
            windows.realised_acceptance,
            num_levels=windows.num_levels,
            estimator="published" if estimator == "published" else "exact",
        )
        assert np.allclose(getattr(trace.windows, name).sum(axis=0), expected.sum(axis=0))
        first = getattr(trace.windows, name)[0]
        assert np.allclose(first, expected[: trace.windows.num_scored[0, 0]].sum(axis=0))
    assert not np.allclose(trace.windows.exact_length, trace.windows.published_length)
    assert trace.num_windows == trace.windows.num_scored[:, 0].sum() == windows.start.size


def test_every_round_has_the_lengths_of_the_window_of_its_first_position() -> None:
    event = make_request(num_tokens=50)
    trace = trace_of(event, replace(event, sequence=1, request_id="request-1"))
    expected = expected_acceptance_length(
        event.windows.acceptance_probability,
        event.windows.realised_acceptance,
        num_levels=event.windows.num_levels,
    )
    start_to_row = {int(start): row for row, start in enumerate(event.windows.start)}
    positions = np.tile(event.rounds.first_position, 2)
    rounds = trace.rounds
    for index, position in enumerate(positions):
        row = start_to_row.get(int(position))
        if row is None:
            assert rounds.depth[index] == NO_WINDOW and np.isnan(rounds.lengths[index]).all()
        else:
            assert np.allclose(rounds.lengths[index], expected[row])
            assert rounds.num_levels[index] == event.windows.num_levels[row]
            assert rounds.depth[index] == 4
    assert np.array_equal(rounds.depth == NO_WINDOW, positions == event.first_position)


def test_long_logs_are_added_up_over_longer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "FINE_UNTIL", 50)
    monkeypatch.setattr(chunks, "MEDIUM_UNTIL", 150)
    event = make_request()
    events = [replace(event, sequence=i, request_id=f"request-{i}") for i in range(4)]
    trace = trace_of(*events)
    largest = [int(trace.windows.num_scored[trace.windows.request == i].max()) for i in range(4)]
    assert largest == [4, 16, 16, 58]
    total = trace.windows.exact_length.sum(axis=0)
    assert np.allclose(total, 4 * trace_of(event).windows.exact_length.sum(axis=0))


def test_tokens_count_what_the_log_had_emitted_before() -> None:
    first, second = make_request(num_tokens=30), make_request(num_tokens=20, request_id="b")
    trace = trace_of(first, replace(second, sequence=1))
    assert trace.num_tokens == 50
    assert trace.rounds.token[0] == 0
    assert np.array_equal(np.diff(trace.rounds.token), trace.rounds.num_emitted_tokens[:-1])
    # Chunks of four windows from the second position on, at their third one.
    is_first = trace.windows.request == 0
    assert trace.windows.token[is_first][:3].tolist() == [3, 7, 11]
    assert trace.windows.token[~is_first][0] == 33


def test_drafters_of_all_requests_share_one_axis() -> None:
    first = make_request(hit_rates=[0.9, 0.1], drafters=pool("a", "b"))
    second = make_request(
        hit_rates=[0.5, 0.2], drafters=pool("c", "a"), sequence=1, request_id="request-1"
    )
    trace = trace_of(first, second)
    assert trace.drafter_ids == ("a", "b", "c")
    is_first = trace.windows.request == 0
    scored = trace.windows.num_scored > 0
    assert scored[is_first].all(axis=0).tolist() == [True, True, False]
    assert scored[~is_first].all(axis=0).tolist() == [True, False, True]
    second_rounds = trace.rounds.drafter[trace.rounds.request == 1]
    expected = np.array([2, 0, NO_DRAFTER])[second.rounds.drafter_index]
    assert np.array_equal(second_rounds, expected)


def test_new_weights_are_noted_once_per_stream_at_their_token() -> None:
    head, tail = split(make_request(hit_rates=[0.5], drafters=pool("a", version=1)), 5)
    tail = replace(tail, drafters=pool("a", version=2))
    late = make_request(
        hit_rates=[0.5], drafters=pool("a", version=1), sequence=2, request_id="late"
    )
    other = replace(late, stream="stream-b", sequence=3)
    trace = trace_of(head, tail, late, other)
    assert trace.version_changes == (
        VersionChange(token=0, stream="stream-a", drafter_id="a", weights_version=1),
        VersionChange(
            token=head.num_positions, stream="stream-a", drafter_id="a", weights_version=2
        ),
        VersionChange(token=120, stream="stream-b", drafter_id="a", weights_version=1),
    )


def test_a_log_without_requests_has_empty_columns_of_the_right_types() -> None:
    trace = build_trace([])
    assert trace.drafter_ids == trace.streams == ()
    assert trace.windows.exact_length.shape == (0, 0)
    assert trace.rounds.drafter.dtype == np.int16
    assert trace.num_tokens == 0


def test_mixed_depths_keep_their_own() -> None:
    shallow = make_request(num_speculative_tokens=2)
    deep = make_request(num_speculative_tokens=6, sequence=1, request_id="request-1")
    trace = trace_of(shallow, deep)
    rounds = trace.rounds
    assert set(rounds.depth[rounds.request == 0]) == {2, NO_WINDOW}
    assert set(rounds.depth[rounds.request == 1]) == {6, NO_WINDOW}
    assert np.nanmax(rounds.lengths[rounds.request == 0]) <= 3.0


def test_a_request_without_windows_keeps_its_rounds() -> None:
    event = make_request()
    windows = event.windows
    empty = replace(
        windows,
        start=windows.start[:0],
        num_levels=windows.num_levels[:0],
        acceptance_probability=windows.acceptance_probability[:0],
        realised_acceptance=windows.realised_acceptance[:0],
    )
    trace = build_trace([join_segments([replace(event, windows=empty)])])
    assert trace.windows.exact_length.shape == (0, 3)
    assert (trace.rounds.depth == NO_WINDOW).all()
    assert trace.num_tokens == 60
