"""Always the same drafter: the comparator of static regret, and a switch for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from learner.selection.base import PROBABILITIES, CompiledPolicy


class Fixed(CompiledPolicy):
    """Select one drafter, whatever happens. Its regret can grow linearly."""

    name = "fixed"

    def __init__(self, num_drafters: int, drafter_index: int) -> None:
        if not 0 <= drafter_index < num_drafters:
            raise ValueError(f"drafter_index={drafter_index} outside 0..{num_drafters - 1}")
        super().__init__(num_drafters)
        self.table[PROBABILITIES] = 0.0
        self.table[PROBABILITIES, drafter_index] = 1.0

    def with_drafters(self, places: Sequence[int], *, share: float) -> Self:
        """Return the policy over another pool; it stays with its drafter.

        Raises:
            ValueError: If its drafter left.
        """
        index = int(np.argmax(self.table[PROBABILITIES]))
        if index not in places:
            raise ValueError(f"policy 'fixed': its drafter {index} left, places={list(places)}")
        return type(self)(len(places), list(places).index(index))
