"""Mixing past posteriors: its formula, and what it is for."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection import policy_from_name
from learner.selection.mixing_past_posteriors import MixingPastPosteriors


def test_weights_follow_the_formula() -> None:
    """The share goes to the mean of the prior and of all posteriors but the present one."""
    prior, losses = np.array([0.5, 0.3, 0.2]), np.random.default_rng(0).random((40, 3))
    after = MixingPastPosteriors(3, prior=prior, learning_rate=2.0, share=0.1).learn_windows(losses)
    posteriors, weights = [prior], prior
    for row, probabilities in zip(losses, after, strict=True):
        posterior = weights * np.exp(-2.0 * row)
        posterior /= posterior.sum()
        weights = 0.9 * posterior + 0.1 * np.mean(posteriors, axis=0)
        posteriors.append(posterior)
        np.testing.assert_allclose(probabilities, weights, rtol=1e-12)


def returning(num_drafters: int) -> NDArray[np.float64]:
    """Three of many drafters are the best in turn, for 50 windows each, again and again."""
    best = np.arange(3000) // 50 % 3
    means = np.where(best[:, None] == np.arange(num_drafters), 0.3, 0.6)
    drawn = np.random.default_rng(0).random(means.shape) < means
    return np.asarray(drawn, dtype=np.float64)


@pytest.mark.parametrize("num_drafters", [22, 64])
def test_few_of_many_drafters_are_found_again_sooner_than_by_fixed_share(num_drafters: int) -> None:
    losses = returning(num_drafters)
    lost = {
        name: (policy_from_name(name, num_drafters).learn_windows(losses)[1000:-1] * losses[1001:])
        .sum(axis=1)
        .mean()
        for name in ("mixing_past_posteriors", "fixed_share")
    }
    assert lost["mixing_past_posteriors"] < lost["fixed_share"] - 0.04
