"""The default: AdaNormalHedge over a grid of fixed-share learners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.ada_normal_hedge import log_weight
from learner.selection.base import PROBABILITIES, CompiledPolicy, Row
from learner.selection.compiled import compiled

LEARNING_RATES = (0.3, 1.0, 3.0)
SHARES = (0.0005, 0.005, 0.03)
NUM_LEARNERS = len(LEARNING_RATES) * len(SHARES)
RATE_OF_LEARNER = np.repeat(LEARNING_RATES, len(SHARES))
SHARE_OF_LEARNER = np.tile(SHARES, len(LEARNING_RATES))

MEMORY = 0
FIRST_REGRET = 1
FIRST_ABSOLUTE = FIRST_REGRET + NUM_LEARNERS
FIRST_MASS = FIRST_ABSOLUTE + NUM_LEARNERS
FIRST_ROW = 2


@compiled
def learn_shares(table: NDArray[np.float64], losses: NDArray[np.float64]) -> None:
    """Let every fixed-share learner of the grid learn the window.

    exp(-0.3 f), exp(-f) and exp(-3 f) cost two exponentials, not three for each learner.
    """
    num_drafters = losses.size
    num_shares = len(SHARES)
    for index in range(num_drafters):
        unit = np.exp(-losses[index])
        for rate in range(len(LEARNING_RATES)):
            if rate == 0:
                factor = np.exp(-LEARNING_RATES[0] * losses[index])
            elif rate == 1:
                factor = unit
            else:
                factor = unit * unit * unit
            for learner in range(rate * num_shares, (rate + 1) * num_shares):
                table[FIRST_ROW + learner, index] *= factor
    for learner in range(NUM_LEARNERS):
        row = table[FIRST_ROW + learner]
        shared = SHARE_OF_LEARNER[learner]
        scale = (1.0 - shared) / row.sum()
        for index in range(num_drafters):
            row[index] = scale * row[index] + shared * table[1, index]


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Judge the grid's learners on the window, let them learn it, and mix them anew."""
    num_drafters = losses.size
    mass = numbers[FIRST_MASS : FIRST_MASS + NUM_LEARNERS]
    played = 0.0
    total_mass = mass.sum()
    if total_mass == 0.0:
        mass[:] = 1.0 / NUM_LEARNERS
        total_mass = 1.0
    learner_losses = np.empty(NUM_LEARNERS)
    for learner in range(NUM_LEARNERS):
        loss = 0.0
        for index in range(num_drafters):
            loss += table[FIRST_ROW + learner, index] * losses[index]
        learner_losses[learner] = loss
        played += mass[learner] * loss / total_mass
    learn_shares(table, losses)
    largest = -np.inf
    for learner in range(NUM_LEARNERS):
        regret = played - learner_losses[learner]
        numbers[FIRST_REGRET + learner] = numbers[MEMORY] * numbers[FIRST_REGRET + learner] + regret
        numbers[FIRST_ABSOLUTE + learner] = numbers[MEMORY] * numbers[
            FIRST_ABSOLUTE + learner
        ] + abs(regret)
        mass[learner] = log_weight(
            numbers[FIRST_REGRET + learner], numbers[FIRST_ABSOLUTE + learner]
        )
        largest = max(largest, mass[learner])
    total_mass = 0.0
    for learner in range(NUM_LEARNERS):
        mass[learner] = np.exp(mass[learner] - largest) if largest > -np.inf else 1.0
        total_mass += mass[learner]
    table[0, :] = 0.0
    for learner in range(NUM_LEARNERS):
        mass[learner] /= total_mass
        for index in range(num_drafters):
            table[0, index] += mass[learner] * table[FIRST_ROW + learner, index]


class AdaNormalHedgeGrid(CompiledPolicy):
    """Mix nine fixed-share learners, three rates by three shares, by AdaNormalHedge.

    Rates 0.3, 1, 3 and shares 0.0005, 0.005, 0.03 (``fixed_share``) cover "one drafter is best for
    thousands of tokens" to "it changes every thirty". The mixture is that of Luo and Schapire
    (``ada_normal_hedge``), with its statistics decayed by ``memory`` per window, so that it
    follows a change of the traffic's pace too.

    With ``memory`` 1 the regret to any of the nine after T rounds is at most
    sqrt(3 T (ln 9 + ln B + ln(1 + ln 9))), B = 1 + 3/2 (1 + ln(1 + T)); added to it, that
    learner's own regret against switching sequences.
    """

    name = "ada_normal_hedge_grid"
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION,) * (FIRST_ROW + NUM_LEARNERS)
    parameters: ClassVar[Mapping[str, float]] = {"memory": 0.995}
    num_counters = 3 * NUM_LEARNERS
    scope = "stream"
    choice = "argmax"
    loss = "first"

    def _weigh(self) -> None:
        mass = self.numbers[FIRST_MASS : FIRST_MASS + NUM_LEARNERS]
        mass = mass if mass.any() else np.full(NUM_LEARNERS, 1.0 / NUM_LEARNERS)
        self.table[PROBABILITIES] = mass @ self.table[FIRST_ROW:]

    @classmethod
    def check_parameter(cls, name: str, value: float) -> None:
        """Refuse a memory outside (0, 1]."""
        if not 0.0 < value <= 1.0:
            raise ValueError(f"policy {cls.name!r}: {name}={value} outside (0, 1]")
