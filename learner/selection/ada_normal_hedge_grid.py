"""The default: AdaNormalHedge over a grid of fixed-share learners that remember who was good."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.ada_normal_hedge import log_weight
from learner.selection.base import PROBABILITIES, CompiledPolicy, Row
from learner.selection.compiled import compiled

LEARNING_RATES = (0.3, 1.0, 3.0, 8.0)
SHARES = (0.0005, 0.005, 0.05)
NUM_LEARNERS = len(LEARNING_RATES) * len(SHARES)
RATE_OF_LEARNER = np.repeat(LEARNING_RATES, len(SHARES))
SHARE_OF_LEARNER = np.tile(SHARES, len(LEARNING_RATES))

MEMORY, TO_PAST = 0, 1
FIRST_REGRET = 2
FIRST_ABSOLUTE = FIRST_REGRET + NUM_LEARNERS
FIRST_MASS = FIRST_ABSOLUTE + NUM_LEARNERS
NUM_WINDOWS = FIRST_MASS + NUM_LEARNERS
PAST = 2
FIRST_LEARNER = 3


@compiled
def judge_learners(
    table: NDArray[np.float64],
    mass: NDArray[np.float64],
    losses: NDArray[np.float64],
    regrets: NDArray[np.float64],
) -> None:
    """Write every learner's regret on the window: what the mixture lost minus what it lost."""
    regrets[:] = 0.0
    for index in range(losses.size):
        # Greedy targets lose 0 at most places, which adds nothing.
        if losses[index] != 0.0:
            for learner in range(NUM_LEARNERS):
                regrets[learner] += table[FIRST_LEARNER + learner, index] * losses[index]
    played = 0.0
    for learner in range(NUM_LEARNERS):
        played += mass[learner] * regrets[learner]
        regrets[learner] = -regrets[learner]
    for learner in range(NUM_LEARNERS):
        regrets[learner] += played


@compiled
def weigh_drafters(table: NDArray[np.float64], losses: NDArray[np.float64]) -> None:
    """Multiply every learner's weights by exp(-rate x loss), in place."""
    for rate in range(len(LEARNING_RATES)):
        first = FIRST_LEARNER + rate * len(SHARES)
        known, factor = 0.0, 1.0
        for index in range(losses.size):
            loss = losses[index]
            if loss > 0.0:
                # The losses of greedy targets are all 1.
                if loss != known:
                    known, factor = loss, np.exp(-RATE_OF_LEARNER[first - FIRST_LEARNER] * loss)
                for learner in range(first, first + len(SHARES)):
                    table[learner, index] *= factor


@compiled
def learn_shares(
    table: NDArray[np.float64],
    mass: NDArray[np.float64],
    losses: NDArray[np.float64],
    to_past: float,
    newest: float,
    scratch: NDArray[np.float64],
) -> None:
    """Let every learner of the grid learn the window, and add their posterior to the past.

    Args:
        table: The policy's.
        mass: Of the learners before the window, sum 1.
        losses: Shape (N,).
        to_past: Part of each share that goes to the mean past posterior; the rest to the prior.
        newest: Weight of this window's posterior in that mean.
        scratch: (2, N), written.
    """
    num_drafters = losses.size
    target, posterior = scratch[0], scratch[1]
    for index in range(num_drafters):
        target[index] = to_past * table[PAST, index] + (1.0 - to_past) * table[1, index]
        posterior[index] = 0.0
    weigh_drafters(table, losses)
    for learner in range(NUM_LEARNERS):
        row = table[FIRST_LEARNER + learner]
        total = 0.0
        for index in range(num_drafters):
            total += row[index]
        shared = SHARE_OF_LEARNER[learner]
        for index in range(num_drafters):
            weight = row[index] / total
            posterior[index] += mass[learner] * weight
            row[index] = (1.0 - shared) * weight + shared * target[index]
    for index in range(num_drafters):
        table[PAST, index] += newest * (posterior[index] - table[PAST, index])


