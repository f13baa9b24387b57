"""What steps cost, and the choice of how much to draft by it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from inference.vllm_plugin.choosing import pays_to_begin, token_price, worthwhile
from inference.vllm_plugin.step_costs import StepCost, StepCosts, batch_class


def measured(base: float, first: float, token: float, *, num_rows: int = 1) -> StepCosts:
    costs, rng = StepCosts(), np.random.default_rng(0)
    for _ in range(400):
        drafted = int(rng.integers(0, 5)) * num_rows
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
    assert costs.cost(1) == costs.cost(4)
    assert StepCosts().cost(1) is None
    assert StepCosts().rate(1) == 0.0


def test_a_step_that_something_else_held_up_is_left_out() -> None:
    costs = measured(0.016, 0.0, 0.001)
    before = costs.cost(1)
    costs.observe(1, 0, 1, 5.0, 0.0)
    assert costs.cost(1) == before


def test_what_was_measured_long_ago_is_tried_again() -> None:
    costs = measured(0.01, 0.05, 0.01)
    dear = costs.cost(1)
    for _ in range(3000):
        costs.observe(1, 0, 1, 0.01, 0.0)
    cheap = costs.cost(1)
    assert dear is not None
    assert cheap is not None
    assert cheap.seconds(1) < 0.3 * dear.seconds(1)


def test_batch_sizes_fall_into_classes_that_double() -> None:
    assert [batch_class(n) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [0, 1, 2, 2, 3, 3, 4, 4]


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
    assert token_price(StepCost(base=0.016, first=0.0, token=0.002), 60.0) == pytest.approx(0.12)
    assert 0.0 < token_price(None, 0.0) < 0.2


def test_a_batch_begins_to_draft_only_if_all_its_rows_earn_what_that_costs() -> None:
    cost = StepCost(base=0.016, first=0.01, token=0.001)
    assert not pays_to_begin(np.array([0.2, 0.2]), cost, 60.0)
    assert pays_to_begin(np.array([0.4, 0.4]), cost, 60.0)
