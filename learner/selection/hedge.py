"""Hedge, the exponentially weighted average, kept in the log domain."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.selection.policy import PolicyState, checked_losses, checked_prior, checked_state


class Hedge:
    """Weigh drafters by prior x exp(-η x cumulative loss).

    Freund and Schapire, "A decision-theoretic generalization of on-line learning" (1997),
    section 2; the rate that needs no horizon, η_t = sqrt(8 ln N / t) in round t, is that of
    Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games" (2006), section 2.3.

    Regret to drafter i after T rounds is at most ln(1/prior_i) / η_T + Σ_t η_t / 8; with a uniform
    prior that is at most 1.07 sqrt(T ln N). Feedback that arrives d rounds late adds at
    most d + d/2 Σ_t η_t.

    Multiplied weights stick at the smallest float after a long run and then no longer order the
    drafters, without an error. So the state is the cumulative loss, and weights are
    formed from it with the largest exponent subtracted.
    """

    name = "hedge"
    version = 1

    def __init__(
        self,
        num_drafters: int,
        *,
        prior: ArrayLike | None = None,
        learning_rate: float | None = None,
    ) -> None:
        if learning_rate is not None and not 0.0 < learning_rate < math.inf:
            raise ValueError(f"learning_rate={learning_rate}, expected > 0 and finite, or None")
        self._prior = checked_prior(prior, num_drafters)
        self._log_prior = np.log(self._prior)
        self._cumulative_losses = np.zeros(num_drafters)
        self._num_rounds = 0
        self._learning_rate = learning_rate

    @property
    def num_drafters(self) -> int:
        """Number of drafters N."""
        return len(self._prior)

    @property
    def learning_rate(self) -> float:
        """The rate η of the next round."""
        if self._learning_rate is not None:
            return self._learning_rate
        return math.sqrt(8.0 * math.log(self.num_drafters) / (self._num_rounds + 1))

    def probabilities(self) -> NDArray[np.float64]:
        """Return softmax(ln prior - η x cumulative loss), shape (N,)."""
        exponents = self._log_prior - self.learning_rate * self._cumulative_losses
        weights = np.exp(exponents - exponents.max())
        return np.asarray(weights / weights.sum())

    def learn(self, losses: NDArray[np.floating[Any]]) -> None:
        """Add one window's losses."""
        self._cumulative_losses += checked_losses(losses, self.num_drafters)
        self._num_rounds += 1

    def state(self) -> PolicyState:
        """Return prior, cumulative losses, rounds and rate (0 = without horizon)."""
        arrays = {
            "prior": self._prior.copy(),
            "cumulative_losses": self._cumulative_losses.copy(),
            "num_rounds": np.array([float(self._num_rounds)]),
            "learning_rate": np.array([self._learning_rate or 0.0]),
        }
        return PolicyState(name=self.name, version=self.version, arrays=arrays)

    @classmethod
    def from_state(cls, state: PolicyState) -> Self:
        """Continue from ``state``."""
        arrays = checked_state(state, name=cls.name, version=cls.version).arrays
        prior = arrays["prior"]
        policy = cls(len(prior), learning_rate=float(arrays["learning_rate"][0]) or None)
        policy._prior, policy._log_prior = prior.copy(), np.log(prior)
        policy._cumulative_losses = arrays["cumulative_losses"].copy()
        policy._num_rounds = int(arrays["num_rounds"][0])
        return policy
