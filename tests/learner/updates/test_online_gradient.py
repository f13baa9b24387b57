"""Steps on float32 masters: they move, they are guarded, and they go on bit for bit."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from learner.updates.online_gradient import (
    Form,
    OnlineGradient,
    OnlineGradientSettings,
    StepSize,
)
from learner.updates.rule import (
    UpdateRefusedError,
    Weights,
    difference,
    euclidean_norm,
    guarded_gradient,
)
from tests.learner.updates.tensors import distance_to, not_a_number, same, slope, weights


def test_steps_reach_the_minimum() -> None:
    update = OnlineGradient(weights(), OnlineGradientSettings(learning_rate=0.05))
    losses = [update.step(distance_to(2.0)).loss for _ in range(400)]
    assert losses[-1] < 1e-2 < losses[0]
    report = update.step(distance_to(2.0))
    assert report.loss >= 0.0
    assert report.step_norm > 0.0


def test_small_steps_move_weights_that_bfloat16_would_hold_fast() -> None:
    """B3: 100 steps of 6e-4 from 1.0."""
    start = {"weight": torch.ones(8, dtype=torch.bfloat16)}
    update = OnlineGradient(start, OnlineGradientSettings(learning_rate=6e-4))
    moving = start["weight"].clone()
    for _ in range(100):
        update.step(distance_to(100.0))
        moving += 6e-4
    assert moving.eq(1.0).all()
    assert update.weights["weight"].dtype == torch.float32
    torch.testing.assert_close(update.weights["weight"], torch.full((8,), 1.06), atol=2e-3, rtol=0)
    assert update.weights["weight"].bfloat16().ne(1.0).all()


def infinite_gradient(found: Weights) -> torch.Tensor:
    """Return a finite loss whose gradient is infinite: the root at zero."""
    return (found["gain"] * 0.0).sqrt().sum()


@pytest.mark.parametrize("num_steps_before", [0, 3])
@pytest.mark.parametrize(
    ("loss", "message"), [(not_a_number, "loss nan"), (infinite_gradient, "gradient of norm nan")]
)
def test_invalid_losses_and_gradients_leave_everything_as_it_was(
    loss: Callable[[Weights], torch.Tensor], message: str, num_steps_before: int
) -> None:
    """B4."""
    update = OnlineGradient(weights(), OnlineGradientSettings())
    for _ in range(num_steps_before):
        update.step(distance_to(1.0))
    before = update.state()
    with pytest.raises(UpdateRefusedError, match=message):
        update.step(loss)
    assert same(update.state(), before)
    clean = OnlineGradient.from_state(before, OnlineGradientSettings())
    update.step(distance_to(1.0))
    clean.step(distance_to(1.0))
    assert same(update.state(), clean.state())


@pytest.mark.parametrize("num_steps_before", [0, 3])
def test_a_step_that_is_too_long_is_taken_back(num_steps_before: int) -> None:
    """B4."""
    update = OnlineGradient(weights(), OnlineGradientSettings())
    for _ in range(num_steps_before):
        update.step(distance_to(1.0))
    before = update.state()
    strict = OnlineGradient.from_state(before, OnlineGradientSettings(max_step_norm=1e-6))
    with pytest.raises(UpdateRefusedError, match="expected at most 1e-06"):
        strict.step(distance_to(1.0))
    assert same(strict.state(), before)


def test_a_gradient_that_is_too_long_is_scaled_down() -> None:
    update = OnlineGradient(weights(), OnlineGradientSettings(max_gradient_norm=0.5))
    report = update.step(lambda found: 1e6 * found["gain"].sum())
    assert report.gradient_norm > 1e6
    norm = torch.stack([p.square().sum() for p in momenta(update)]).sum().sqrt()
    # The first moment is (1 - 0.9) of the clipped gradient.
    assert float(norm) == pytest.approx(0.05, rel=1e-4)


def momenta(update: OnlineGradient) -> list[torch.Tensor]:
    """Return the first moments."""
    return [value for key, value in update.state().items() if key.startswith("exp_avg.")]


def test_a_restored_state_goes_on_bit_for_bit() -> None:
    settings = OnlineGradientSettings(learning_rate=0.01)
    whole = OnlineGradient(weights(), settings)
    for _ in range(7):
        whole.step(distance_to(0.5))
    restored = OnlineGradient.from_state(whole.state(), settings)
    for _ in range(5):
        whole.step(distance_to(0.7))
        restored.step(distance_to(0.7))
    assert same(whole.state(), restored.state())


def test_the_order_of_parameters_does_not_matter_to_the_last_bit() -> None:
    """Files give tensors back in an order of their own."""
    generator = torch.Generator().manual_seed(3)
    first = {
        name: torch.randn(size, generator=generator)
        for name, size in (("mix", 501), ("out", 302), ("gain", 17), ("bias", 5))
    }

    def loss(found: Weights) -> torch.Tensor:
        return torch.stack([found[name].square().sum() for name in sorted(found)]).sum()

    reordered = {name: first[name] for name in reversed(first)}
    ours, theirs = (OnlineGradient(x, OnlineGradientSettings()) for x in (first, reordered))
    for _ in range(20):
        assert ours.step(loss) == theirs.step(loss)
    assert same(ours.weights, theirs.weights)


def test_the_step_size_is_that_of_the_settings_also_after_a_restore() -> None:
    update = OnlineGradient(weights(), OnlineGradientSettings(learning_rate=1e-2))
    for _ in range(5):
        update.step(distance_to(50.0))
    faster = OnlineGradient.from_state(update.state(), OnlineGradientSettings(learning_rate=1e-1))
    slow, fast = update.step(distance_to(50.0)), faster.step(distance_to(50.0))
    assert fast.step_norm == pytest.approx(10.0 * slow.step_norm, rel=1e-3)


def test_the_state_is_a_copy() -> None:
    given = weights()
    update = OnlineGradient(given, OnlineGradientSettings(learning_rate=0.1))
    update.step(distance_to(5.0))
    state = update.state()
    kept = {key: value.clone() for key, value in state.items()}
    update.step(distance_to(5.0))
    assert same(state, kept)
    assert same(given, weights())


def test_invalid_state_with_half_its_moments_is_refused() -> None:
    update = OnlineGradient(weights(), OnlineGradientSettings())
    update.step(distance_to(1.0))
    state = update.state()
    del state["exp_avg_sq.gain"]
    with pytest.raises(ValueError, match="moments of gain"):
        OnlineGradient.from_state(state, OnlineGradientSettings())


def test_many_steps_keep_one_entry_per_parameter_and_no_memory() -> None:
    """B12."""
    update = OnlineGradient(weights(), OnlineGradientSettings(max_step_norm=0.2))

    def num_tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    def steps(count: int) -> None:
        for _ in range(count):
            update.step(distance_to(1.0))

    steps(10)
    before = num_tensors()
    steps(500)
    strict = OnlineGradient.from_state(update.state(), OnlineGradientSettings(max_step_norm=0.0))
    for _ in range(50):
        with pytest.raises(UpdateRefusedError):
            strict.step(distance_to(3.0))
    assert len(strict._optimizer.state) == len(update._optimizer.state) == len(weights())
    del strict
    assert num_tensors() <= before
    assert sorted(update.state()) == sorted(
        f"{key}.{name}" for key in ("weight", "exp_avg", "exp_avg_sq", "step") for name in weights()
    )


PLAIN = OnlineGradientSettings(form="projected", learning_rate=0.1, max_gradient_norm=math.inf)
START = {"x": torch.zeros(1)}


def test_the_projected_form_takes_the_step_of_theory() -> None:
    update = OnlineGradient(START, PLAIN)
    reports = [update.step(slope(value)) for value in (2.0, -1.0)]
    assert float(update.weights["x"]) == pytest.approx(-0.1 * (2.0 - 1.0))
    assert [report.step_norm for report in reports] == pytest.approx([0.2, 0.1])


@pytest.mark.parametrize("form", ["projected", "adamw"])
def test_weights_stay_in_the_ball_around_where_they_began(form: Form) -> None:
    settings = replace(PLAIN, form=form, radius=0.5)
    update = OnlineGradient(weights(), settings)
    for _ in range(20):
        update.step(distance_to(9.0))
    assert float(euclidean_norm(difference(update.weights, weights()))) == pytest.approx(0.5)
    restored = OnlineGradient.from_state(update.state(), settings)
    restored.step(distance_to(-9.0))
    for _ in range(20):
        restored.step(distance_to(-9.0))
    assert float(euclidean_norm(difference(restored.weights, weights()))) == pytest.approx(0.5)
    nearest = difference(restored.weights, weights())
    assert all(bool((tensor < 0.0).all()) for tensor in nearest.values())


@pytest.mark.parametrize(
    ("step_size", "expected"),
    [
        ("constant", [0.1, 0.1, 0.1]),
        ("average_delay", [0.1 / math.sqrt(x) for x in (1.0, 5.0 / 2.0, 9.0 / 3.0)]),
        ("accumulated_delay", [0.1 / math.sqrt(x) for x in (1.0, 5.0, 9.0)]),
    ],
)
def test_the_step_size_follows_the_delay_that_has_accumulated(
    step_size: StepSize, expected: list[float]
) -> None:
    settings = replace(PLAIN, step_size=step_size)
    update = OnlineGradient(START, settings)
    found = []
    for delay in (0, 3, 3):
        before = float(update.weights["x"])
        report = update.step(slope(1.0), delay_updates=delay)
        found.append(before - float(update.weights["x"]))
        assert report.step_size == pytest.approx(found[-1])
        update = OnlineGradient.from_state(update.state(), settings)
    assert found == pytest.approx(expected)


def test_a_refused_step_does_not_count_its_delay() -> None:
    settings = replace(PLAIN, step_size="accumulated_delay", max_step_norm=1.0)
    update = OnlineGradient(START, settings)
    update.step(slope(1.0))
    with pytest.raises(UpdateRefusedError, match="expected at most"):
        update.step(slope(1e6), delay_updates=50)
    assert update.step_size == pytest.approx(0.1)


def test_the_displacement_of_adamw_without_momentum_is_its_step() -> None:
    settings = OnlineGradientSettings(learning_rate=0.01, betas=(0.0, 0.9))
    update = OnlineGradient(weights(), settings)
    for _ in range(5):
        update.step(distance_to(1.0))
    before = {name: tensor.clone() for name, tensor in update.weights.items()}
    gradient = guarded_gradient(distance_to(3.0), before, max_norm=1.0).tensors
    update.apply(gradient)
    moved = difference(before, update.weights)
    for name, tensor in update.displacement(gradient).items():
        torch.testing.assert_close(tensor, moved[name], atol=1e-6, rtol=1e-3)
