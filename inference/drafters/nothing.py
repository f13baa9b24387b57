"""The drafter that proposes nothing: "no speculation" as an arm (K = 0)."""

from __future__ import annotations

import numpy as np

from inference.ports import NO_PROPOSAL, Draft, Predictions, WindowBatch
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion


class NothingDrafter:
    """Never proposes, so a round that plays it is one step of plain decoding."""

    def __init__(self, drafter_id: str = "none") -> None:
        self.version = DrafterVersion(drafter_id=drafter_id, weights_version=0)

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> NothingSession:
        """Begin a request."""
        return NothingSession()


class NothingSession:
    """A request without drafts."""

    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Propose nothing."""
        return Draft()

    def predict(self, windows: WindowBatch) -> Predictions:
        """No proposal anywhere."""
        shape = (len(windows.starts), windows.num_speculative_tokens)
        return Predictions(proposals=np.full(shape, NO_PROPOSAL, dtype=np.int64))

    def finish(self) -> None:
        """Nothing to keep."""
