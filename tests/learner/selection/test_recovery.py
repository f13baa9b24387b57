"""Long regimes: who comes back, who does not, and that nobody's weights wear out."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection import DEFAULT_POLICY
from tests.learner.selection.teaching import FULL_INFORMATION, make

REGIME = 2000
TRACKERS = (
    "ada_normal_hedge_grid",
    "discounted_follow_the_leader",
    "fixed_share",
    "mixing_past_posteriors",
)
WITHOUT_FORGETTING = tuple(name for name in FULL_INFORMATION if name not in TRACKERS)


def regimes(num_drafters: int, seed: int | None) -> NDArray[np.float64]:
    """Drafter 0 is best for 2,000 windows, then drafter 1; means as losses, or drawn 0 and 1."""
    means = np.full((2 * REGIME, num_drafters), 0.6)
    means[:REGIME, 0], means[REGIME:, 1] = 0.2, 0.2
    if seed is None:
        return means
    drawn = np.random.default_rng(seed).random(means.shape) < means
    return np.asarray(drawn, dtype=np.float64)


def windows_until_half(name: str, losses: NDArray[np.float64]) -> int:
    """Windows after the change until the new best has half the mass; a regime if it never has."""
    after = make(name, losses.shape[1]).learn_windows(losses)[REGIME:, 1]
    return int(np.argmax(after >= 0.5)) if np.any(after >= 0.5) else REGIME


@pytest.mark.parametrize("num_drafters", [2, 8, 22])
@pytest.mark.parametrize("name", TRACKERS)
def test_trackers_recover_within_fifty_windows(name: str, num_drafters: int) -> None:
    assert DEFAULT_POLICY in TRACKERS
    for seed in (None, 0, 1, 2, 3):
        assert windows_until_half(name, regimes(num_drafters, seed)) <= 50


@pytest.mark.parametrize("num_drafters", [2, 8])
@pytest.mark.parametrize("name", [DEFAULT_POLICY, "fixed_share"])
def test_the_most_probable_drafter_is_the_new_best_within_fifty_windows(
    name: str, num_drafters: int
) -> None:
    """And stays it: the choice ``argmax`` of both plays the best in 95 of 100 windows."""
    for seed in (None, 0, 1, 2, 3):
        leading = make(name, num_drafters).learn_windows(regimes(num_drafters, seed)).argmax(axis=1)
        assert np.mean(leading[REGIME + 50 :] == 1) > 0.95


@pytest.mark.parametrize("name", WITHOUT_FORGETTING)
def test_carried_without_forgetting_no_policy_recovers(name: str) -> None:
    """NormalHedge, as HedgeSpec has it, among them: it must be restarted, or replaced."""
    assert "normal_hedge" in WITHOUT_FORGETTING
    for seed in (None, 0):
        assert windows_until_half(name, regimes(2, seed)) > 1000


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_weights_do_not_wear_out_where_multiplied_floats_do(name: str) -> None:
    """Losses 0.3, 0.6, 0.9: 32-bit weights, multiplied, stand at 0.6, 0.2, 0.2 from 800 on."""
    losses = np.array([0.3, 0.6, 0.9])
    multiplied = np.ones(3, dtype=np.float32)
    for _ in range(12_000):
        multiplied *= np.exp(-0.5 * losses).astype(np.float32)
    np.testing.assert_allclose(multiplied / multiplied.sum(), [0.6, 0.2, 0.2], atol=1e-6)
    after = make(name, 3).learn_windows(np.tile(losses, (12_000, 1)))
    assert after[200:, 0].min() > 0.95
