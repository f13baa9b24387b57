"""The stream prior: paired, decayed, floored."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.prior import PriorSettings, StreamPrior
from learner.selection.normal_hedge import NormalHedge

SETTINGS = PriorSettings(half_life_events=10, strength=20, shrink_windows=8, floor=0.06)
NAN = float("nan")


def taught(losses: list[list[float]], num_events: int) -> StreamPrior:
    values = np.array(losses)
    prior = StreamPrior.empty(values.shape[1])
    for _ in range(num_events):
        prior = prior.learned(values, SETTINGS)
    return prior


def test_without_evidence_all_drafters_are_equal() -> None:
    np.testing.assert_allclose(StreamPrior.empty(3).probabilities(SETTINGS), np.full(3, 1 / 3))
    assert StreamPrior.empty(0).probabilities(SETTINGS).shape == (0,)


def test_the_better_drafter_leads_and_nobody_falls_below_the_floor() -> None:
    prior = taught([[0.2, 0.8, 0.8]] * 10, 50)
    probabilities = prior.probabilities(SETTINGS)
    assert probabilities[0] > 0.9
    assert np.all(probabilities >= 0.06 / 3)
    assert probabilities.sum() == pytest.approx(1.0, abs=1e-12)


def test_where_all_are_awake_it_is_a_softmax_of_shrunk_mean_losses() -> None:
    generator = np.random.default_rng(0)
    losses = generator.random((30, 4))
    prior = StreamPrior.empty(4).learned(losses, SETTINGS)
    exponents = -20 * losses.mean(axis=0) * 30 / (30 + 8)
    expected = np.exp(exponents) / np.exp(exponents).sum()
    np.testing.assert_allclose(np.exp(prior.log_weights(SETTINGS)), expected, rtol=1e-12)


def test_a_drafter_that_sleeps_through_hard_windows_gains_nothing_by_it() -> None:
    """Equal drafters; one was scored on the easy half only."""
    prior = taught([[0.1, 0.1], [0.9, NAN]], 40)
    probabilities = prior.probabilities(SETTINGS)
    np.testing.assert_allclose(probabilities, [0.5, 0.5], atol=1e-12)


def test_a_window_in_which_all_sleep_changes_no_mean() -> None:
    prior = taught([[0.1, 0.3]], 10)
    more = prior.learned(np.array([[0.1, 0.3], [NAN, NAN]]), SETTINGS)
    less = prior.learned(np.array([[0.1, 0.3]]), SETTINGS)
    np.testing.assert_array_equal(more.excess_loss, less.excess_loss)
    np.testing.assert_array_equal(more.num_windows, less.num_windows)


def test_a_new_drafter_enters_with_an_average_share() -> None:
    prior = taught([[0.2, 0.4, 0.6]] * 5, 20).with_new(1)
    weights = prior.log_weights(SETTINGS)
    assert weights[3] == pytest.approx(weights[1])
    assert prior.probabilities(SETTINGS)[3] > 0.02


def test_evidence_halves_in_its_half_life_and_a_change_is_followed() -> None:
    prior = taught([[0.2, 0.8]] * 4, 200)
    idle = prior
    for _ in range(10):
        idle = idle.learned(np.full((1, 2), NAN), SETTINGS)
    np.testing.assert_allclose(idle.num_windows, prior.num_windows / 2)
    for _ in range(11):
        prior = prior.learned(np.array([[0.8, 0.2]] * 4), SETTINGS)
    assert prior.probabilities(SETTINGS)[1] > 0.5


def test_an_event_without_windows_changes_nothing() -> None:
    prior = taught([[0.2, 0.8]], 3)
    assert prior.learned(np.empty((0, 2)), SETTINGS) is prior


def test_twenty_thousand_events_stay_finite() -> None:
    prior = taught([[0.0, 1.0, NAN]], 20_000)
    assert np.isfinite(prior.log_weights(SETTINGS)).all()
    assert np.isfinite(prior.num_windows).all()


def test_a_prior_from_the_past_saves_short_requests_the_search() -> None:
    """Forty requests of 20 windows; against starting every request anew, regret falls by half."""
    generator = np.random.default_rng(0)
    misses = generator.random((40, 20, 5)) > np.array([0.3, 0.5, 0.8, 0.4, 0.3])
    losses = misses.astype(np.float64)
    anew = carried = 0.0
    prior = StreamPrior.empty(5)
    for request in losses:
        anew += _loss_of_play(request, np.full(5, 0.2))
        carried += _loss_of_play(request, prior.probabilities(PriorSettings()))
        prior = prior.learned(request, PriorSettings())
    best = losses.sum(axis=(0, 1)).min()
    assert carried - best < 0.5 * (anew - best)


def _loss_of_play(losses: NDArray[np.float64], prior: NDArray[np.float64]) -> float:
    policy, total = NormalHedge(5, prior=prior), 0.0
    for row in losses:
        total += float(policy.probabilities() @ row)
        policy.learn(row)
    return total


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("half_life_events", 0.0),
        ("half_life_events", NAN),
        ("shrink_windows", 0.0),
        ("strength", -1.0),
        ("strength", NAN),
        ("floor", 0.0),
        ("floor", 1.5),
    ],
)
def test_invalid_settings_are_refused(name: str, value: float) -> None:
    values = {name: value}
    with pytest.raises(ValueError, match=f"{name}={value}"):
        PriorSettings(
            half_life_events=values.get("half_life_events", 1.0),
            strength=values.get("strength", 1.0),
            shrink_windows=values.get("shrink_windows", 1.0),
            floor=values.get("floor", 0.1),
        )
