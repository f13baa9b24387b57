"""The ports of learner and worker over the event log.

Every topic is read defensively: a message that no contract admits is counted and passed over,
events with a copy in the dead-letter topic, policies and releases with the last good one kept.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Generic, TypeVar

from learner.ports import PartitionOwner, ReceivedEvent
from pipeline.eventlog.ports import EventLog, EventLogError, Message, StoredMessage
from pipeline.messaging.dead_letters import DeadLetter, DeadLetterTopic
from pipeline.messaging.event_decoding import decode_events
from pipeline.messaging.event_sender import LogEventSender
from schemas.arrow import LoggedEvent
from schemas.avro import SchemaTable
from schemas.codec import (
    cloud_event_headers,
    decode_drafter_released,
    decode_policy_published,
    encode,
)
from schemas.errors import ContractError
from schemas.events import DrafterReleased, PolicyPublished
from schemas.topics import DRAFTER_RELEASES, POLICIES, VERIFICATION_EVENTS

__all__ = [
    "LogEventSender",
    "LogEventSource",
    "LogPolicyBoard",
    "LogRefusedEvents",
    "LogReleaseBoard",
    "PolicyFollower",
    "ReleaseFollower",
]

POLL_SLICE_SECONDS = 0.05

BESIDE = "/beside"
"""Ends the key of releases of the version beside a drafter; no identifier holds a slash.

Of every key the newest message is kept: a version on trial must not displace the live one.
"""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class LogEventSource:
    """Verification events of some partitions (``learner.ports.EventSource``).

    Args:
        log: The event log, used from one thread.
        partitions: Those this learner owns; read from their first offset unless sought.
        group: Names the learner's committed positions.
        max_messages: Most messages read per partition and poll.

    Attributes:
        num_dead_letters: Messages that could not be decoded and went to the dead letters.
        kind_to_dead_letters: The same by ``pipeline.messaging.dead_letters.KINDS``.
    """

    def __init__(
        self,
        log: EventLog,
        partitions: Sequence[int],
        *,
        group: str = "draftloop.learner",
        max_messages: int = 500,
    ) -> None:
        self._log = log
        self._group = group
        self._max_messages = max_messages
        self._partition_to_offset = {
            partition: log.begin_offset(VERIFICATION_EVENTS, partition) for partition in partitions
        }
        self._dead_letters = DeadLetterTopic(log)
        self._turn = 0
        self.num_dead_letters = 0
        self.kind_to_dead_letters: Counter[str] = Counter()

    @property
    def partitions(self) -> Sequence[int]:
        """Partitions this learner owns."""
        return tuple(self._partition_to_offset)

    def listen(self, owner: PartitionOwner) -> None:
        """Pass over: these partitions never change hands."""

    def is_owner(self) -> bool:
        """Own the partitions for good: whoever starts a learner sees to it."""
        return True

    def seek(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on.

        Raises:
            KeyError: If the partition is not owned.
            EventLogError: If the log ends before ``offset``: it is not the log that the
                learner's state was made from.
        """
        if partition not in self._partition_to_offset:
            raise KeyError(f"partition {partition} is not among {self.partitions}")
        begin = self._log.begin_offset(VERIFICATION_EVENTS, partition)
        end = self._log.end_offset(VERIFICATION_EVENTS, partition)
        if offset > end:
            raise EventLogError(
                f"{VERIFICATION_EVENTS}/{partition}: the learner's state contains offsets below "
                f"{offset}, the log ends at {end}; restore the log, or delete the policies topic "
                "to learn afresh"
            )
        if offset < begin:
            logger.warning(
                "%s/%d: offsets %d..%d were deleted before they were read",
                VERIFICATION_EVENTS,
                partition,
                offset,
                begin - 1,
            )
        self._partition_to_offset[partition] = max(offset, begin)

    def committed(self, partition: int) -> int | None:
        """Return the position last committed for ``partition``, or None."""
        return self._log.committed(self._group, VERIFICATION_EVENTS, partition)

    def commit(self, partition: int, offset: int) -> None:
        """Store durably that everything below ``offset`` is contained in published policies."""
        self._log.commit(self._group, VERIFICATION_EVENTS, partition, offset)

    def poll(self, timeout_seconds: float) -> Sequence[LoggedEvent]:
        """Return what has arrived, waiting at most ``timeout_seconds`` for the first.

        The position moves past everything read, the undecodable included, once their copies are
        in the dead letters; if that fails, the next poll reads the same messages again.
        """
        deadline = time.monotonic() + timeout_seconds
        messages = self._read_all()
        while not messages:
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0 or not self._partition_to_offset:
                return []
            messages = self._read_next(min(remaining_seconds, self._slice_seconds()))
        events = self._decode(messages)
        for stored in messages:
            self._partition_to_offset[stored.partition] = stored.offset + 1
        return events

    def _slice_seconds(self) -> float:
        """Wait for a single partition as long as asked, for several in turns."""
        return float("inf") if len(self._partition_to_offset) == 1 else POLL_SLICE_SECONDS

    def _read_all(self) -> list[StoredMessage]:
        return [
            stored for partition in self.partitions for stored in self._read(partition, seconds=0.0)
        ]

    def _read_next(self, seconds: float) -> list[StoredMessage]:
        """Wait on the partition whose turn it is."""
        self._turn = (self._turn + 1) % len(self.partitions)
        return list(self._read(self.partitions[self._turn], seconds=seconds))

    def _read(self, partition: int, *, seconds: float) -> Sequence[StoredMessage]:
        return self._log.read(
            VERIFICATION_EVENTS,
            partition,
            self._partition_to_offset[partition],
            max_messages=self._max_messages,
            timeout_seconds=seconds,
        )

    def _decode(self, messages: Sequence[StoredMessage]) -> list[LoggedEvent]:
        events, letters = decode_events(VERIFICATION_EVENTS, messages, table=self._log.schemas)
        self._dead_letters.set_aside(letters)
        self.num_dead_letters += len(letters)
        self.kind_to_dead_letters.update(letter.kind for letter in letters)
        return events


