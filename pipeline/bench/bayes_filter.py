"""The limit of what a selector can see: a Bayes filter that is told how the traffic is made.

It knows every drafter's hit rate in every domain and how often the domain changes, and computes
the probability of every domain after each token. Told how hits are correlated as well
(``knows_difficulty``), it is the exact filter of ``pipeline.bench.synthetic``: a hidden Markov
model over domain and difficulty, the difficulty on a grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from pipeline.bench.synthetic import PERSISTENCE, SHARED_VARIANCE, STAY, SyntheticPool

GRID = np.linspace(-2.8, 2.8, 15)
"""Difficulties of the exact filter, in standard deviations."""


@dataclass(frozen=True, slots=True)
class BayesFilter:
    """A filter over G difficulties and D domains.

    Attributes:
        log_hit: Log-probability of a hit, (D, G, N).
        log_miss: Of a miss, (D, G, N).
        next_difficulty: Transition of the difficulty, (G, G).
        stationary: Its stationary law, (G,).
        lengths: Mean acceptance length by domain and drafter, (D, N).
        switching_rate: Chance per token that the domain changes.
    """

    log_hit: NDArray[np.float64]
    log_miss: NDArray[np.float64]
    next_difficulty: NDArray[np.float64]
    stationary: NDArray[np.float64]
    lengths: NDArray[np.float64]
    switching_rate: float

    @classmethod
    def of(
        cls, pool: SyntheticPool, switching_rate: float, *, knows_difficulty: bool
    ) -> BayesFilter:
        """Tell a filter the truth."""
        if knows_difficulty:
            threshold = ndtri(pool.rates)[:, None, :] - np.sqrt(SHARED_VARIANCE) * GRID[:, None]
            hit = ndtr(threshold / np.sqrt(1.0 - SHARED_VARIANCE))
            distance = GRID[None, :] - PERSISTENCE * GRID[:, None]
            move = np.exp(-(distance**2) / (2.0 * (1.0 - PERSISTENCE**2)))
            stationary = np.exp(-(GRID**2) / 2.0)
        else:
            hit, move, stationary = pool.rates[:, None, :], np.ones((1, 1)), np.ones(1)
        return cls(
            np.log(hit),
            np.log1p(-hit),
            move / move.sum(axis=1, keepdims=True),
            stationary / stationary.sum(),
            pool.lengths,
            switching_rate,
        )

    def choices(self, requests: Sequence[NDArray[np.bool_]]) -> list[NDArray[np.int64]]:
        """Return the drafter with the largest expected length before every token.

        Args:
            requests: Who hits which token, (P, N) each.

        Returns:
            Per request the choices, (P,).
        """
        num_domains = len(self.lengths)
        domain = np.full(num_domains, 1.0 / num_domains)
        found = []
        for hits in requests:
            start = STAY * domain + (1.0 - STAY) / num_domains
            belief = start[:, None] * self.stationary
            choices = np.empty(len(hits), dtype=np.int64)
            for position, hit in enumerate(hits):
                choices[position] = int(np.argmax(belief.sum(axis=1) @ self.lengths))
                belief = self._after(belief, hit)
            found.append(choices)
            domain = belief.sum(axis=1)
        return found

    def _after(self, belief: NDArray[np.float64], hit: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the belief about the next token, (D, G), after one token's hits."""
        log_likelihood = self.log_hit[..., hit].sum(axis=-1) + self.log_miss[..., ~hit].sum(axis=-1)
        belief = belief * np.exp(log_likelihood - log_likelihood.max())
        belief = (belief / belief.sum()) @ self.next_difficulty
        elsewhere = belief.sum(axis=0) / len(belief)
        return np.asarray((1.0 - self.switching_rate) * belief + self.switching_rate * elsewhere)
