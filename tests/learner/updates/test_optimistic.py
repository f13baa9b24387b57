"""The hint is applied before serving, scaled by the delay, and is no momentum."""

from __future__ import annotations

import math

import pytest
import torch

from learner.updates.momentum import MomentumGradient, MomentumSettings
from learner.updates.online_gradient import Form, OnlineGradient, OnlineGradientSettings
from learner.updates.optimistic import OptimisticGradient, OptimisticSettings
from learner.updates.rule import UpdateRefusedError, UpdateRule
from tests.learner.updates.tensors import distance_to, not_a_number, same, slope, weights

PLAIN = OnlineGradientSettings(form="projected", learning_rate=0.1, max_gradient_norm=math.inf)
START = {"x": torch.zeros(1)}


def served(rule: UpdateRule) -> float:
    """Return the only weight that is served."""
    return float(rule.served_weights["x"])


@pytest.mark.parametrize("form", ["projected", "adamw"])
def test_with_a_hint_of_zero_it_is_the_online_gradient_to_the_last_bit(form: Form) -> None:
    gradient = OnlineGradientSettings(form=form, learning_rate=0.02, betas=(0.0, 0.95), radius=2.0)
    optimistic = OptimisticGradient(
        weights(), OptimisticSettings(gradient=gradient, hint_scale=0.0)
    )
    online = OnlineGradient(weights(), gradient)
    for step in range(30):
        loss = distance_to(math.sin(step))
        assert optimistic.step(loss, delay_updates=3) == online.step(loss, delay_updates=3)
        assert same(optimistic.served_weights, online.served_weights)


def test_before_the_first_gradient_there_is_no_hint() -> None:
    assert same(OptimisticGradient(weights(), OptimisticSettings()).served_weights, weights())


def test_played_points_follow_the_two_states_of_the_paper() -> None:
    """Unbounded, the play is w - eta (2 g_t - g_{t-1}), its gradient taken where it was played."""
    rule = OptimisticGradient(START, OptimisticSettings(gradient=PLAIN))
    slopes = [1.0, -2.0, 0.5, 3.0]
    found = [served(rule)]
    for value in slopes:
        rule.step(slope(value))
        found.append(served(rule))
    expected, before = [0.0], 0.0
    for value in slopes:
        expected.append(expected[-1] - 0.1 * (2.0 * value - before))
        before = value
    assert found == pytest.approx(expected, abs=1e-6)


def test_the_gradient_is_that_of_the_served_weights_not_of_the_anchor() -> None:
    rule = OptimisticGradient(START, OptimisticSettings(gradient=PLAIN))
    rule.step(slope(1.0))
    at_served, anchor = served(rule), float(rule.weights["x"])
    assert at_served != anchor
    report = rule.step(lambda found: (found["x"] - 1.0).square().sum())
    assert report.gradient_norm == pytest.approx(2.0 * abs(at_served - 1.0))
    assert report.loss == pytest.approx((at_served - 1.0) ** 2)
    assert float(rule.weights["x"]) == pytest.approx(anchor - 0.1 * 2.0 * (at_served - 1.0))


def test_it_is_not_momentum_when_the_gradient_turns() -> None:
    """At matched effective step: both go 0.1 per unit gradient as long as it is constant."""
    optimistic = OptimisticGradient(START, OptimisticSettings(gradient=PLAIN))
    momentum = MomentumGradient(START, MomentumSettings(gradient=PLAIN, momentum=0.9))
    rules: tuple[UpdateRule, ...] = (optimistic, momentum)
    for rule in rules:
        for _ in range(200):
            rule.step(slope(1.0))
    before = [served(rule) for rule in rules]
    for rule in rules:
        rule.step(slope(1.0))
    steady = [served(rule) - x for rule, x in zip(rules, before, strict=True)]
    assert steady == pytest.approx([-0.1, -0.1], rel=1e-3)
    before = [served(rule) for rule in rules]
    for rule in rules:
        rule.step(slope(-1.0))
    turned = [served(rule) - x for rule, x in zip(rules, before, strict=True)]
    # The hint is taken back and put the other way; the velocity goes on: -0.1 (0.9 - 0.1).
    assert turned == pytest.approx([0.3, -0.08], rel=1e-3)


