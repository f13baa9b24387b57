"""Follow the leader, plain and discounted: no exploration is needed, so these are strong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy, Loss, Row, Scope
from learner.selection.compiled import compiled


@compiled
def lead(table: NDArray[np.float64]) -> None:
    """Share row 0 among the smallest losses in row 2, by prior."""
    smallest = table[2].min()
    total = 0.0
    for index in range(table.shape[1]):
        table[0, index] = table[1, index] if table[2, index] == smallest else 0.0
        total += table[0, index]
    for index in range(table.shape[1]):
        table[0, index] /= total


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Discount the past, add the losses, and share among the smallest by prior."""
    for index in range(losses.size):
        table[2, index] = numbers[0] * table[2, index] + losses[index]
    lead(table)


class DiscountedFollowTheLeader(CompiledPolicy):
    """Select the drafter with the smallest discounted loss L <- discount x L + loss.

    With a discount below 1 it remembers about 1 / (1 - discount) windows and follows shifts.
    Against an adversary its regret can grow linearly (the first two leaders can be
    made to take turns); on text it is a baseline that many learners do not beat.
    """

    name = "discounted_follow_the_leader"
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.LOSS)
    parameters: ClassVar[Mapping[str, float]] = {"discount": 0.95}
    scope: ClassVar[Scope] = "stream"
    loss: ClassVar[Loss] = "first"

    @classmethod
    def check_parameter(cls, name: str, value: float) -> None:
        """Refuse a discount outside (0, 1]."""
        if not 0.0 < value <= 1.0:
            raise ValueError(f"policy {cls.name!r}: {name}={value} outside (0, 1]")

    def _weigh(self) -> None:
        lead(self.table)


class FollowTheLeader(DiscountedFollowTheLeader):
    """Select the drafter with the smallest loss so far.

    Hannan (1957); Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games" (2006), section 3.2:
    who played the leader of the next round would have no regret, so the regret is at most the mass
    that moves, Σ_t |p_t+1 - p_t| / 2, a constant if losses are drawn independently with a gap, and
    linear in the worst case. Feedback d rounds late costs at most d times that again.
    """

    name = "follow_the_leader"
    parameters: ClassVar[Mapping[str, float]] = {"discount": 1.0}
    scope = "request"
    loss = "length"
