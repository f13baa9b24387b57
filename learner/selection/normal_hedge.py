"""NormalHedge: no rate to tune, and no weight for drafters that do worse than the mixture."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.selection.policy import PolicyState, checked_losses, checked_prior, checked_state

MAX_NEWTON_STEPS = 100

REGRET_NOISE = 1e-9
"""Regrets up to this are rounding: the weights are scale free and would amplify it."""


class NormalHedge:
    """Weigh drafters by their regret R: prior x [R]+ / c x exp([R]+² / 2c).

    Chaudhuri, Freund and Hsu, "A parameter-free hedging algorithm" (2009), section 3, with a prior
    in the place of 1/N; the base learner of HedgeSpec. The scale c solves
    Σ_i prior_i exp([R_i]+² / 2c) = e. While no drafter beats the mixture, the prior is played.

    Regret to the best share ε of N drafters, uniform prior, after T rounds is
    O(sqrt(T ln(1/ε)) + ln²N) (their theorem 1); to the best drafter, ε = 1/N. The tests hold it to
    sqrt(T (1 + ln N)), and to sqrt((1 + d) T (1 + ln N)) with feedback d rounds late.
    """

    name = "normal_hedge"
    version = 1

    def __init__(self, num_drafters: int, *, prior: ArrayLike | None = None) -> None:
        self._prior = checked_prior(prior, num_drafters)
        self._regrets = np.zeros(num_drafters)
        self._probabilities = self._prior

    @property
    def num_drafters(self) -> int:
        """Number of drafters N."""
        return len(self._prior)

    def probabilities(self) -> NDArray[np.float64]:
        """Return the normalised weights, shape (N,)."""
        return self._probabilities.copy()

    def learn(self, losses: NDArray[np.floating[Any]]) -> None:
        """Add one window's regrets and weigh anew."""
        values = checked_losses(losses, self.num_drafters)
        self._regrets += self._probabilities @ values - values
        self._probabilities = normal_hedge_probabilities(self._regrets, self._prior)

    def state(self) -> PolicyState:
        """Return prior and regrets."""
        arrays = {"prior": self._prior.copy(), "regrets": self._regrets.copy()}
        return PolicyState(name=self.name, version=self.version, arrays=arrays)

    @classmethod
    def from_state(cls, state: PolicyState) -> Self:
        """Continue from ``state``."""
        arrays = checked_state(state, name=cls.name, version=cls.version).arrays
        policy = cls(len(arrays["prior"]))
        policy._prior, policy._regrets = arrays["prior"].copy(), arrays["regrets"].copy()
        policy._probabilities = normal_hedge_probabilities(policy._regrets, policy._prior)
        return policy


def normal_hedge_probabilities(
    regrets: NDArray[np.float64], prior: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return NormalHedge's weights, shape (N,), sum 1; the prior if no regret is positive."""
    largest = float(regrets.max())
    if not largest > REGRET_NOISE:
        return prior
    relative = np.maximum(regrets, 0.0) / largest
    exponents = relative**2 * scaled_inverse_c(relative, prior)
    weights = prior * relative * np.exp(exponents - exponents.max())
    return np.asarray(weights / weights.sum())


def scaled_inverse_c(relative: NDArray[np.float64], prior: NDArray[np.float64]) -> float:
    """Return x = M² / 2c for regrets ``relative`` in [0, 1] whose largest, M, was scaled to 1.

    x solves g(x) = ln Σ_i prior_i exp(relative_i² x) = 1. With prior j on the largest it lies in
    [1, 1 + ln(1/prior_j)], so no exponent can overflow. g is convex and increases, and is at
    least 1 at the upper end, so Newton's steps from there fall on the root without passing it.
    """
    squares = relative**2
    x = 1.0 - math.log(prior[int(np.argmax(relative))])
    for _ in range(MAX_NEWTON_STEPS):
        terms = prior * np.exp(squares * x - x)
        total = float(terms.sum())
        step = (math.log(total) + x - 1.0) * total / float(terms @ squares)
        x -= step
        if step <= 1e-14 * x:
            break
    return x
