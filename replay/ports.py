"""What a re-run needs from outside, as protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replay.requests import RequestTrace


class FollowedSelector(Protocol):
    """Selection among the N drafters of one request, as a worker does it."""

    def probabilities(self, is_awake: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the chance of each drafter to be selected next, shape (N,), sum 1.

        ``is_awake``, shape (N,), holds at least one True; the others are never selected.
        """

    def learn(
        self,
        acceptance_probability: NDArray[np.float16],
        realised_acceptance: NDArray[np.float16],
        num_levels: NDArray[np.int16],
    ) -> None:
        """Learn windows in order of start, shapes (W, K, N) and (W,), W >= 1."""

    def learn_round(
        self,
        drafter_index: int,
        selection_probability: float,
        num_draft_tokens: int,
        num_accepted_tokens: int,
    ) -> None:
        """Learn what a round alone tells; only bandits do."""


SelectorFactory = Callable[[RequestTrace], FollowedSelector]
"""Makes a fresh selector over ``request.drafter_ids``."""
