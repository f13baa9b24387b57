"""The price of time, and that arms are charged for the rounds they would have played."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.arm_learner import by_drafter
from learner.price import arm_losses, first_price, fresh_begins, pay, rate, restart
from learner.walk import WindowTrace
from tests.learner.token_traces import flat_costs, token_trace

WIDE = np.array([-100.0, 100.0])


def charged(trace: WindowTrace, seconds: NDArray[np.float64], theta: float) -> NDArray[np.float64]:
    """Return the summed losses of every arm in tokens, not scaled."""
    num_drafters = trace.realised_acceptance.shape[2]
    levels = trace.num_speculative_tokens
    begins = fresh_begins(len(seconds), levels)
    restart(begins, 0)
    probability = by_drafter(trace.acceptance_probability)
    total = np.zeros(len(seconds))
    losses, lengths, shares = (np.empty(1 + num_drafters * levels) for _ in range(3))
    for window, start in enumerate(trace.starts):
        arm_losses(
            probability[window],
            probability[window],
            int(trace.num_levels[window]),
            int(start),
            begins,
            seconds,
            theta,
            WIDE,
            losses,
            lengths,
            shares,
        )
        total += losses * 200.0 - 100.0
    return total


def rounds_of(hits: NDArray[np.float64], most: int) -> int:
    """Count the rounds of one drafter with K = ``most`` over its hits (P,)."""
    position = count = 0
    while position < len(hits):
        accepted = 0
        while accepted < most and position + accepted < len(hits) and hits[position + accepted]:
            accepted += 1
        position += accepted + 1
        count += 1
    return count


def test_an_arm_is_charged_theta_times_its_seconds_less_its_tokens_exactly() -> None:
    generator = np.random.default_rng(3)
    hits = (generator.random((200, 2)) < [0.5, 0.85]).astype(float)
    # A miss at the end, so that no round of any arm reaches beyond.
    hits[-1] = 0.0
    costs = flat_costs([0.1, 0.3], 4, slope=0.2)
    found = charged(token_trace(hits, 4), costs.seconds(), 1.7)
    for arm in range(1, len(costs.arms)):
        drafter, most = costs.arms.drafter[arm], costs.arms.num_speculative_tokens[arm]
        rounds = rounds_of(hits[:, drafter], int(most))
        expected = 1.7 * rounds * costs.seconds()[arm] - 200
        assert found[arm] == pytest.approx(expected, abs=1e-6)
    assert found[0] == pytest.approx(200 * (1.7 - 1.0), abs=1e-6)


def test_when_sampling_an_arm_is_charged_for_the_rounds_it_would_play_on_average() -> None:
    generator = np.random.default_rng(4)
    acceptance = generator.random((30, 1))
    acceptance[-1] = 0.0
    costs = flat_costs([0.0], 3)
    found = charged(token_trace(acceptance, 3), costs.seconds(), 1.0)
    coins = generator.random((4000, 30))
    rounds = [rounds_of((coin < acceptance[:, 0]).astype(float), 3) for coin in coins]
    deviation = float(np.std(rounds)) / np.sqrt(len(rounds))
    assert abs(found[3] + 30 - np.mean(rounds)) < 4 * deviation


def test_a_sleeping_drafters_arms_are_nan_and_emit_one_token_meanwhile() -> None:
    levels = np.full((1, 2), np.nan)
    begins = fresh_begins(3, 2)
    restart(begins, 0)
    losses, lengths, shares = np.empty(3), np.empty(3), np.empty(3)
    costs = flat_costs([0.0], 2)
    for position in range(2):
        arm_losses(
            levels, levels, 2, position, begins, costs.seconds(), 1.0, WIDE, losses, lengths, shares
        )
        assert np.isnan(losses[1:]).all()
        assert not np.isnan(losses[0])
        assert shares.tolist() == [1.0, 1.0, 1.0]


def test_losses_beyond_the_range_are_cut_off() -> None:
    levels = np.ones((1, 2))
    begins = fresh_begins(3, 2)
    restart(begins, 0)
    losses, lengths, shares = np.empty(3), np.empty(3), np.empty(3)
    seconds = np.array([9.0, 1.0, 1.0])
    scale = np.array([-0.5, 0.5])
    arm_losses(levels, levels, 2, 0, begins, seconds, 1.0, scale, losses, lengths, shares)
    assert losses.tolist() == [1.0, 0.0, 0.0]
    assert lengths.tolist() == [1.0, 2.0, 3.0]


def test_the_price_is_a_ratio_of_decayed_sums() -> None:
    price = first_price(flat_costs([0.0], 1), memory=0.5)
    assert rate(price) == 1.0
    tokens, seconds = price[1], price[2]
    pay(price, 3.0, 2.0)
    pay(price, 1.0, 4.0)
    expected = (0.25 * tokens + 0.5 * 3.0 + 1.0) / (0.25 * seconds + 0.5 * 2.0 + 4.0)
    assert rate(price) == pytest.approx(expected)


def test_invalid_memory_of_the_price_is_refused() -> None:
    with pytest.raises(ValueError, match="memory=0"):
        first_price(flat_costs([0.0], 1), memory=0.0)
