"""Priors as experts: the mixture follows whoever is right, and comes back when that changes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.prior_mixture import PriorMixture
from learner.router import Router, best_drafter

SOURCES = ("router", "tenant", "uniform")
PRIORS = np.array([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [1 / 3, 1 / 3, 1 / 3]])
RIGHT_ROUTER = np.tile([0.2, 0.6, 0.6], (10, 1))
RIGHT_TENANT = np.tile([0.6, 0.2, 0.6], (10, 1))


def after(mixture: PriorMixture, losses: NDArray[np.float64], times: int) -> PriorMixture:
    for _ in range(times):
        mixture = mixture.learned(PRIORS, losses)
    return mixture


def test_the_mixture_is_the_weighted_mean() -> None:
    mixture = PriorMixture(sources=SOURCES, weights=np.array([0.5, 0.25, 0.25]))
    np.testing.assert_allclose(mixture.probabilities(PRIORS), np.array([0.5, 0.25, 0.25]) @ PRIORS)


def test_the_source_that_is_right_gains_and_another_takes_over_when_that_changes() -> None:
    mixture = after(PriorMixture.start(SOURCES), RIGHT_ROUTER, 100)
    assert mixture.weights[0] > 0.9
    assert mixture.probabilities(PRIORS)[0] > 0.8
    mixture = after(mixture, RIGHT_TENANT, 5)
    assert mixture.weights[1] > 0.5


def test_out_of_its_domain_the_router_costs_little_beside_the_uniform_prior() -> None:
    """Prompts as it knows them, but another drafter is best: trust moves within a few requests."""
    generator, router = np.random.default_rng(0), Router(3)
    mixture = PriorMixture.start(("router", "uniform"))
    for _ in range(40):
        router.learn([int(token) for token in generator.integers(0, 50, 20)], 0)
    lost = []
    for _ in range(30):
        chances = router.probabilities([int(token) for token in generator.integers(0, 50, 20)])
        priors = np.stack([chances, np.full(3, 1 / 3)])
        assert best_drafter(RIGHT_TENANT) == 1
        lost.append(float(mixture.probabilities(priors) @ RIGHT_TENANT[0]))
        mixture = mixture.learned(priors, RIGHT_TENANT)
    assert lost[0] > lost[-1]
    assert lost[-1] == pytest.approx(RIGHT_TENANT[0].mean(), abs=0.01)


def test_regret_keeps_the_bound_of_fixed_share() -> None:
    generator = np.random.default_rng(0)
    mixture = PriorMixture.start(SOURCES)
    num_requests, rate, share = 400, mixture.learning_rate, mixture.share
    mixed, sources = 0.0, np.zeros((num_requests, 3))
    for turn in range(num_requests):
        losses = np.array([[0.2, 0.6, 0.6], [0.6, 0.2, 0.6]])[turn // 100 % 2]
        losses = np.clip(losses + generator.normal(0, 0.2, (5, 3)), 0, 1)
        mixed += float(mixture.probabilities(PRIORS) @ losses.mean(axis=0))
        sources[turn] = PRIORS @ losses.mean(axis=0)
        mixture = mixture.learned(PRIORS, losses)
    best = sum(sources[start : start + 100].sum(axis=0).min() for start in range(0, 400, 100))
    nats = 4 * np.log(3) + 3 * np.log(1 / share) + (num_requests - 4) * np.log(1 / (1 - share))
    assert mixed - best <= nats / rate + rate * num_requests / 8


def test_sleepers_and_requests_without_windows_move_nothing() -> None:
    mixture = after(PriorMixture.start(SOURCES), RIGHT_ROUTER, 3)
    for nothing in (np.empty((0, 3)), np.full((4, 3), np.nan)):
        assert mixture.learned(PRIORS, nothing) is mixture
    asleep = np.array([[np.nan, 0.4, 0.4]])
    level = PriorMixture.start(SOURCES).learned(PRIORS, asleep)
    np.testing.assert_allclose(level.weights, 1 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": np.array([1.0])}, r"shape \(1,\), expected \(3,\)"),
        ({"weights": np.array([0.5, 0.6, 0.5])}, r"weights sums to 1\.6"),
        ({"sources": ()}, "at least one source"),
        ({"learning_rate": 0.0}, r"learning_rate=0\.0"),
        ({"share": 1.0}, r"share=1\.0 outside"),
    ],
)
def test_invalid_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    good = {"sources": SOURCES, "weights": np.full(3, 1 / 3)}
    with pytest.raises(ValueError, match=message):
        PriorMixture(**{**good, **arguments})  # type: ignore[arg-type]


def test_invalid_priors_are_refused_by_name() -> None:
    mixture = PriorMixture.start(SOURCES)
    with pytest.raises(ValueError, match=r"shape \(2, 3\), expected \(3, N\) for: router, tenant"):
        mixture.probabilities(PRIORS[:2])
    bad = PRIORS.copy()
    bad[1, 0] = 0.9
    with pytest.raises(ValueError, match=r"prior of tenant sums to 1\.85"):
        mixture.learned(bad, RIGHT_ROUTER)
