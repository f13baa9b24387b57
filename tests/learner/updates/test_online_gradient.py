"""Steps on float32 masters: they move, they are guarded, and they go on bit for bit."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch

from learner.updates.online_gradient import (
    OnlineGradient,
    OnlineGradientSettings,
    UpdateRefusedError,
    Weights,
)


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return two parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn((4, 3), generator=generator),
        "gain": torch.ones(3),
    }


def distance_to(target: float) -> Callable[[Weights], torch.Tensor]:
    """Return a loss that is smallest where all weights are ``target``."""

    def loss(found: Weights) -> torch.Tensor:
        squares = [(tensor - target).square().sum() for tensor in found.values()]
        return torch.stack(squares).sum()

    return loss


def same(left: Weights, right: Weights) -> bool:
    """Return whether two sets of tensors are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


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


def nan_loss(found: Weights) -> torch.Tensor:
    """Return a loss that is not a number."""
    return found["gain"].sum() * float("nan")


def infinite_gradient(found: Weights) -> torch.Tensor:
    """Return a finite loss whose gradient is infinite: the root at zero."""
    return (found["gain"] * 0.0).sqrt().sum()


@pytest.mark.parametrize("num_steps_before", [0, 3])
@pytest.mark.parametrize(
    ("loss", "message"), [(nan_loss, "loss nan"), (infinite_gradient, "gradient of norm nan")]
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
