"""What steps cost, and the choice of how much to draft by it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inference.vllm_plugin.choosing import pays_to_begin, shared_out, token_price, worthwhile
from inference.vllm_plugin.step_costs import StepCost, StepCosts, batch_class

NUM_LEVELS = 4


def line(base: float, first: float, token: float) -> StepCost:
    """Return a cost of ``base + first + token D``."""
    extra = first + token * np.arange(1.0, 9.0, dtype=np.float64)
    return StepCost(base=base, extra=extra, token=token)


def measured(base: float, first: float, token: float, *, num_rows: int = 1) -> StepCosts:
    costs, rng = StepCosts(NUM_LEVELS), np.random.default_rng(0)
    for _ in range(400):
        drafted = int(rng.integers(0, NUM_LEVELS + 1)) * num_rows
        seconds = base + first * (drafted > 0) + token * drafted
        noise = float(rng.lognormal(0.0, 0.05))
        costs.observe(num_rows, drafted, num_rows, seconds * noise, 0.0)
    return costs


def test_costs_are_found_again() -> None:
    cost = measured(0.016, 0.002, 0.0013).cost(1)
    assert cost is not None
    assert cost.base == pytest.approx(0.016, rel=0.05)
    assert cost.token == pytest.approx(0.0013, rel=0.3)
    assert cost.seconds(4) == pytest.approx(0.0232, rel=0.05)


def test_a_batch_size_that_was_not_seen_borrows_the_nearest() -> None:
    costs = measured(0.02, 0.0, 0.002, num_rows=4)
    near, own = costs.cost(1), costs.cost(4)
    assert near is not None
    assert own is not None
    assert near.seconds(3) == own.seconds(3)
    assert StepCosts(NUM_LEVELS).cost(1) is None
    assert StepCosts(NUM_LEVELS).rate(1) == 0.0


def test_a_step_that_something_else_held_up_is_left_out() -> None:
    costs = measured(0.016, 0.0, 0.001)
    before = costs.cost(1)
    costs.observe(1, 0, 1, 5.0, 0.0)
    after = costs.cost(1)
    assert before is not None
    assert after is not None
    assert after.seconds(4) == before.seconds(4)


def test_what_was_measured_long_ago_is_tried_again() -> None:
    costs = measured(0.01, 0.05, 0.01)
    dear = costs.cost(1)
    for _ in range(3000):
        costs.observe(1, 0, 1, 0.01, 0.0)
    cheap = costs.cost(1)
    assert dear is not None
    assert cheap is not None
    assert cheap.seconds(1) < 0.3 * dear.seconds(1)


def test_tokens_that_are_all_but_free_and_those_that_are_dear_are_told_apart() -> None:
    """Rows are computed in tiles: here of 16, four of them verified without drafts."""
    costs, rng = StepCosts(NUM_LEVELS), np.random.default_rng(0)
    for _ in range(600):
        drafted = int(rng.integers(0, 17))
        seconds = 0.04 + 0.01 * (drafted > 12)
        costs.observe(4, drafted, 4, seconds * float(rng.lognormal(0.0, 0.05)), 0.0)
        costs.cost(4)
    cost = costs.cost(4)
    assert cost is not None
    assert cost.seconds(12) == pytest.approx(0.04, rel=0.06)
    assert cost.seconds(13) == pytest.approx(0.05, rel=0.08)
    assert (np.diff(cost.extra) > 0.0).all()


def test_a_machine_that_grows_slow_is_followed_and_the_shape_is_kept() -> None:
    costs = measured(0.016, 0.002, 0.0013)
    for _ in range(60):
        costs.observe(1, 3, 2, 1.5 * 0.0219, 0.0)
        costs.cost(1)
    cost = costs.cost(1)
    assert cost is not None
    # No step without drafts was seen since.
    assert cost.seconds(0) == pytest.approx(1.5 * 0.016, rel=0.1)
    assert cost.seconds(4) == pytest.approx(1.5 * 0.0232, rel=0.1)


def test_small_batch_sizes_are_told_apart() -> None:
    assert [batch_class(n) for n in range(1, 9)] == list(range(1, 9))
    assert [batch_class(n) for n in (9, 10, 11, 16, 17, 20, 33)] == [10, 10, 12, 16, 20, 20, 40]


def test_what_drafting_costs_is_not_forgotten_while_all_steps_draft() -> None:
    costs = measured(0.016, 0.01, 0.001)
    for number in range(1000):
        drafted = 1 + number % 4
        costs.observe(1, drafted, 1, 0.026 + 0.001 * drafted, 0.0)
    cost = costs.cost(1)
    assert cost is not None
    assert cost.first == pytest.approx(0.01, rel=0.2)


def test_a_step_without_drafts_is_due_now_and_then() -> None:
    costs, num_bare = StepCosts(NUM_LEVELS), 0
    for _ in range(1000):
        is_bare = costs.owes_bare_step(4)
        costs.observe(4, 0 if is_bare else 5, 8, 0.02, 0.0)
        num_bare += is_bare
    assert 10 <= num_bare <= 40
    assert not costs.owes_bare_step(3)


def test_the_choice_is_the_best_of_all_lengths() -> None:
    rng = np.random.default_rng(0)
    chances = rng.random((6, 2, 4))
    room = np.array([4, 3, 2, 1, 0, 4])
    price = 0.2
    levels, values = worthwhile(chances, room, price)
    for row, drafter in itertools.product(range(6), range(2)):
        gains = [0.0]
        reach = 1.0
        for level in range(room[row]):
            reach *= chances[row, drafter, level]
            gains.append(gains[-1] + reach - price)
        assert values[row, drafter] == pytest.approx(max(gains))
        assert levels[row, drafter] == int(np.argmax(gains))


def test_a_token_costs_what_its_seconds_would_have_earned() -> None:
    assert token_price(line(0.016, 0.0, 0.002), 60.0) == pytest.approx(0.12)
    assert 0.0 < token_price(None, 0.0) < 0.2


def test_a_batch_begins_to_draft_only_if_all_its_rows_earn_what_that_costs() -> None:
    cost = line(0.016, 0.01, 0.001)
    assert not pays_to_begin(np.array([0.2, 0.2]), cost, 60.0)
    assert pays_to_begin(np.array([0.4, 0.4]), cost, 60.0)


def test_all_rows_together_draft_what_earns_the_most() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        reach = np.asarray(np.cumprod(rng.random((2, 3)), axis=1), dtype=np.float64)
        extra = np.cumsum(rng.random(6)) * 0.01
        cost = StepCost(base=0.02, extra=extra, token=0.002)
        found = shared_out(reach, cost, 40.0)

        worths = {
            (first, second): float(reach[0, :first].sum() + reach[1, :second].sum())
            - 40.0 * (cost.seconds(first + second) - cost.base)
            for first, second in itertools.product(range(4), repeat=2)
        }
        assert worths[(found[0], found[1])] == pytest.approx(max(worths.values()))


def test_what_nobody_proposes_is_not_drafted_where_it_costs_nothing() -> None:
    reach = np.array([[0.9, 0.0], [0.0, 0.0]])
    cost = StepCost(base=0.02, extra=np.full(4, 1e-9), token=1e-9)
    assert shared_out(reach, cost, 50.0).tolist() == [1, 0]
    assert shared_out(reach, None, 0.0).tolist() == [1, 0]
