"""What the learner needs from outside, as protocols; ``pipeline`` hands them in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from schemas.errors import KnownError
from schemas.events import DrafterReleased, FeatureReference, PolicyPublished, VerificationEvent

if TYPE_CHECKING:
    # A learner of selection, and the archiver, do without it.
    import torch


class StoreError(KnownError):
    """An artifact could not be stored or read; the message names it, what was found and wanted."""


class FencedError(KnownError):
    """Somebody else has moved this drafter; the message names it and both versions."""


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


class PartitionOwner(Protocol):
    """Is told which partitions it owns, and seeks in each before it reads it."""

    def on_assigned(self, partitions: Sequence[int]) -> None:
        """Take these over from what was published of them."""

    def on_revoked(self, partitions: Sequence[int]) -> None:
        """Publish what is known of these, then forget it: they go to another learner."""

    def on_lost(self, partitions: Sequence[int]) -> None:
        """Forget these without a word: another learner has them already."""


class EventSource(Protocol):
    """Verification events, per partition in offset order."""

    @property
    def partitions(self) -> Sequence[int]:
        """Partitions this learner owns."""

    def listen(self, owner: PartitionOwner) -> None:
        """Tell ``owner``, in ``poll``, of partitions that come and go after this call."""

    def is_owner(self) -> bool:
        """Tell whether the owned partitions are still this learner's, to publish and to commit."""

    def seek(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on."""

    def poll(self, timeout_seconds: float) -> Sequence[ReceivedEvent]:
        """Return what has arrived, waiting at most ``timeout_seconds`` for the first."""

    def committed(self, partition: int) -> int | None:
        """Return the position last committed for ``partition``, or None."""

    def commit(self, partition: int, offset: int) -> None:
        """Store durably that everything below ``offset`` is contained in published policies."""


class RefusedEvents(Protocol):
    """Where events go that could be read but not learned."""

    def set_aside(self, received: ReceivedEvent, reason: str) -> None:
        """Keep the event with its place; ``reason`` has the path and both values."""


class Trainer(Protocol):
    """Trains drafters from the events that the learner reads."""

    def start_offsets(self) -> Mapping[int, int]:
        """Return per partition the first offset not contained in the released weights.

        Partitions that are not named start at the first offset that can still be read.
        """

    def train(self, received: ReceivedEvent) -> None:
        """Take one event, in order of offset within its partition.

        Every event read is handed over: those below ``start_offsets``, and copies of the same
        event at a later offset, are the trainer's to skip (``learner.feedback.Contained``).

        Raises:
            ValueError: If this event cannot be trained on; it is set aside and the loop goes on.
        """


class PolicyBoard(Protocol):
    """The compacted topic of policies: the learner's only store."""

    def read_all(self, partitions: Collection[int] | None = None) -> Sequence[PolicyPublished]:
        """Return the newest policy of every stream, or of the streams in some partitions."""

    def publish(self, policies: Sequence[PolicyPublished]) -> None:
        """Publish durably; returns once stored."""


class ReleaseBoard(Protocol):
    """The compacted topic of releases: per drafter, what stands in its own place and beside it."""

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter in its own place."""

    def read_beside(self) -> Sequence[DrafterReleased]:
        """Return the newest release of the version beside every drafter that has had one."""

    def publish(self, release: DrafterReleased) -> None:
        """Publish durably what stands in the drafter's own place; returns once stored."""

    def publish_beside(self, release: DrafterReleased) -> None:
        """Publish durably what becomes of the version beside it; returns once stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentStates:
    """Hidden states of a segment.

    Attributes:
        hidden: float32 (P, H), the state that predicted each token of the segment.
        first_offset: Offset in the event's partition from which events must be read to have them
            again: the event's own, or that of the request's first segment if they were computed.
    """

    hidden: NDArray[np.float32]
    first_offset: int


class FeatureComputer(Protocol):
    """Hidden states computed again from the tokens of a request."""

    def follow(self, received: ReceivedEvent) -> None:
        """Remember what an event says; every event with content is shown, in order.

        Raises:
            ValueError: If it is of another target, or its tokens cannot be this one's.
        """

    def read(self, received: ReceivedEvent) -> SegmentStates | None:
        """Return the states of an event that was followed; None if its beginning is not known."""


class FeatureStore(Protocol):
    """Recorded hidden states."""

    def read(self, reference: FeatureReference) -> NDArray[np.float32]:
        """Return the referenced rows, shape (num_rows, H).

        Raises:
            LookupError: If they are gone or do not match their hash.
        """


class StoredVersion(Protocol):
    """Where a version was written."""

    @property
    def uri(self) -> str:
        """Folder of the version."""

    @property
    def manifest_sha256(self) -> str:
        """Proof of the folder."""

    @property
    def version(self) -> int:
        """Its number."""


class ArtifactStore(Protocol):
    """Versions of drafter weights, each written once."""

    def write(
        self,
        drafter_id: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        training_state: Mapping[str, torch.Tensor] | None = None,
    ) -> StoredVersion:
        """Publish a version durably.

        Raises:
            FileExistsError: If it exists: another trainer has written it.
            StoreError: If the store refuses, as a full disk does.
        """

    def read_config(self, uri: str, *, manifest_sha256: str) -> Mapping[str, Any]:
        """Return the config of a version."""

    def read_training_state(self, uri: str, *, manifest_sha256: str) -> Mapping[str, torch.Tensor]:
        """Return the training state of a version."""

    def copy(self, drafter_id: str, version: int, *, as_drafter_id: str) -> StoredVersion:
        """Publish a version under another drafter's id, unless its weights are there already."""

    def versions(self, drafter_id: str) -> Sequence[int]:
        """Return the versions that exist, ascending."""

    def prune(self, drafter_id: str, keep: int, protected: Collection[int]) -> Sequence[int]:
        """Delete all but the newest ``keep`` and the protected versions."""
