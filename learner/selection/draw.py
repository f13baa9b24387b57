"""Draw a drafter from probabilities that may have travelled."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from learner.selection.policy import renormalised


def select(probabilities: ArrayLike, generator: np.random.Generator) -> tuple[int, float]:
    """Draw one drafter.

    Args:
        probabilities: Shape (N,). Rounding on the way (float32, text) is repaired: they are
            renormalised in float64 here, where they are used.
        generator: The dice.

    Returns:
        The drafter's index and the probability with which it was drawn, in (0, 1], for the event.

    Raises:
        ValueError: If the vector is empty, has an element that is not a probability, or a sum
            that is off by more than 1e-3.
    """
    values = renormalised("probabilities", np.asarray(probabilities, dtype=np.float64))
    cumulative = np.cumsum(values)
    # The last entry becomes exactly 1 and a draw is below 1, so a drafter with probability 0,
    # which shares its entry with its predecessor, is never drawn.
    index = int(np.searchsorted(cumulative / cumulative[-1], generator.random(), side="right"))
    return index, float(values[index])
