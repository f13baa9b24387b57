"""BOLD: a pool of learners, so that none ever plays while its feedback is out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy
from learner.selection.policy import RoundFeedback


class BoldPool:
    """The reference for delayed feedback: each decision goes to a learner that waits for nothing.

    Joulani, György and Szepesvári, "Online learning under delayed feedback" (2013), section 3.1.
    If at most d decisions are out when another is due, the pool holds d + 1 learners, and its
    regret is at most (d + 1) B(T / (d + 1)) for learners of concave bound B: about
    sqrt((d + 1) T ln N), without knowing d. Every learner sees only its own share of the windows,
    which is why one learner fed late does better on text; the pool is what it is measured against.

    Args:
        make_policy: Makes a fresh policy.
    """

    def __init__(self, make_policy: Callable[[], CompiledPolicy]) -> None:
        self._make_policy = make_policy
        self._learners: list[CompiledPolicy] = []
        self._free: list[int] = []
        self._decision_to_learner: dict[str, int] = {}

    @property
    def num_learners(self) -> int:
        """Learners made so far: one more than ever were out at once."""
        return len(self._learners)

    @property
    def num_pending(self) -> int:
        """Decisions whose feedback is out."""
        return len(self._decision_to_learner)

    def choose(self, decision_id: str) -> NDArray[np.float64]:
        """Give the decision to the oldest free learner and return its probabilities, shape (N,).

        Raises:
            ValueError: If that decision is already pending.
        """
        if decision_id in self._decision_to_learner:
            raise ValueError(f"decision {decision_id!r} is already pending, expected a new one")
        if not self._free:
            self._free.append(len(self._learners))
            self._learners.append(self._make_policy())
        learner = min(self._free)
        self._free.remove(learner)
        self._decision_to_learner[decision_id] = learner
        return self._learners[learner].probabilities()

    def learn(self, decision_id: str, feedback: NDArray[np.floating[Any]] | RoundFeedback) -> None:
        """Take the feedback of a decision and free its learner.

        Args:
            decision_id: As given to ``choose``.
            feedback: Losses of the window (N,), or the round, if the learners are bandits.

        Raises:
            ValueError: If no such decision is pending: it was never made, or is learned already.
        """
        if decision_id not in self._decision_to_learner:
            raise ValueError(f"decision {decision_id!r} is not pending: unknown or already learned")
        learner = self._decision_to_learner[decision_id]
        if isinstance(feedback, RoundFeedback):
            self._learners[learner].learn_round(feedback)
        else:
            self._learners[learner].learn(feedback)
        del self._decision_to_learner[decision_id]
        self._free.append(learner)
