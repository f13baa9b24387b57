"""Hedge, the exponentially weighted average, kept in the log domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy, Row

LEARNING_RATE, NUM_ROUNDS = 0, 1


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Add the losses and form the weights of the next window."""
    num_drafters = losses.size
    numbers[NUM_ROUNDS] += 1.0
    rate = numbers[LEARNING_RATE]
    if rate == 0.0:
        rate = np.sqrt(8.0 * np.log(num_drafters) / (numbers[NUM_ROUNDS] + 1.0))
    largest = -np.inf
    for index in range(num_drafters):
        table[2, index] += losses[index]
        table[0, index] = np.log(table[1, index]) - rate * table[2, index]
        largest = max(largest, table[0, index])
    total = 0.0
    for index in range(num_drafters):
        table[0, index] = np.exp(table[0, index] - largest)
        total += table[0, index]
    for index in range(num_drafters):
        table[0, index] /= total


class Hedge(CompiledPolicy):
    """Weigh drafters by prior x exp(-η x cumulative loss).

    Freund and Schapire, "A decision-theoretic generalization of on-line learning" (1997),
    section 2; the rate that needs no horizon, η_t = sqrt(8 ln N / t) in round t, is that of
    Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games" (2006), section 2.3.
    ``learning_rate`` fixes η; 0 takes η_t.

    Regret to drafter i after T rounds is at most ln(1/prior_i) / η_T + Σ_t η_t / 8; with a uniform
    prior that is at most 1.07 sqrt(T ln N). Feedback that arrives d rounds late adds at
    most d + d/2 Σ_t η_t.

    Multiplied weights stick at the smallest float after a long run and then no longer order the
    drafters, without an error. So the state is the cumulative loss, and weights are
    formed from it with the largest exponent subtracted.
    """

    name = "hedge"
    version = 2
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.LOSS)
    parameters: ClassVar[Mapping[str, float]] = {"learning_rate": 0.0}
    num_counters = 1
