"""The learner's ports in memory, with what is durable apart from what a crash destroys."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from learner.ports import PartitionOwner, ReceivedEvent
from schemas.codec import decode_policy_published, encode
from schemas.events import PolicyPublished, VerificationEvent


class CrashError(Exception):
    """The process died here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedEvent:
    """One event with its place (``learner.ports.ReceivedEvent``)."""

    partition: int
    offset: int
    event: VerificationEvent


@dataclass(kw_only=True, slots=True)
class FakeEventLog:
    """The durable side of an event source: events by partition, and committed positions."""

    partition_to_events: Mapping[int, Sequence[PlacedEvent]]
    partition_to_committed: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, partition_to_events: Mapping[int, Sequence[VerificationEvent]]) -> FakeEventLog:
        """Place events at offsets 0, 1, ..."""
        return cls(
            partition_to_events={
                partition: [
                    PlacedEvent(partition=partition, offset=offset, event=event)
                    for offset, event in enumerate(events)
                ]
                for partition, events in partition_to_events.items()
            }
        )


class FakeEventSource:
    """Reads a ``FakeEventLog`` in random batches; sometimes delivers a batch twice.

    ``is_drained`` once everything was delivered and a poll has found nothing more.
    """

    def __init__(
        self, log: FakeEventLog, generator: np.random.Generator, *, redeliver: float = 0.0
    ) -> None:
        self._log = log
        self._generator = generator
        self._redeliver = redeliver
        self._partition_to_offset = dict.fromkeys(log.partition_to_events, 0)
        self.is_drained = False

    @property
    def partitions(self) -> Sequence[int]:
        """All partitions of the log."""
        return tuple(self._partition_to_offset)

    @property
    def is_exhausted(self) -> bool:
        """Nothing is left to deliver."""
        events = self._log.partition_to_events
        return all(offset >= len(events[p]) for p, offset in self._partition_to_offset.items())

    def seek(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on."""
        self._partition_to_offset[partition] = offset
        self.is_drained = False

    def listen(self, owner: PartitionOwner) -> None:
        """Pass over: the partitions never change."""

    def is_owner(self) -> bool:
        """Own them for good."""
        return True

    def poll(self, timeout_seconds: float) -> Sequence[ReceivedEvent]:
        """Return up to five events of every partition, without waiting."""
        was_exhausted = self.is_exhausted
        delivered: list[PlacedEvent] = []
        for partition, offset in self._partition_to_offset.items():
            count = int(self._generator.integers(0, 6))
            batch = self._log.partition_to_events[partition][offset : offset + count]
            delivered.extend(batch)
            if self._generator.random() >= self._redeliver:
                self._partition_to_offset[partition] += len(batch)
        self.is_drained = was_exhausted and not delivered
        return delivered

    def committed(self, partition: int) -> int | None:
        """Return the position last committed."""
        return self._log.partition_to_committed.get(partition)

    def commit(self, partition: int, offset: int) -> None:
        """Store a position."""
        self._log.partition_to_committed[partition] = offset


@dataclass(kw_only=True, slots=True)
class FakePolicyBoard:
    """Policies as the bytes that travel; ``num_stored_before_crash`` makes a publish die midway."""

    stream_to_bytes: dict[str, bytes] = field(default_factory=dict)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    num_stored_before_crash: int | None = None
    num_published: int = 0

    def read_all(self, partitions: Collection[int] | None = None) -> Sequence[PolicyPublished]:
        """Return the newest policy of every stream, whatever its partition."""
        return [decode_policy_published(data) for data in self.stream_to_bytes.values()]

    def publish(self, policies: Sequence[PolicyPublished]) -> None:
        """Store all, or, dying, any of them: brokers keep no order between partitions."""
        for index in self.generator.permutation(len(policies)):
            if self.num_stored_before_crash == 0:
                raise CrashError
            if self.num_stored_before_crash is not None:
                self.num_stored_before_crash -= 1
            self.stream_to_bytes[policies[index].stream] = encode(policies[index])
            self.num_published += 1


@dataclass(kw_only=True, slots=True)
class FakeRefusedEvents:
    """Remembers the places and reasons of refused events."""

    place_to_reason: dict[tuple[int, int], str] = field(default_factory=dict)

    def set_aside(self, received: ReceivedEvent, reason: str) -> None:
        """Remember one."""
        self.place_to_reason[received.partition, received.offset] = reason


@dataclass(kw_only=True, slots=True)
class FakeTrainer:
    """Trains by writing down places; what is ``released`` outlives a crash, the rest does not."""

    released: list[tuple[int, int]] = field(default_factory=list)
    unreleased: list[tuple[int, int]] = field(default_factory=list)

    def start_offsets(self) -> Mapping[int, int]:
        """Return where the released part ends; forget the rest, as a new process would."""
        self.unreleased.clear()
        return {partition: offset + 1 for partition, offset in self.released}

    def train(self, received: ReceivedEvent) -> None:
        """Take the event unless it is contained."""
        place = (received.partition, received.offset)
        known = [o for p, o in (*self.released, *self.unreleased) if p == received.partition]
        if received.offset > max(known, default=-1):
            self.unreleased.append(place)

    def release(self) -> None:
        """Make durable what was trained."""
        self.released.extend(self.unreleased)
        self.unreleased.clear()
