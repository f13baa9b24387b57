"""Hedge: exact weights over long runs, and its bound."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection.hedge import Hedge
from tests.learner.selection.sequences import SEQUENCES, regrets_of_play

LOSSES = np.array([0.3, 0.6, 0.9])


def softmax(exponents: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(exponents - exponents.max())
    return np.asarray(weights / weights.sum())


def test_weights_stay_exact_for_twelve_thousand_rounds_where_multiplied_ones_fail() -> None:
    after = Hedge(3, learning_rate=0.5).learn_windows(np.tile(LOSSES, (12_000, 1)))
    multiplied = np.ones(3, dtype=np.float32)
    factor = np.exp(-0.5 * LOSSES).astype(np.float32)
    for step, probabilities in enumerate(after, start=1):
        multiplied *= factor
        np.testing.assert_allclose(probabilities, softmax(-0.5 * step * LOSSES), atol=1e-9, rtol=0)
    stuck = multiplied / multiplied.sum()
    np.testing.assert_allclose(stuck, [0.6, 0.2, 0.2], atol=1e-6)
    np.testing.assert_allclose(after[-1], [1.0, 0.0, 0.0], atol=1e-9)


def test_the_rate_without_horizon_follows_the_book() -> None:
    after = Hedge(3).learn_windows(np.tile(LOSSES, (50, 1)))
    for step, probabilities in enumerate(after, start=1):
        rate = np.sqrt(8 * np.log(3) / (step + 1))
        np.testing.assert_allclose(probabilities, softmax(-rate * step * LOSSES), rtol=1e-9)


@pytest.mark.parametrize("delay", [0, 1, 8, 20])
@pytest.mark.parametrize("name", SEQUENCES)
def test_regret_keeps_its_bound(name: str, delay: int) -> None:
    losses = SEQUENCES[name]
    num_rounds, num_drafters = losses.shape
    prior = np.random.default_rng(5).dirichlet(np.ones(num_drafters)) * 0.9 + 0.1 / num_drafters
    rates = np.sqrt(8 * np.log(num_drafters) / np.arange(1, num_rounds + 1))
    bounds = np.log(1 / prior) / rates[-1] + rates.sum() / 8
    bounds += delay * (1 + rates.sum() / 2)
    regrets = regrets_of_play(Hedge(num_drafters, prior=prior), losses, delay)
    assert np.all(regrets <= bounds + 1e-9)


def test_the_uniform_bound_is_not_vacuous() -> None:
    """The adversary that always hurts the heaviest drafter reaches a good part of it."""
    losses = SEQUENCES["alternating"]
    bound = 1.07 * np.sqrt(len(losses) * np.log(losses.shape[1]))
    assert regrets_of_play(Hedge(losses.shape[1]), losses, 0).max() <= bound < len(losses) / 10


@pytest.mark.parametrize("rate", [-1.0, np.nan, np.inf])
def test_invalid_learning_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="learning_rate="):
        Hedge(3, learning_rate=rate)