def test_when_the_gradient_comes_and_goes_the_optimist_loses_less_than_momentum() -> None:
    """Blocks of one sign: the last gradient predicts the next, the old average does not."""
    slopes = ([1.0] * 8 + [-1.0] * 8) * 10
    losses = {}
    for rule in (
        OptimisticGradient(START, OptimisticSettings(gradient=PLAIN)),
        OnlineGradient(START, PLAIN),
        MomentumGradient(START, MomentumSettings(gradient=PLAIN, momentum=0.9)),
    ):
        total = 0.0
        for value in slopes:
            total += value * served(rule)
            rule.step(slope(value))
        losses[rule.name] = total
    assert losses["optimistic"] < losses["online_gradient"] < losses["momentum"]


@pytest.mark.parametrize(("delay", "ahead"), [(0, 1.0), (3, 4.0), (16, 17.0), (99, 17.0)])
def test_the_hint_covers_all_gradients_that_are_missing(delay: int, ahead: float) -> None:
    rule = OptimisticGradient(START, OptimisticSettings(gradient=PLAIN))
    rule.step(slope(2.0), delay_updates=delay)
    assert float(rule.weights["x"]) - served(rule) == pytest.approx(ahead * 0.1 * 2.0)


def test_a_hint_moves_no_further_than_a_step_may() -> None:
    gradient = OnlineGradientSettings(
        form="projected", learning_rate=0.1, max_gradient_norm=math.inf, max_step_norm=0.25
    )
    rule = OptimisticGradient(START, OptimisticSettings(gradient=gradient))
    rule.step(slope(2.0), delay_updates=10)
    assert float(rule.weights["x"]) - served(rule) == pytest.approx(0.25)


def test_anchor_and_play_stay_in_the_ball() -> None:
    gradient = OnlineGradientSettings(form="projected", learning_rate=0.1, radius=0.5)
    rule = OptimisticGradient(START, OptimisticSettings(gradient=gradient))
    for _ in range(20):
        rule.step(slope(1.0), delay_updates=4)
        assert served(rule) >= -0.5 - 1e-6
        assert float(rule.weights["x"]) >= -0.5 - 1e-6
    assert served(rule) == pytest.approx(-0.5)


@pytest.mark.parametrize("form", ["projected", "adamw"])
def test_a_restored_state_goes_on_bit_for_bit(form: Form) -> None:
    settings = OptimisticSettings(
        gradient=OnlineGradientSettings(form=form, radius=3.0, step_size="average_delay"),
        hint_decay=0.5,
    )
    whole = OptimisticGradient(weights(), settings)
    for step in range(7):
        whole.step(distance_to(0.5), delay_updates=step)
    restored = OptimisticGradient.from_state(whole.state(), settings)
    assert same(whole.served_weights, restored.served_weights)
    for step in range(5):
        whole.step(distance_to(0.7), delay_updates=step)
        restored.step(distance_to(0.7), delay_updates=step)
    assert same(whole.state(), restored.state())


def test_the_anchor_of_a_state_can_go_on_as_an_online_gradient() -> None:
    rule = OptimisticGradient(weights(), OptimisticSettings())
    rule.step(distance_to(0.5))
    online = OnlineGradient.from_state(rule.state(), OnlineGradientSettings())
    assert same(online.weights, rule.weights)


def test_invalid_losses_leave_everything_as_it_was() -> None:
    """B4."""
    rule = OptimisticGradient(weights(), OptimisticSettings())
    rule.step(distance_to(1.0))
    before, served_before = rule.state(), rule.served_weights
    with pytest.raises(UpdateRefusedError, match="loss nan"):
        rule.step(not_a_number)
    assert same(rule.state(), before)
    assert same(rule.served_weights, served_before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", 1.0), ("hint_decay", -0.1), ("hint_scale", math.nan), ("max_delay_updates", -1)],
)
def test_invalid_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        OptimisticSettings(**{name: value})  # type: ignore[arg-type]
