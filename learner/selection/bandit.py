"""What the bandits share: they see of a round only the drafter that was played."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.selection.base import CompiledPolicy, Row
from learner.selection.compiled import Kernel, compiled
from learner.selection.kernels import sharpen_to_best
from learner.selection.policy import checked_prior

COUNT, LOSS = 2, 3
"""Rows of the index policies: rounds seen of each drafter, and their summed loss."""


@compiled
def observe(
    table: NDArray[np.float64], numbers: NDArray[np.float64], index: int, loss: float
) -> None:
    """Count a round of drafter ``index``; the number of all rounds is the last number."""
    table[COUNT, index] += 1.0
    table[LOSS, index] += loss
    numbers[numbers.size - 1] += 1.0


@compiled
def share_unplayed(table: NDArray[np.float64]) -> bool:
    """Share all mass among drafters that were never seen; say whether there are any."""
    unplayed = 0
    for index in range(table.shape[1]):
        unplayed += table[COUNT, index] == 0.0
    if unplayed == 0:
        return False
    for index in range(table.shape[1]):
        table[0, index] = 1.0 / unplayed if table[COUNT, index] == 0.0 else 0.0
    return True


@compiled
def play_confident(table: NDArray[np.float64], round_index: float, width: float) -> None:
    """Play the smallest mean loss - width x sqrt(2 ln t / n): the index of UCB1."""
    if share_unplayed(table):
        return
    for index in range(table.shape[1]):
        count = table[COUNT, index]
        radius = width * np.sqrt(2.0 * np.log(round_index) / count)
        table[0, index] = radius - table[LOSS, index] / count
    sharpen_to_best(table[0])


class Bandit(CompiledPolicy):
    """A policy that learns rounds alone.

    A stream's prior is learned from windows, which a bandit must not see, so it starts uniform.
    """

    def __init__(
        self, num_drafters: int, *, prior: ArrayLike | None = None, **parameters: float
    ) -> None:
        checked_prior(prior, num_drafters)
        super().__init__(num_drafters, **parameters)


class IndexBandit(Bandit):
    """A bandit that plays the drafter of the best index, ties and unseen drafters in equal shares.

    Attributes:
        weigh: Compiled; writes row 0 of ``table`` from the other rows and ``numbers``.
    """

    weigh: ClassVar[Kernel]
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.SUM, Row.SUM)
    num_counters = 1

    def _weigh(self) -> None:
        self.weigh(self.table, self.numbers)