@compiled
def weigh_learners(
    numbers: NDArray[np.float64], mass: NDArray[np.float64], regrets: NDArray[np.float64]
) -> None:
    """Add the window's regrets to the decayed ones and write the learners' masses, sum 1."""
    largest = -np.inf
    for learner in range(NUM_LEARNERS):
        regret, absolute = FIRST_REGRET + learner, FIRST_ABSOLUTE + learner
        numbers[regret] = numbers[MEMORY] * numbers[regret] + regrets[learner]
        numbers[absolute] = numbers[MEMORY] * numbers[absolute] + abs(regrets[learner])
        mass[learner] = log_weight(numbers[regret], numbers[absolute])
        largest = max(largest, mass[learner])
    total = 0.0
    for learner in range(NUM_LEARNERS):
        mass[learner] = np.exp(mass[learner] - largest) if largest > -np.inf else 1.0
        total += mass[learner]
    for learner in range(NUM_LEARNERS):
        mass[learner] /= total


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Judge the grid's learners on the window, let them learn it, and mix them anew."""
    mass = numbers[FIRST_MASS : FIRST_MASS + NUM_LEARNERS]
    numbers[NUM_WINDOWS] += 1.0
    if numbers[NUM_WINDOWS] == 1.0:
        mass[:] = 1.0 / NUM_LEARNERS
    regrets, scratch = np.empty(NUM_LEARNERS), np.empty((2, losses.size))
    judge_learners(table, mass, losses, regrets)
    newest = 1.0 / (numbers[NUM_WINDOWS] + 1.0)
    learn_shares(table, mass, losses, numbers[TO_PAST], newest, scratch)
    weigh_learners(numbers, mass, regrets)
    table[0, :] = 0.0
    for learner in range(NUM_LEARNERS):
        for index in range(losses.size):
            table[0, index] += mass[learner] * table[FIRST_LEARNER + learner, index]


class AdaNormalHedgeGrid(CompiledPolicy):
    """Mix twelve fixed-share learners, four rates by three shares, by AdaNormalHedge.

    Rates 0.3, 1, 3, 8 and shares 0.0005, 0.005, 0.05 (``fixed_share``) cover "one drafter is best
    for thousands of tokens" to "it changes every twenty". Of each share, ``to_past`` goes to the
    mean of the grid's past posteriors, so that drafters which were good before are found
    again first (``mixing_past_posteriors``), and the rest to the prior. The mixture is that of Luo
    and Schapire (``ada_normal_hedge``), with its statistics decayed by ``memory`` per window, so
    that it follows a change of the traffic's pace too.

    With ``memory`` 1 the regret to any of the twelve after T rounds is at most
    sqrt(3 T (ln 12 + ln B + ln(1 + ln 12))), B = 1 + 3/2 (1 + ln(1 + T)); added to it, that
    learner's own regret against switching sequences: fixed share's, with its share towards a
    drafter at least (1 - ``to_past``) x share x prior.
    """

    name = "ada_normal_hedge_grid"
    version = 2
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION,) * (FIRST_LEARNER + NUM_LEARNERS)
    parameters: ClassVar[Mapping[str, float]] = {"memory": 0.995, "to_past": 0.9}
    num_counters = 3 * NUM_LEARNERS + 1
    posteriors = (PROBABILITIES, *range(FIRST_LEARNER, FIRST_LEARNER + NUM_LEARNERS))
    scope = "stream"
    choice = "argmax"
    loss = "first"

    @classmethod
    def check_parameter(cls, name: str, value: float) -> None:
        """Refuse a memory outside (0, 1] and a part of the past outside [0, 1)."""
        if name == "to_past":
            if not 0.0 <= value < 1.0:
                raise ValueError(f"policy {cls.name!r}: {name}={value} outside [0, 1)")
        elif not 0.0 < value <= 1.0:
            raise ValueError(f"policy {cls.name!r}: {name}={value} outside (0, 1]")
