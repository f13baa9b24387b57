"""Hedge, the exponentially weighted average, kept in the log domain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy, Row
from learner.selection.compiled import compiled

LEARNING_RATE, NUM_ROUNDS = 0, 1
CUMULATIVE = 2


@compiled
def weigh_losses(table: NDArray[np.float64], row: int, rate: float) -> None:
    """Write prior x exp(-rate x loss) into row 0, sum 1, from the cumulative losses in ``row``."""
    largest = -np.inf
    for index in range(table.shape[1]):
        table[0, index] = np.log(table[1, index]) - rate * table[row, index]
        largest = max(largest, table[0, index])
    total = 0.0
    for index in range(table.shape[1]):
        table[0, index] = np.exp(table[0, index] - largest)
        total += table[0, index]
    for index in range(table.shape[1]):
        table[0, index] /= total


@compiled
def rate_in_force(numbers: NDArray[np.float64], num_drafters: int) -> float:
    """Return the rate of the next window."""
    rate: float = numbers[LEARNING_RATE]
    if rate == 0.0:
        rate = np.sqrt(8.0 * np.log(num_drafters) / (numbers[NUM_ROUNDS] + 1.0))
    return rate


def mixed_loss(losses: NDArray[np.float64], prior: NDArray[np.float64], rate: float) -> float:
    """Return -ln(Σ prior exp(-rate x loss)) / rate: who has lost this much weighs its prior."""
    smallest = float(losses.min())
    if rate == 0.0:
        return smallest
    return smallest - float(np.log(prior @ np.exp(-rate * (losses - smallest)))) / rate


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Add the losses and form the weights of the next window."""
    numbers[NUM_ROUNDS] += 1.0
    for index in range(losses.size):
        table[CUMULATIVE, index] += losses[index]
    weigh_losses(table, CUMULATIVE, rate_in_force(numbers, losses.size))


class Hedge(CompiledPolicy):
    """Weigh drafters by prior x exp(-η x cumulative loss).

    Freund and Schapire, "A decision-theoretic generalization of on-line learning" (1997),
    section 2; the rate that needs no horizon, η_t = sqrt(8 ln N / t) in round t, is that of
    Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games" (2006), section 2.3.
    ``learning_rate`` fixes η; 0 takes η_t.

    Regret to drafter i after T rounds is at most ln(1/prior_i) / η_T + Σ_t η_t / 8; with a uniform
    prior that is at most 1.07 sqrt(T ln N). Feedback that arrives d rounds late adds at most
    3/8 d Σ_t η_t: losses of range r move at most the share r / 4, and a window with its change of
    rate moves exponents by 3/2 η_t at most (1/4 d η T for a fixed rate).

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

    def _newcomers_loss(
        self, losses: NDArray[np.float64], prior: NDArray[np.float64], num_drafters: int
    ) -> float:
        return mixed_loss(losses, prior, rate_in_force(self.numbers, num_drafters))
