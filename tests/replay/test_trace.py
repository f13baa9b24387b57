"""The columns of a log say what its events said."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from learner.measures import expected_acceptance_length
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
        assert np.allclose(getattr(trace.windows, name), expected, rtol=1e-6)
    assert not np.allclose(trace.windows.exact_length, trace.windows.published_length)


def test_every_round_points_at_the_window_of_its_first_position() -> None:
    event = make_request(num_tokens=50)
    trace = trace_of(event, replace(event, sequence=1, request_id="request-1"))
    starts = np.tile(event.windows.start, 2)
    positions = np.tile(event.rounds.first_position, 2)
    has_window = trace.rounds.window != NO_WINDOW
    assert np.array_equal(starts[trace.rounds.window[has_window]], positions[has_window])
    assert np.array_equal(~has_window, positions == event.first_position)
    assert np.array_equal(
        trace.windows.request[trace.rounds.window[has_window]], trace.rounds.request[has_window]
    )


def test_tokens_count_what_the_log_had_emitted_before() -> None:
    first, second = make_request(num_tokens=30), make_request(num_tokens=20, request_id="b")
    trace = trace_of(first, replace(second, sequence=1))
    assert trace.num_tokens == 50
    assert trace.rounds.token[0] == 0
    assert np.array_equal(np.diff(trace.rounds.token), trace.rounds.num_emitted_tokens[:-1])
    has_window = trace.rounds.window != NO_WINDOW
    at_window = trace.windows.token[trace.rounds.window[has_window]]
    assert np.array_equal(at_window, trace.rounds.token[has_window])


def test_drafters_of_all_requests_share_one_axis() -> None:
    first = make_request(hit_rates=[0.9, 0.1], drafters=pool("a", "b"))
    second = make_request(
        hit_rates=[0.5, 0.2], drafters=pool("c", "a"), sequence=1, request_id="request-1"
    )
    trace = trace_of(first, second)
    assert trace.drafter_ids == ("a", "b", "c")
    is_first = trace.windows.request == 0
    scored = ~np.isnan(trace.windows.exact_length)
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
    assert set(trace.windows.num_speculative_tokens[trace.windows.request == 0]) == {2}
    assert set(trace.windows.num_speculative_tokens[trace.windows.request == 1]) == {6}
    assert np.nanmax(trace.windows.exact_length[trace.windows.request == 0]) <= 3.0


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
    assert (trace.rounds.window == NO_WINDOW).all()
    assert trace.num_tokens == 60
