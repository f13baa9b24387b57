"""Hedge: exact weights over long runs, where multiplied ones fail."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection.hedge import Hedge

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


@pytest.mark.parametrize("rate", [-1.0, np.nan, np.inf])
def test_invalid_learning_rate_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="learning_rate="):
        Hedge(3, learning_rate=rate)
