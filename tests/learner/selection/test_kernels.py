"""Choosing from probabilities: exact marginals, as few switches as they allow, and who sleeps."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection import kernels


def chosen(
    mode: int, steps: NDArray[np.float64], generator: np.random.Generator
) -> NDArray[np.int64]:
    """Choose along the steps (T, N), each time with what was chosen before."""
    previous, index = np.zeros(steps.shape[1]), -1
    found = np.empty(len(steps), dtype=np.int64)
    for turn, step in enumerate(steps):
        probabilities = step.copy()
        index = kernels.choose(mode, probabilities, previous, index, generator.random())
        previous, found[turn] = probabilities, index
    return found


def drifting(num_steps: int, num_drafters: int) -> NDArray[np.float64]:
    generator = np.random.default_rng(0)
    weights = np.exp(np.cumsum(generator.normal(0, 0.3, (num_steps, num_drafters)), axis=0))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


@pytest.mark.parametrize("mode", [kernels.SAMPLE, kernels.STICKY])
def test_marginals_are_the_probabilities_at_every_step(mode: int) -> None:
    steps = drifting(6, 4)
    generator = np.random.default_rng(1)
    runs = np.array([chosen(mode, steps, generator) for _ in range(20_000)])
    for turn, step in enumerate(steps):
        counts = np.bincount(runs[:, turn], minlength=4) / len(runs)
        np.testing.assert_allclose(counts, step, atol=0.015)


def test_sticky_switches_as_rarely_as_the_marginals_allow() -> None:
    """The chance of a switch is the total variation distance of one step to the next."""
    steps = drifting(6, 4)
    generator = np.random.default_rng(2)
    runs = np.array([chosen(kernels.STICKY, steps, generator) for _ in range(20_000)])
    fewest = 0.5 * np.abs(np.diff(steps, axis=0)).sum(axis=1)
    np.testing.assert_allclose((np.diff(runs, axis=1) != 0).mean(axis=0), fewest, atol=0.015)
    sampled = np.array([chosen(kernels.SAMPLE, steps, generator) for _ in range(2000)])
    assert (np.diff(runs, axis=1) != 0).mean() < 0.5 * (np.diff(sampled, axis=1) != 0).mean()


def test_sticky_stays_while_nothing_moves() -> None:
    steps = np.tile([0.1, 0.4, 0.5], (500, 1))
    assert len(set(chosen(kernels.STICKY, steps, np.random.default_rng(3)))) == 1


def test_argmax_takes_the_largest_and_draws_ties() -> None:
    generator = np.random.default_rng(4)
    steps = np.tile([0.2, 0.4, 0.4], (4000, 1))
    counts = np.bincount(chosen(kernels.ARGMAX, steps, generator), minlength=3)
    assert counts[0] == 0 and abs(counts[1] - 2000) < 150


@pytest.mark.parametrize("coin", [0.0, 0.3, float(np.nextafter(1.0, 0.0))])
def test_a_drafter_of_probability_zero_is_never_drawn(coin: float) -> None:
    assert kernels.draw(np.array([0.0, 0.3, 0.7, 0.0]), coin) in (1, 2)
    assert kernels.draw(np.array([0.0, 1.0, 0.0]), coin) == 1
    previous, now = np.array([0.0, 0.5, 0.5]), np.array([0.5, 0.0, 0.5])
    assert kernels.draw_sticky(now, previous, 1, coin) == 0


def test_the_awake_share_the_mass_and_equally_if_all_of_it_sleeps() -> None:
    out = np.empty(3)
    is_awake = np.array([True, False, True])
    kernels.masked_probabilities(np.array([0.2, 0.6, 0.2]), is_awake, out)
    np.testing.assert_allclose(out, [0.5, 0.0, 0.5])
    kernels.masked_probabilities(np.array([0.0, 1.0, 0.0]), is_awake, out)
    np.testing.assert_allclose(out, [0.5, 0.0, 0.5])


@pytest.mark.parametrize(
    ("losses", "probabilities", "expected"),
    [
        ([0.2, np.nan, 0.6], [0.25, 0.5, 0.25], [0.2, 0.4, 0.6]),
        ([0.2, np.nan, 0.6], [0.0, 1.0, 0.0], [0.2, 0.4, 0.6]),
        ([0.2, np.nan, np.nan], [0.1, 0.5, 0.4], [0.2, 0.2, 0.2]),
        ([np.nan, np.nan, np.nan], [0.1, 0.5, 0.4], [0.0, 0.0, 0.0]),
        ([0.2, 0.3, 0.6], [0.1, 0.5, 0.4], [0.2, 0.3, 0.6]),
    ],
)
def test_sleepers_are_charged_what_the_awake_lost_together(
    losses: list[float], probabilities: list[float], expected: list[float]
) -> None:
    charged = np.array(losses)
    kernels.charge_sleeping(charged, np.array(probabilities))
    np.testing.assert_allclose(charged, expected)