class LogRefusedEvents:
    """Events that could be read but not learned, in the dead letters (``learner.ports``)."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._dead_letters = DeadLetterTopic(log)

    def set_aside(self, received: ReceivedEvent, reason: str) -> None:
        """Keep the event's original bytes with its place and the reason."""
        partition, offset = received.partition, received.offset
        page = self._log.read(VERIFICATION_EVENTS, partition, offset, max_messages=1)
        letters = [
            DeadLetter(topic=VERIFICATION_EVENTS, stored=stored, reason=reason)
            for stored in page
            if stored.offset == offset
        ]
        self._dead_letters.set_aside(letters)


class _Follower(Generic[T]):
    """Reads a compacted topic on from where it stopped, newest good message per key."""

    def __init__(
        self,
        log: EventLog,
        topic: str,
        decode: Callable[..., T],
        *,
        version: Callable[[T], int] | None = None,
    ) -> None:
        self._log = log
        self._topic = topic
        self._decode = decode
        self._version = version
        self._partition_to_offset: dict[int, int] = {}
        self._key_to_version: dict[bytes, int] = {}
        self.num_undecodable = 0
        self.num_superseded = 0

    def poll(self, partitions: Collection[int] | None = None) -> list[T]:
        """Return the newest good message of every key that has one since the last call.

        Reads up to where the topic ends when called; the first call reads all of it.
        """
        return list(self.poll_by_key(partitions).values())

    def poll_by_key(self, partitions: Collection[int] | None = None) -> dict[bytes, T]:
        """Return the same by key, in the order of their last messages."""
        newest: dict[bytes, T] = {}
        if partitions is None:
            partitions = range(self._log.num_partitions(self._topic))
        positions = {p: self._read_to_end(p, newest) for p in partitions}
        self._partition_to_offset = positions
        return newest

    def _read_to_end(self, partition: int, newest: dict[bytes, T]) -> int:
        begin = self._log.begin_offset(self._topic, partition)
        offset = max(begin, self._partition_to_offset.get(partition, 0))
        end = self._log.end_offset(self._topic, partition)
        while offset < end:
            messages = self._log.read(self._topic, partition, offset)
            for stored in messages:
                self._take(stored, newest)
            # Compaction may leave nothing between here and the end.
            offset = messages[-1].offset + 1 if messages else end
        return offset

    def _take(self, stored: StoredMessage, newest: dict[bytes, T]) -> None:
        key = stored.message.key or b""
        if stored.message.value is None:
            newest.pop(key, None)
            self._key_to_version.pop(key, None)
            return
        try:
            fact = self._decode(stored.message.value, table=self._log.schemas)
        except ContractError as error:
            self.num_undecodable += 1
            logger.warning("%s, passed over: %s", _place(self._topic, stored), error)
            return
        if self._is_newest(key, fact):
            newest.pop(key, None)
            newest[key] = fact

    def _is_newest(self, key: bytes, fact: T) -> bool:
        """Pass over what a member wrote that was cut off while another went on."""
        if self._version is None:
            return True
        version = self._version(fact)
        if version < self._key_to_version.get(key, version):
            self.num_superseded += 1
            return False
        self._key_to_version[key] = version
        return True


