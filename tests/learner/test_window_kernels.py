"""One compiled pass over the windows gives what the definitions give, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.measures import expected_acceptance_length
from learner.selection import parse_policy
from learner.selection.kernels import ASLEEP
from learner.walk import (
    Coins,
    Walker,
    WindowTrace,
    accepted_tokens,
    agreement_losses,
    prepare,
    ready_at,
    window_losses,
)
from learner.window_kernels import halves, measure_lengths

LEVELS, DRAFTERS = 5, 3


def some_trace(seed: int, *, num_positions: int = 60, is_censored: bool = False) -> WindowTrace:
    """Return a request with gaps between windows, sleeping drafters and a cut end."""
    generator = np.random.default_rng(seed)
    starts = np.flatnonzero(generator.random(num_positions) < 0.8).astype(np.int64)
    num_levels = np.minimum(LEVELS, num_positions - starts).astype(np.int16)
    scores = generator.random((2, starts.size, LEVELS, DRAFTERS)).astype(np.float16)
    asleep = generator.random((starts.size, DRAFTERS)) < 0.1
    scores.transpose(0, 1, 3, 2)[:, asleep] = np.nan
    # Of some only level 1 was known when their drafter failed or was replaced.
    is_cut = generator.random((starts.size, DRAFTERS)) < 0.1
    scores[:, :, 1:].transpose(0, 1, 3, 2)[:, is_cut] = np.nan
    for row, count in enumerate(num_levels):
        scores[:, row, count:] = np.nan
    return WindowTrace(
        num_positions=num_positions,
        starts=starts,
        num_levels=num_levels,
        is_whole=num_levels == LEVELS,
        acceptance_probability=scores[0],
        realised_acceptance=scores[1],
        is_idle=np.zeros(num_positions, dtype=np.bool_),
        is_censored=is_censored,
    )


def coins_of(trace: WindowTrace) -> Coins:
    return Coins.toss(np.random.default_rng(9), trace.num_positions, LEVELS)


def truncated(trace: WindowTrace, depth: int) -> WindowTrace:
    """Return the request as a worker with fewer levels would have logged it."""
    num_levels = np.minimum(trace.num_levels, depth).astype(np.int16)
    return WindowTrace(
        num_positions=trace.num_positions,
        starts=trace.starts,
        num_levels=num_levels,
        is_whole=num_levels == depth,
        acceptance_probability=trace.acceptance_probability[:, :depth],
        realised_acceptance=trace.realised_acceptance[:, :depth],
        is_idle=trace.is_idle,
    )


def test_every_half_in_range_is_decoded_exactly() -> None:
    values = np.arange(0x3C01, dtype=np.uint16).view(np.float16)
    assert np.array_equal(halves(values), values.astype(np.float64))
    nans = np.array([0x7C01, 0x7E00, 0xFE00, 0x7FFF], dtype=np.uint16).view(np.float16)
    assert np.isnan(halves(nans)).all()


def test_strided_and_double_scores_are_read_too() -> None:
    values = np.random.default_rng(0).random((6, 4, 3)).astype(np.float16)
    assert np.array_equal(halves(values[:, :2]), values[:, :2].astype(np.float64))
    doubles = values.astype(np.float64)
    assert np.array_equal(halves(doubles), doubles)


@pytest.mark.parametrize("seed", range(5))
def test_a_prepared_request_holds_what_the_definitions_say(seed: int) -> None:
    trace = some_trace(seed)
    coins = coins_of(trace)
    prepared = prepare(trace, coins)
    accepted = accepted_tokens(trace, coins.acceptance)
    assert np.array_equal(prepared.accepted[trace.starts], accepted)
    without = np.setdiff1d(np.arange(trace.num_positions), trace.starts)
    assert (prepared.accepted[without] == -1).all()
    assert np.array_equal(prepared.agreement_loss[trace.starts], agreement_losses(trace, accepted))
    for loss in ("length", "first", "hybrid"):
        expected = window_losses(trace, loss)
        assert np.array_equal(prepared.loss_to_losses[loss], expected, equal_nan=True), loss
        assert np.array_equal(prepared.loss_to_ready_at[loss], ready_at(trace, loss)), loss


@pytest.mark.parametrize("depth", [1, 3, LEVELS])
def test_fewer_levels_are_those_that_would_have_been_logged(depth: int) -> None:
    trace = some_trace(3)
    coins = coins_of(trace)
    found = prepare(trace, coins, num_speculative_tokens=depth)
    expected = prepare(truncated(trace, depth), coins)
    assert np.array_equal(found.accepted, expected.accepted)
    assert np.array_equal(found.agreement_loss, expected.agreement_loss)
    for loss in ("length", "first", "hybrid"):
        assert np.array_equal(
            found.loss_to_losses[loss], expected.loss_to_losses[loss], equal_nan=True
        )
        assert np.array_equal(found.loss_to_ready_at[loss], expected.loss_to_ready_at[loss])


def test_windows_that_a_failure_cut_teach_nothing() -> None:
    trace, cut = some_trace(4), some_trace(4, is_censored=True)
    whole = int(trace.is_whole.sum())
    assert whole < trace.starts.size
    learned = prepare(cut, coins_of(cut)).loss_to_losses["length"]
    assert np.array_equal(
        learned, prepare(trace, coins_of(trace)).loss_to_losses["length"][:whole], equal_nan=True
    )


def test_both_estimators_are_those_of_the_measures() -> None:
    trace = some_trace(5)
    shape = (trace.starts.size, DRAFTERS)
    exact, published = np.empty(shape), np.empty(shape)
    scores = halves(trace.acceptance_probability), halves(trace.realised_acceptance)
    measure_lengths(*scores, trace.num_levels, exact, published)
    for found, estimator in ((exact, "exact"), (published, "published")):
        expected = expected_acceptance_length(
            trace.acceptance_probability,
            trace.realised_acceptance,
            num_levels=trace.num_levels,
            estimator="exact" if estimator == "exact" else "published",
        )
        assert np.array_equal(found, expected, equal_nan=True), estimator


def rounds_of(walker: Walker, trace: WindowTrace, places: list[int]) -> NDArray[np.int64]:
    walked = walker.walk(prepare(trace, coins_of(trace)).of_drafters(places))
    return np.column_stack([walked.position, walked.drafter, walked.length])


def test_a_drafter_that_is_absent_sleeps_and_the_others_keep_what_was_learned() -> None:
    spec = parse_policy("fixed_share:scope=stream")
    walker = Walker(spec, 2, drafter_ids=("a", "b"))
    rounds_of(walker, some_trace(6), [0, 1])
    before = walker.policy.probabilities()
    walker.change_pool(("b", "new", "a"))
    after = walker.policy.probabilities()
    assert after[2] / after[0] == pytest.approx(before[0] / before[1])
    assert 0.0 < after[1] < 0.5
    drafters = rounds_of(walker, some_trace(7), [1, -1, 0])[:, 1]
    assert set(drafters) <= {-1, 0, 2}


def test_a_fixed_policy_stays_with_its_drafter_in_any_pool() -> None:
    walker = Walker(parse_policy("fixed:b"), 2, drafter_ids=("a", "b"))
    walker.change_pool(("c", "b", "a"))
    assert walker.policy.probabilities().tolist() == [0.0, 1.0, 0.0]


def test_invalid_number_of_levels_is_refused() -> None:
    trace = some_trace(0)
    for depth in (0, LEVELS + 1):
        with pytest.raises(ValueError, match=rf"num_speculative_tokens={depth} outside 1..5"):
            prepare(trace, coins_of(trace), num_speculative_tokens=depth)


def test_invalid_change_of_an_unnamed_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="without drafter ids"):
        Walker(parse_policy("hedge"), 2).change_pool(("a", "b"))


def test_a_drafter_of_which_only_level_1_is_known_sleeps_whatever_happened_there() -> None:
    """If rejections counted and acceptances did not, policies would look worse than they are."""
    scores = np.full((2, 3, 1), np.nan, np.float16)
    scores[:, 0, 0] = [1.0, 0.0]
    trace = WindowTrace(
        num_positions=6,
        starts=np.array([0, 1]),
        num_levels=np.array([3, 3], np.int16),
        is_whole=np.ones(2, np.bool_),
        acceptance_probability=scores,
        realised_acceptance=scores,
        is_idle=np.zeros(6, np.bool_),
    )
    coins = Coins.toss(np.random.default_rng(0), 6, 3)
    assert accepted_tokens(trace, coins.acceptance).ravel().tolist() == [ASLEEP, ASLEEP]
    assert prepare(trace, coins).accepted[:2].ravel().tolist() == [ASLEEP, ASLEEP]
    shallow = prepare(trace, coins, num_speculative_tokens=1)
    assert shallow.accepted[:2].ravel().tolist() == [1, 0]
