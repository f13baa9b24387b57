"""Mixing past posteriors: a drafter that was good before is found again quickly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import PROBABILITIES, CompiledPolicy, Row

LEARNING_RATE, SHARE, NUM_ROUNDS = 0, 1, 2
PAST = 2


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Form the posterior, give its share to the mean of the past ones, and add it to them.

    The posterior before the first window is the prior. A running mean makes this O(N), not O(NT).
    """
    shared = numbers[SHARE]
    numbers[NUM_ROUNDS] += 1.0
    newest = 1.0 / (numbers[NUM_ROUNDS] + 1.0)
    total = 0.0
    for index in range(losses.size):
        table[0, index] *= np.exp(-numbers[LEARNING_RATE] * losses[index])
        total += table[0, index]
    for index in range(losses.size):
        posterior = table[0, index] / total
        table[0, index] = (1.0 - shared) * posterior + shared * table[PAST, index]
        table[PAST, index] += newest * (posterior - table[PAST, index])


class MixingPastPosteriors(CompiledPolicy):
    """Hedge at rate η that gives a share α back to the mean of all its past posteriors.

    Bousquet and Warmuth, "Tracking a small set of experts by mixing past posteriors" (2002), mixing
    scheme "uniform past", with a prior in the place of the uniform distribution. Of their
    schemes with a memory it alone costs O(N) a window.

    Regret to a sequence of S switches among n different drafters over T rounds, prior uniform:
    (n ln N + S ln(T/α) + (T - S - 1) ln(1/(1 - α))) / η + η T / 8. Fixed share pays ln N for every
    switch; here only the first visit does, but the share that a return finds shrinks with T.
    Feedback d rounds late adds at most d T (η / 4 + α): no window moves more mass than that.
    """

    name = "mixing_past_posteriors"
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.DISTRIBUTION)
    parameters: ClassVar[Mapping[str, float]] = {"learning_rate": 1.0, "share": 0.01}
    num_counters = 1
    posteriors = (PROBABILITIES,)
    scope = "stream"
    choice = "argmax"
    loss = "first"

    @classmethod
    def check_parameter(cls, name: str, value: float) -> None:
        """Refuse a rate that is not positive and a share outside (0, 1)."""
        highest = 1.0 if name == "share" else np.inf
        if not 0.0 < value < highest:
            raise ValueError(f"policy {cls.name!r}: {name}={value} outside (0, {highest})")