def _policy_version(policy: PolicyPublished) -> int:
    """A stream's state at a version is a function of its events, whoever computed it."""
    return policy.version


class PolicyFollower:
    """New policies since the last look, for a worker's background thread.

    Attributes:
        num_undecodable: Messages passed over; the last good policy stays in force.
    """

    def __init__(self, log: EventLog) -> None:
        self._follower = _Follower(log, POLICIES, decode_policy_published, version=_policy_version)

    @property
    def num_undecodable(self) -> int:
        """Messages that no contract admits."""
        return self._follower.num_undecodable

    def poll(self) -> Sequence[PolicyPublished]:
        """Return the newest policy of every stream that has a new one; waits for nothing."""
        return self._follower.poll()


class ReleaseFollower:
    """New releases since the last look, for a worker's background thread.

    Attributes:
        num_undecodable: Messages passed over; the last good release stays in force.
    """

    def __init__(self, log: EventLog) -> None:
        self._follower = _Follower(log, DRAFTER_RELEASES, decode_drafter_released)
        self._beside: dict[str, DrafterReleased] = {}

    @property
    def num_undecodable(self) -> int:
        """Messages that no contract admits."""
        return self._follower.num_undecodable

    def poll(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter that has a new one; waits for nothing."""
        own, beside = _own_and_beside(self._follower.poll_by_key())
        self._beside |= {release.drafter_id: release for release in beside}
        return own

    def take_beside(self) -> Sequence[DrafterReleased]:
        """Return what the last polls found of the versions beside the drafters' own."""
        taken, self._beside = list(self._beside.values()), {}
        return taken


class LogPolicyBoard:
    """The policies topic (``learner.ports.PolicyBoard``); ``source`` names who publishes."""

    def __init__(self, log: EventLog, *, source: str) -> None:
        self._log = log
        self._source = source

    def read_all(self, partitions: Collection[int] | None = None) -> Sequence[PolicyPublished]:
        """Return the newest policy of every stream, or of those in some partitions."""
        follower = _Follower(self._log, POLICIES, decode_policy_published, version=_policy_version)
        return follower.poll(partitions)

    def publish(self, policies: Sequence[PolicyPublished]) -> None:
        """Publish durably; returns once stored."""
        table = self._log.schemas
        self._log.append(POLICIES, [_message(p.stream, p, self._source, table) for p in policies])


class LogReleaseBoard:
    """The releases topic (``learner.ports.ReleaseBoard``); ``source`` names who publishes."""

    def __init__(self, log: EventLog, *, source: str) -> None:
        self._log = log
        self._source = source

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter in its own place."""
        return self._read()[0]

    def read_beside(self) -> Sequence[DrafterReleased]:
        """Return the newest release of the version beside every drafter that has had one."""
        return self._read()[1]

    def publish(self, release: DrafterReleased) -> None:
        """Publish durably what stands in the drafter's own place; returns once stored."""
        message = _message(release.drafter_id, release, self._source, self._log.schemas)
        self._log.append(DRAFTER_RELEASES, [message])

    def publish_beside(self, release: DrafterReleased) -> None:
        """Publish durably what becomes of the version beside it; returns once stored."""
        key = release.drafter_id + BESIDE
        message = _message(key, release, self._source, self._log.schemas)
        self._log.append(DRAFTER_RELEASES, [message])

    def _read(self) -> tuple[list[DrafterReleased], list[DrafterReleased]]:
        follower = _Follower(self._log, DRAFTER_RELEASES, decode_drafter_released)
        return _own_and_beside(follower.poll_by_key())


def _own_and_beside(
    key_to_release: Mapping[bytes, DrafterReleased],
) -> tuple[list[DrafterReleased], list[DrafterReleased]]:
    suffix = BESIDE.encode()
    own = [one for key, one in key_to_release.items() if not key.endswith(suffix)]
    return own, [one for key, one in key_to_release.items() if key.endswith(suffix)]


def _message(
    key: str, fact: PolicyPublished | DrafterReleased, source: str, table: SchemaTable
) -> Message:
    headers = cloud_event_headers(fact, source=source)
    return Message(key=key.encode(), value=encode(fact, table=table), headers=headers)


def _place(topic: str, stored: StoredMessage) -> str:
    return f"{topic}/{stored.partition} offset {stored.offset}"
