"""Several priors at once: the router's, the tenant's, the global one and none, as experts.

What a router knows of prompts like those it saw, and what a stream's past says, are both right at
times. Each is a distribution over drafters; every request shows what each of them would have lost,
so no exploration is needed here either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from learner.selection.policy import renormalised


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorMixture:
    """Fixed share (Herbster and Warmuth, 1998) over sources of priors: EXP4 that sees all losses.

    Regret of the expected loss to the best source per stretch of requests, S switches among E
    sources over T requests: ((S + 1) ln E + S ln(1/α) + (T - S - 1) ln(1/(1 - α))) / η + η T / 8.

    Attributes:
        sources: Names of the sources, in order, e.g. ("router", "tenant", "global", "uniform").
        weights: Weight of each, shape (E,), sum 1.
        learning_rate: η, > 0: nats per unit of mean loss of a request.
        share: α, in (0, 1): weight given back equally after each request.
    """

    sources: tuple[str, ...]
    weights: NDArray[np.float64]
    learning_rate: float = 10.0
    share: float = 0.02

    def __post_init__(self) -> None:
        if not self.sources or self.weights.shape != (len(self.sources),):
            raise ValueError(
                f"weights have shape {self.weights.shape}, expected ({len(self.sources)},) with at "
                "least one source"
            )
        renormalised("weights", self.weights)
        if not 0.0 < self.learning_rate < np.inf:
            raise ValueError(f"learning_rate={self.learning_rate}, expected > 0 and finite")
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share={self.share} outside (0, 1)")

    @classmethod
    def start(cls, sources: Sequence[str]) -> PriorMixture:
        """Return a mixture that trusts all sources alike."""
        num_sources = max(len(sources), 1)
        return cls(sources=tuple(sources), weights=np.full(num_sources, 1.0 / num_sources))

    def probabilities(self, priors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Mix the sources' priors (E, N) for a request: shape (N,), sum 1.

        Raises:
            ValueError: If the shape is wrong or a row is no distribution.
        """
        return np.asarray(self.weights @ self._checked(priors))

    def learned(self, priors: NDArray[np.float64], losses: NDArray[np.float64]) -> PriorMixture:
        """Return the mixture after a request; one without windows changes nothing.

        Args:
            priors: What the sources said before it, (E, N).
            losses: Of its windows, (W, N), in [0, 1]; NaN = asleep: charged the mean of the awake.

        Raises:
            ValueError: As ``probabilities``.
        """
        rows = self._checked(priors)
        is_awake = ~np.isnan(losses)
        seen = is_awake.any(axis=1)
        if not seen.any():
            return self
        known, is_awake = losses[seen], is_awake[seen]
        means = np.where(is_awake, known, 0.0).sum(axis=1) / is_awake.sum(axis=1)
        drafter_losses = np.where(is_awake, known, means[:, None]).mean(axis=0)
        source_losses = rows @ drafter_losses
        posterior = self.weights * np.exp(
            -self.learning_rate * (source_losses - source_losses.min())
        )
        posterior /= posterior.sum()
        shared = self.share / len(self.sources)
        return replace(self, weights=(1.0 - self.share) * posterior + shared)

    def _checked(self, priors: NDArray[np.float64]) -> NDArray[np.float64]:
        if priors.ndim != 2 or len(priors) != len(self.sources):
            raise ValueError(
                f"priors have shape {priors.shape}, expected ({len(self.sources)}, N) for: "
                f"{', '.join(self.sources)}"
            )
        rows = [
            renormalised(f"prior of {s}", row) for s, row in zip(self.sources, priors, strict=True)
        ]
        return np.array(rows)
