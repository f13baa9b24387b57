"""What a re-run needs from outside, as protocols."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from replay.requests import RequestTrace
from schemas.events import ScoredWindows


class RequestSelector(Protocol):
    """Selection among the N drafters of one request, as a worker does it."""

    def probabilities(self) -> NDArray[np.float64]:
        """Return the chance of each drafter to be selected next, shape (N,), sum 1."""

    def learn(self, windows: ScoredWindows) -> None:
        """Learn windows that have just been completed, in order of start, at least one."""


SelectorFactory = Callable[[RequestTrace], RequestSelector]
"""Makes a fresh selector over ``request.drafter_ids``."""
