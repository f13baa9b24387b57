"""NormalHedge: its equation solved, and its corners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from learner.selection.normal_hedge import NormalHedge, scaled_inverse_c, weigh
from tests.learner.selection.play import in_time, play_windows


def weights(regrets: list[float], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    written = np.full(len(regrets), np.nan)
    weigh(np.array(regrets), prior, written)
    return written


@settings(max_examples=200, deadline=None)
@given(
    regrets=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    seed=st.integers(0, 2**16),
    scale=st.sampled_from([1e-200, 1e-6, 1.0, 1e9]),
)
def test_the_mean_exponential_equals_e(regrets: list[float], seed: int, scale: float) -> None:
    values = np.maximum(np.array(regrets) * scale, 0.0)
    if not values.max() > 0.0:
        return
    prior = np.random.default_rng(seed).dirichlet(np.ones(len(regrets))) * 0.99
    prior += 0.01 / len(regrets)
    relative = values / values.max()
    x = scaled_inverse_c(relative, prior)
    assert float(prior @ np.exp(relative**2 * x)) == pytest.approx(np.e, abs=1e-9)


def test_the_solution_survives_a_prior_that_almost_excludes_the_leader() -> None:
    prior = np.array([1e-300, 1.0])
    relative = np.array([1.0, 0.5])
    x = scaled_inverse_c(relative, prior)
    assert float(prior @ np.exp(relative**2 * x)) == pytest.approx(np.e, abs=1e-9)


def test_weights_follow_the_formula() -> None:
    regrets, prior = [3.0, 1.0, -2.0, 2.0], np.array([0.1, 0.2, 0.3, 0.4])
    positive = np.maximum(np.array(regrets), 0.0)
    c = 9.0 / (2.0 * scaled_inverse_c(positive / 3.0, prior))
    expected = prior * positive / c * np.exp(positive**2 / (2 * c))
    np.testing.assert_allclose(weights(regrets, prior), expected / expected.sum(), rtol=1e-9)


def test_a_drafter_worse_than_the_mixture_gets_nothing() -> None:
    np.testing.assert_array_equal(weights([1.0, -1.0], np.array([0.5, 0.5])), [1.0, 0.0])


@pytest.mark.parametrize("regrets", [[0.0, 0.0, 0.0], [-1.0, -2.0, -3.0], [1e-16, -1e-16, 0.0]])
def test_without_a_positive_regret_the_prior_is_played(regrets: list[float]) -> None:
    prior = np.array([0.2, 0.3, 0.5])
    np.testing.assert_array_equal(weights(regrets, prior), prior)


def test_equal_regrets_share_by_the_prior() -> None:
    prior = np.array([0.2, 0.3, 0.5])
    np.testing.assert_allclose(weights([4.0] * 3, prior), prior, rtol=1e-12)


def test_regret_to_a_share_of_equally_good_drafters_does_not_grow_with_their_number() -> None:
    """Half of 64 drafters are good: the regret is that of two drafters, not of 64."""
    losses = np.random.default_rng(0).random((1500, 1)) * np.ones((1, 64))
    losses[:, 32:] = np.minimum(losses[:, 32:] + 0.3, 1.0)
    many = play_windows(NormalHedge(64), losses, in_time(1500)).regrets.max()
    pair = np.ascontiguousarray(losses[:, [0, 63]])
    two = play_windows(NormalHedge(2), pair, in_time(1500)).regrets.max()
    assert many == pytest.approx(two, rel=1e-6)
