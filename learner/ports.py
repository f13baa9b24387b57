"""What the learner needs from outside, as protocols; ``pipeline.wiring`` hands them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.events import DrafterReleased, FeatureReference, PolicyPublished, VerificationEvent


class ReceivedEvent(Protocol):
    """One event with the place it was read from."""

    @property
    def partition(self) -> int:
        """Partition of the event topic."""
    @property
    def offset(self) -> int:
        """Offset in that partition."""
    @property
    def event(self) -> VerificationEvent:
        """The event itself, already checked."""


class EventSource(Protocol):
    """Verification events, per partition in offset order."""

    @property
    def partitions(self) -> Sequence[int]:
        """Partitions this learner owns."""

    def seek(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on."""

    def poll(self, timeout_seconds: float) -> Sequence[ReceivedEvent]:
        """Return what has arrived, waiting at most ``timeout_seconds`` for the first."""


class PolicyBoard(Protocol):
    """The compacted topic of policies: the learner's only store."""

    def read_all(self) -> Sequence[PolicyPublished]:
        """Return the newest policy of every stream."""

    def publish(self, policies: Sequence[PolicyPublished]) -> None:
        """Publish durably; returns once stored."""


class ReleaseBoard(Protocol):
    """The compacted topic of releases."""

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter."""

    def publish(self, release: DrafterReleased) -> None:
        """Publish durably; returns once stored."""


class FeatureStore(Protocol):
    """Recorded hidden states."""

    def read(self, reference: FeatureReference) -> NDArray[np.float32]:
        """Return the referenced rows, shape (num_rows, H).

        Raises:
            LookupError: If they are gone or do not match their hash.
        """
