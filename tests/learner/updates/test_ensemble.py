"""Experts are weighed by what they lose before they learn, and served as one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from learner.updates.ensemble import Ensemble, EnsembleSettings
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.rule import UpdateRefusedError, Weights
from tests.learner.updates.tensors import distance_to, not_a_number, same, weights

PLAIN = OnlineGradientSettings(form="projected", learning_rate=0.02, max_gradient_norm=math.inf)


def test_rates_form_a_geometric_grid_around_the_given_one() -> None:
    settings = EnsembleSettings(
        gradient=OnlineGradientSettings(learning_rate=0.1), num_experts=3, grid_ratio=2.0
    )
    assert settings.learning_rates == pytest.approx((0.05, 0.1, 0.2))
    assert EnsembleSettings(num_experts=4, grid_ratio=4.0).learning_rates == pytest.approx(
        (1.25e-4, 5e-4, 2e-3, 8e-3)
    )


def test_one_expert_is_the_online_gradient() -> None:
    for backward in ("each", "shared"):
        rule = Ensemble(weights(), EnsembleSettings(num_experts=1, backward=backward))
        online = OnlineGradient(weights(), OnlineGradientSettings())
        for step in range(10):
            rule.step(distance_to(0.1 * step))
            online.step(distance_to(0.1 * step))
        assert same(rule.served_weights, online.served_weights)
        assert rule.probabilities.tolist() == [1.0]


def test_experts_of_their_own_gradient_are_online_gradients_of_the_grid() -> None:
    settings = EnsembleSettings(gradient=PLAIN, restarts=False)
    rule = Ensemble(weights(), settings)
    alone = [
        OnlineGradient(
            weights(),
            OnlineGradientSettings(
                form="projected", learning_rate=rate, max_gradient_norm=math.inf
            ),
        )
        for rate in settings.learning_rates
    ]
    for step in range(10):
        loss = distance_to(0.1 * step)
        rule.step(loss)
        for one in alone:
            one.step(loss)
    for found, one in zip(rule.expert_weights, alone, strict=True):
        assert same(found, one.weights)


def test_meta_weights_are_those_of_hedge_on_the_losses_before_learning() -> None:
    """Prequential: the loss of a batch is taken before any expert has learned from it."""
    settings = EnsembleSettings(gradient=PLAIN, meta_rate=20.0, share=0.01, loss_scale=500.0)
    rule = Ensemble(weights(), settings)
    expected = np.full(3, 1 / 3)
    for step in range(12):
        loss = distance_to(0.2 * step)
        values = np.array([float(loss(one)) for one in rule.expert_weights])
        report = rule.step(loss)
        assert report.loss == pytest.approx(expected @ values, rel=1e-5)
        expected = expected * np.exp(-20.0 * (values - values.min()) / 500.0)
        expected = 0.99 * expected / expected.sum() + 0.01 / 3
        assert rule.probabilities == pytest.approx(expected, rel=1e-5)
    assert rule.probabilities.max() > 0.4


def test_served_is_the_average_of_the_parameters_or_the_best_expert() -> None:
    average = Ensemble(weights(), EnsembleSettings(gradient=PLAIN))
    best = Ensemble(weights(), EnsembleSettings(gradient=PLAIN, serve="best"))
    for _ in range(5):
        average.step(distance_to(3.0))
        best.step(distance_to(3.0))
    mixed = sum(
        p * one["matrix"]
        for p, one in zip(average.probabilities, average.expert_weights, strict=True)
    )
    torch.testing.assert_close(average.served_weights["matrix"], mixed)
    index = int(best.probabilities.argmax())
    assert same(best.served_weights, best.expert_weights[index])
    assert not same(best.served_weights, average.served_weights)


@pytest.mark.parametrize(
    ("options", "forwards", "backwards"),
    [
        ({}, 3, 3),
        ({"backward": "shared"}, 4, 1),
        ({"backward": "shared", "losses": "surrogate"}, 1, 1),
    ],
)
def test_the_reported_cost_is_what_was_evaluated(
    options: dict[str, str], forwards: int, backwards: int
) -> None:
    rule = Ensemble(weights(), EnsembleSettings(gradient=PLAIN, **options))  # type: ignore[arg-type]
    counts = {True: 0, False: 0}

    def loss(found: Weights) -> torch.Tensor:
        value = distance_to(1.0)(found)
        counts[value.requires_grad] += 1
        return value

    report = rule.step(loss)
    assert (report.num_forwards, report.num_backwards) == (forwards, backwards)
    assert (counts[True] + counts[False], counts[True]) == (forwards, backwards)


@pytest.mark.parametrize("losses", ["measured", "surrogate"])
def test_a_shared_gradient_is_that_of_the_served_weights(losses: str) -> None:
    settings = EnsembleSettings(
        gradient=PLAIN,
        backward="shared",
        losses=losses,  # type: ignore[arg-type]
        restarts=False,
    )
    rule = Ensemble(weights(), settings)
    rule.step(distance_to(1.0))
    served, before = rule.served_weights, rule.expert_weights
    before = tuple({k: v.clone() for k, v in one.items()} for one in before)
    rule.step(distance_to(1.0))
    gradient = {name: 2.0 * (tensor - 1.0) for name, tensor in served.items()}
    for old, new, rate in zip(before, rule.expert_weights, settings.learning_rates, strict=True):
        for name in old:
            torch.testing.assert_close(new[name], old[name] - rate * gradient[name])


def test_the_weight_of_the_best_rate_rises_and_comes_back_after_a_change() -> None:
    """C2: a long calm is against the large rate, a jump asks for it, and the calm takes it back."""
    noise = np.random.default_rng(0)
    gradient = OnlineGradientSettings(
        form="projected", learning_rate=0.05, max_gradient_norm=math.inf
    )
    settings = EnsembleSettings(
        gradient=gradient, grid_ratio=8.0, meta_rate=4.0, loss_scale=4.0, restarts=False
    )
    rule = Ensemble({"x": torch.zeros(1)}, settings)

    def play(target: float, count: int) -> None:
        for _ in range(count):
            rule.step(distance_to(target + noise.normal(0.0, 1.0)))

    play(0.0, 300)
    assert rule.probabilities[2] < 0.1
    play(8.0, 8)
    assert rule.probabilities[2] > 0.5
    play(8.0, 300)
    assert rule.probabilities[2] < 0.1


def test_an_expert_that_is_lost_goes_on_from_the_best_one() -> None:
    gradient = OnlineGradientSettings(
        form="projected", learning_rate=0.4, max_gradient_norm=math.inf, max_step_norm=1e9
    )
    start = {"x": torch.full((1,), 5.0)}
    kept = Ensemble(start, EnsembleSettings(gradient=gradient))
    lost = Ensemble(start, EnsembleSettings(gradient=gradient, restarts=False))
    for _ in range(12):
        for rule in (kept, lost):
            rule.step(distance_to(0.0))
    # A rate of 1.2 turns a distance x into -1.4 x.
    assert abs(float(lost.expert_weights[2]["x"])) > 100.0
    assert kept.num_restarts > 0
    assert abs(float(kept.expert_weights[2]["x"])) < 5.0
    assert abs(float(kept.served_weights["x"])) < 0.1 < abs(float(lost.served_weights["x"]))


def test_one_expert_that_is_not_finite_stops_only_itself() -> None:
    """B4."""
    rule = Ensemble(weights(), EnsembleSettings(gradient=PLAIN, restarts=False))
    rule.step(distance_to(2.0))
    middle = rule.expert_weights[1]["gain"].clone()

    def loss(found: Weights) -> torch.Tensor:
        is_middle = torch.equal(found["gain"], middle)
        return distance_to(2.0)(found) * (float("nan") if is_middle else 1.0)

    report = rule.step(loss)
    assert math.isfinite(report.loss)
    assert torch.equal(rule.expert_weights[1]["gain"], middle)
    assert rule.probabilities[1] == rule.probabilities.min() < 0.01
    assert all(torch.isfinite(tensor).all() for tensor in rule.served_weights.values())


@pytest.mark.parametrize("backward", ["each", "shared"])
def test_invalid_losses_leave_everything_as_it_was(backward: str) -> None:
    """B4."""
    rule = Ensemble(weights(), EnsembleSettings(backward=backward))  # type: ignore[arg-type]
    rule.step(distance_to(1.0))
    before = rule.state()
    with pytest.raises(UpdateRefusedError, match="loss nan"):
        rule.step(not_a_number)
    assert same(rule.state(), before)


@pytest.mark.parametrize("backward", ["each", "shared"])
def test_a_restored_state_goes_on_bit_for_bit(backward: str) -> None:
    settings = EnsembleSettings(
        gradient=OnlineGradientSettings(step_size="accumulated_delay", radius=3.0),
        backward=backward,  # type: ignore[arg-type]
    )
    whole = Ensemble(weights(), settings)
    for step in range(7):
        whole.step(distance_to(0.5), delay_updates=step)
    restored = Ensemble.from_state(whole.state(), settings)
    assert same(whole.served_weights, restored.served_weights)
    for step in range(5):
        whole.step(distance_to(0.7), delay_updates=step)
        restored.step(distance_to(0.7), delay_updates=step)
    assert same(whole.state(), restored.state())


def test_another_number_of_experts_begins_from_what_was_served() -> None:
    rule = Ensemble(weights(), EnsembleSettings(gradient=PLAIN))
    for _ in range(3):
        rule.step(distance_to(2.0))
    more = Ensemble.from_state(rule.state(), EnsembleSettings(gradient=PLAIN, num_experts=5))
    assert len(more.expert_weights) == 5
    assert same(more.served_weights, rule.served_weights)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts", 0),
        ("grid_ratio", 1.0),
        ("meta_rate", 0.0),
        ("loss_scale", math.inf),
        ("share", 0),
    ],
)
def test_invalid_settings_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}"):
        EnsembleSettings(**{name: value})  # type: ignore[arg-type]


def test_invalid_surrogate_losses_without_a_shared_gradient_are_refused() -> None:
    with pytest.raises(ValueError, match="backward='each'"):
        EnsembleSettings(losses="surrogate")


def test_what_none_has_learned_from_weighs_instead_of_the_batches_of_the_steps() -> None:
    """On batches drawn from a memory the largest rate looks best: it knows them by heart."""
    rule = Ensemble(weights(), EnsembleSettings(gradient=PLAIN, restarts=False))
    for _ in range(20):
        rule.weigh(distance_to(-1.0))
        told = rule.probabilities
        rule.step(distance_to(1.0))
        assert np.array_equal(rule.probabilities, told)
    assert rule.probabilities.argmax() == 0

    rule = Ensemble(weights(), EnsembleSettings(gradient=PLAIN, restarts=False))
    for _ in range(20):
        rule.step(distance_to(1.0))
    assert rule.probabilities.argmax() == 2


def test_invalid_losses_of_what_is_new_weigh_nothing() -> None:
    rule = Ensemble(weights(), EnsembleSettings(gradient=PLAIN))
    before = rule.probabilities
    rule.weigh(not_a_number)
    assert np.array_equal(rule.probabilities, before)
