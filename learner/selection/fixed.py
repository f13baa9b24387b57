"""Always the same drafter: the comparator of static regret, and a switch for operators."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from learner.selection.policy import PolicyState, checked_losses, checked_state


class Fixed:
    """Select one drafter, whatever happens. Its regret can grow linearly."""

    name = "fixed"
    version = 1

    def __init__(self, num_drafters: int, drafter_index: int) -> None:
        if not 0 <= drafter_index < num_drafters:
            raise ValueError(f"drafter_index={drafter_index} outside 0..{num_drafters - 1}")
        self._probabilities = np.zeros(num_drafters)
        self._probabilities[drafter_index] = 1.0

    @property
    def num_drafters(self) -> int:
        """Number of drafters N."""
        return len(self._probabilities)

    def probabilities(self) -> NDArray[np.float64]:
        """Return 1 for the drafter, 0 for the rest."""
        return self._probabilities.copy()

    def learn(self, losses: NDArray[np.floating[Any]]) -> None:
        """Check the losses and stay."""
        checked_losses(losses, self.num_drafters)

    def state(self) -> PolicyState:
        """Return the choice as its probabilities."""
        arrays = {"probabilities": self._probabilities.copy()}
        return PolicyState(name=self.name, version=self.version, arrays=arrays)

    @classmethod
    def from_state(cls, state: PolicyState) -> Self:
        """Continue from ``state``."""
        arrays = checked_state(state, name=cls.name, version=cls.version).arrays
        return cls(len(arrays["probabilities"]), int(np.argmax(arrays["probabilities"])))
