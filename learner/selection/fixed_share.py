"""Fixed share: Hedge that never rules a drafter out, so that it follows shifts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import PROBABILITIES, CompiledPolicy
from learner.selection.compiled import compiled

LEARNING_RATE, SHARE = 0, 1


@compiled
def share(
    weights: NDArray[np.float64],
    prior: NDArray[np.float64],
    losses: NDArray[np.float64],
    rate: float,
    shared: float,
) -> None:
    """Multiply by exp(-rate x loss), normalise, and give ``shared`` back to the prior, in place.

    The share keeps every weight above shared x prior / N, so no weight can underflow.
    """
    total = 0.0
    for index in range(losses.size):
        weights[index] *= np.exp(-rate * losses[index])
        total += weights[index]
    for index in range(losses.size):
        weights[index] = (1.0 - shared) * weights[index] / total + shared * prior[index]


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Learn one window."""
    share(table[0], table[1], losses, numbers[LEARNING_RATE], numbers[SHARE])


class FixedShare(CompiledPolicy):
    """Hedge at rate η whose weights return to the prior by a share α after every window.

    Herbster and Warmuth, "Tracking the best expert" (1998), section 5, with a prior in the place
    of the uniform distribution. Regret to a sequence of S + 1 drafters over T rounds, prior
    uniform: ((S + 1) ln N + S ln(1/α) + (T - S - 1) ln(1/(1 - α))) / η + η T / 8.
    """

    name = "fixed_share"
    kernel = staticmethod(learn)
    parameters: ClassVar[Mapping[str, float]] = {"learning_rate": 1.0, "share": 0.01}
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
