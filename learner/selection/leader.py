"""Follow the leader, plain and discounted: no exploration is needed, so these are strong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy, Loss, Row, Scope


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Discount the past, add the losses, and share among the smallest by prior."""
    num_drafters = losses.size
    smallest = np.inf
    for index in range(num_drafters):
        table[2, index] = numbers[0] * table[2, index] + losses[index]
        smallest = min(smallest, table[2, index])
    total = 0.0
    for index in range(num_drafters):
        table[0, index] = table[1, index] if table[2, index] == smallest else 0.0
        total += table[0, index]
    for index in range(num_drafters):
        table[0, index] /= total


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


class FollowTheLeader(DiscountedFollowTheLeader):
    """Select the drafter with the smallest loss so far.

    Hannan (1957); Cesa-Bianchi and Lugosi, "Prediction, Learning, and Games" (2006), section 3.2:
    constant regret if losses are drawn independently with a gap, linear regret in the worst case.
    """

    name = "follow_the_leader"
    parameters: ClassVar[Mapping[str, float]] = {"discount": 1.0}
    scope = "request"
    loss = "length"
