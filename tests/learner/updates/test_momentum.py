"""Momentum is kept to compare with: an average of gradients, as long a step as without."""

from __future__ import annotations

import math

import pytest
import torch

from learner.updates.momentum import MomentumGradient, MomentumSettings
from learner.updates.online_gradient import Form, OnlineGradient, OnlineGradientSettings
from learner.updates.rule import UpdateRefusedError
from tests.learner.updates.tensors import distance_to, not_a_number, same, slope, weights

PLAIN = OnlineGradientSettings(form="projected", learning_rate=0.1, max_gradient_norm=math.inf)


def test_the_velocity_is_an_average_of_gradients() -> None:
    rule = MomentumGradient({"x": torch.zeros(1)}, MomentumSettings(gradient=PLAIN, momentum=0.5))
    expected, velocity = 0.0, 0.0
    for value in (1.0, -2.0, 4.0):
        velocity = 0.5 * velocity + 0.5 * value
        expected -= 0.1 * velocity
        rule.step(slope(value))
    assert float(rule.served_weights["x"]) == pytest.approx(expected)


@pytest.mark.parametrize("form", ["projected", "adamw"])
def test_without_momentum_it_is_the_online_gradient(form: Form) -> None:
    gradient = OnlineGradientSettings(form=form, betas=(0.0, 0.95))
    rule = MomentumGradient(weights(), MomentumSettings(gradient=gradient, momentum=0.0))
    online = OnlineGradient(weights(), gradient)
    for step in range(10):
        rule.step(distance_to(step))
        online.step(distance_to(step))
    assert same(rule.weights, online.weights)


@pytest.mark.parametrize("form", ["projected", "adamw"])
def test_a_restored_state_goes_on_bit_for_bit(form: Form) -> None:
    settings = MomentumSettings(gradient=OnlineGradientSettings(form=form))
    whole = MomentumGradient(weights(), settings)
    for _ in range(7):
        whole.step(distance_to(0.5))
    restored = MomentumGradient.from_state(whole.state(), settings)
    for _ in range(5):
        whole.step(distance_to(0.7))
        restored.step(distance_to(0.7))
    assert same(whole.state(), restored.state())


def test_invalid_losses_and_steps_leave_everything_as_it_was() -> None:
    """B4."""
    gradient = OnlineGradientSettings(
        form="projected", learning_rate=0.1, max_gradient_norm=math.inf, max_step_norm=2.0
    )
    rule = MomentumGradient({"x": torch.zeros(1)}, MomentumSettings(gradient=gradient))
    rule.step(slope(1.0))
    before = rule.state()
    with pytest.raises(UpdateRefusedError, match="loss nan"):
        rule.step(not_a_number)
    with pytest.raises(UpdateRefusedError, match="expected at most"):
        rule.step(slope(1e6))
    assert same(rule.state(), before)


def test_invalid_momentum_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"momentum=1\.0"):
        MomentumSettings(momentum=1.0)
