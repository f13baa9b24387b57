"""Segments of a request join into the request that they were cut from."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest

from learner.request_selector import RequestSelector
from replay import requests
from replay.requests import RequestTrace, join_requests, join_segments
from schemas.events import (
    NO_DRAFTER,
    AcceptanceRule,
    DrafterVersion,
    Rounds,
    ScoredWindows,
    VerificationEvent,
)
from tests.replay.synthetic import log, make_request, split


def assert_same(one: RequestTrace, other: RequestTrace) -> None:
    for field in fields(Rounds):
        values = getattr(one.rounds, field.name), getattr(other.rounds, field.name)
        assert values[0].dtype == values[1].dtype, field.name
        assert np.array_equal(*values), field.name
    for field in fields(ScoredWindows):
        values = getattr(one.windows, field.name), getattr(other.windows, field.name)
        is_float = field.name.endswith(("probability", "acceptance"))
        assert np.array_equal(*values, equal_nan=is_float), field.name
    assert (one.first_position, one.end_position) == (other.first_position, other.end_position)


def without_drafter(event: VerificationEvent, drafter: int) -> VerificationEvent:
    """Take a drafter that was not played out of the pool of a segment."""
    keep = [i for i in range(len(event.drafters)) if i != drafter]
    index = event.rounds.drafter_index
    moved = (index - (index > drafter)).astype(np.int16)
    windows = event.windows
    return replace(
        event,
        drafters=tuple(event.drafters[i] for i in keep),
        prior_probabilities=np.full(len(keep), 1 / len(keep)),
        rounds=replace(event.rounds, drafter_index=moved),
        windows=replace(
            windows,
            acceptance_probability=windows.acceptance_probability[:, :, keep],
            realised_acceptance=windows.realised_acceptance[:, :, keep],
        ),
    )


def test_a_request_cut_anywhere_joins_to_itself() -> None:
    whole = make_request()
    for num_rounds in range(1, whole.rounds.first_position.size):
        parts = split(whole, num_rounds)
        joined = join_segments(parts)
        assert joined.is_complete
        assert_same(joined, join_segments([whole]))
        assert_same(join_segments(parts[::-1]), joined)


def test_a_window_belongs_to_the_segment_that_completes_it() -> None:
    head, tail = split(make_request(num_tokens=40), 5)
    assert tail.windows.start[0] < tail.first_position
    joined = join_segments([head, tail])
    assert np.array_equal(joined.windows.start, np.arange(8, 46))


def test_interleaved_requests_come_in_order_of_completion() -> None:
    first = split(make_request(request_id="first"), 3)
    second = split(make_request(request_id="second", sequence=2), 3)
    rows = log([first[0], second[0], second[1], first[1]])
    found = list(join_requests(rows))
    assert [request.request_id for request in found] == ["second", "first"]
    assert all(request.is_complete for request in found)


def test_equal_request_ids_in_two_streams_are_two_requests() -> None:
    rows = log([make_request(stream="a"), make_request(stream="b", sequence=1)])
    assert len(list(join_requests(rows))) == 2


def test_a_request_without_its_end_comes_last_and_is_marked() -> None:
    head, _ = split(make_request(request_id="cut"), 4)
    found = list(join_requests(log([head, make_request(request_id="whole", sequence=2)])))
    assert [(r.request_id, r.is_complete) for r in found] == [("whole", True), ("cut", False)]


def test_a_request_without_its_start_or_middle_is_marked() -> None:
    head, rest = split(make_request(num_tokens=80), 4)
    middle, tail = split(rest, 4)
    assert not join_segments([tail]).is_complete
    assert not join_segments([head, tail]).is_complete
    assert join_segments([head, middle, tail]).is_complete


def test_requests_that_never_end_do_not_fill_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_OPEN_REQUESTS", 2)
    heads = [split(make_request(request_id=f"r{i}", sequence=i), 2)[0] for i in range(5)]
    rows = iter(log(heads))
    joined = join_requests(rows)
    assert next(joined).request_id == "r0"
    assert len(list(rows)) == 2, "the oldest must be given up as soon as there are three"


def test_drafters_are_aligned_by_id_when_the_pool_changes() -> None:
    selector = RequestSelector.fresh("fixed:1", 3, 4)
    whole = make_request(num_tokens=80, selector=selector)
    head, tail = split(whole, 8)
    joined = join_segments([head, without_drafter(tail, 0)])
    assert joined.drafter_ids == ("drafter-0", "drafter-1", "drafter-2")
    num_early = head.windows.start.size
    windows = joined.windows
    assert np.array_equal(
        windows.realised_acceptance[:, :, 1:],
        whole.windows.realised_acceptance[:, :, 1:],
        equal_nan=True,
    )
    assert np.isnan(windows.realised_acceptance[num_early:, :, 0]).all()
    assert not np.isnan(windows.realised_acceptance[:num_early, 0, 0]).any()
    assert set(joined.rounds.drafter_index) == {NO_DRAFTER, 1}
    assert joined.prior_probabilities.tolist() == [1 / 3, 1 / 3, 1 / 3]
    assert joined.segment_versions.tolist() == [[0, 0, 0], [-1, 0, 0]]


def test_rounds_without_drafter_stay_without() -> None:
    whole = make_request(no_drafter_share=0.5)
    index = join_segments(split(whole, 4)).rounds.drafter_index
    assert np.array_equal(index, whole.rounds.drafter_index)
    assert NO_DRAFTER in index


def test_a_pool_in_another_order_is_put_in_order() -> None:
    whole = make_request(num_tokens=80)
    head, tail = split(whole, 8)
    order = np.array([2, 0, 1])
    windows = tail.windows
    shuffled = replace(
        tail,
        drafters=tuple(tail.drafters[i] for i in order),
        rounds=replace(
            tail.rounds, drafter_index=np.argsort(order)[tail.rounds.drafter_index].astype(np.int16)
        ),
        windows=replace(
            windows,
            acceptance_probability=windows.acceptance_probability[:, :, order],
            realised_acceptance=windows.realised_acceptance[:, :, order],
        ),
    )
    assert_same(join_segments([head, shuffled]), join_segments([whole]))


def test_segments_of_different_depth_are_padded_with_nan() -> None:
    head, tail = split(make_request(num_tokens=60, num_speculative_tokens=4), 6)
    deep = make_request(num_tokens=60, num_speculative_tokens=6)
    rows = np.isin(deep.windows.start, tail.windows.start)
    tail = replace(
        tail,
        num_speculative_tokens=6,
        windows=ScoredWindows(
            start=deep.windows.start[rows],
            num_levels=deep.windows.num_levels[rows],
            acceptance_probability=deep.windows.acceptance_probability[rows],
            realised_acceptance=deep.windows.realised_acceptance[rows],
        ),
    )
    joined = join_segments([head, tail])
    num_early = head.windows.start.size
    assert joined.num_speculative_tokens == 6
    assert joined.windows.realised_acceptance.shape == (58, 6, 3)
    assert np.isnan(joined.windows.realised_acceptance[:num_early, 4:]).all()
    assert set(joined.window_num_speculative_tokens[:num_early]) == {4}
    assert set(joined.window_num_speculative_tokens[num_early:]) == {6}


def test_only_speculative_sampling_needs_coins() -> None:
    for rule in AcceptanceRule:
        joined = join_segments([make_request(rule=rule)])
        assert joined.is_deterministic == (rule is not AcceptanceRule.SPECULATIVE_SAMPLING)


@pytest.mark.parametrize("score_block", [1, 5])
def test_the_block_in_which_windows_were_scored_is_seen(score_block: int) -> None:
    event = make_request(hit_rates=[0.0], num_tokens=40, score_block=score_block)
    assert join_segments([event]).score_block == score_block
    assert join_segments(split(event, 20)[:1]).score_block == score_block


def test_a_request_that_was_never_scored_in_between_has_block_one() -> None:
    assert join_segments([make_request(score_block=1000)]).score_block == 1


def test_the_prior_of_a_late_drafter_is_zero() -> None:
    whole = make_request(num_tokens=80, selector=RequestSelector.fresh("fixed:1", 3, 4))
    head, tail = split(whole, 8)
    joined = join_segments([without_drafter(head, 2), tail])
    assert joined.drafter_ids == ("drafter-0", "drafter-1", "drafter-2")
    assert joined.prior_probabilities.tolist() == [0.5, 0.5, 0.0]


def test_versions_are_those_of_each_segment() -> None:
    head, tail = split(make_request(hit_rates=[0.5]), 3)
    pool = (DrafterVersion(drafter_id="drafter-0", weights_version=7),)
    assert join_segments([head, replace(tail, drafters=pool)]).segment_versions.tolist() == [
        [0],
        [7],
    ]


def test_invalid_join_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no segment"):
        join_segments([])
