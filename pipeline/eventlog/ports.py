"""The event log as the services see it: two adapters, one contract (``tests/pipeline``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

from schemas.avro import SchemaTable
from schemas.errors import KnownError


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What is appended. ``value`` None is a tombstone.

    At least one of ``key`` and ``value`` is given; on a compacted topic, ``key`` always is.
    """

    key: bytes | None
    value: bytes | None
    headers: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredMessage:
    """What is read: the message, where it lies and when it was appended (UTC)."""

    partition: int
    offset: int
    appended_at: datetime
    message: Message


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicSpec:
    """A topic as declared. A compacted topic keeps at least the newest message of every key.

    ``configs`` are the broker's settings of the topic, by the broker's names; a log that has none
    of them passes over them.
    """

    name: str
    num_partitions: int
    is_compacted: bool = False
    configs: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)


class EventLog(Protocol):
    """Ordered, durable, partitioned topics.

    Messages with the same key land in the same partition, in the order of appending. Offsets
    only grow; compaction may leave gaps. Every method raises ``EventLogError`` when the log
    cannot serve, and ``UnknownTopicError`` for a topic that was not created. Threads may share a
    log; processes open one each, after any fork.
    """

    @property
    def schemas(self) -> SchemaTable:
        """What messages of this log are written and read with."""

    def create_topic(self, spec: TopicSpec) -> None:
        """Create the topic; a no-op if it exists as declared.

        Raises:
            TopicMismatchError: If it exists with other partitions or another cleanup policy.
        """

    def num_partitions(self, topic: str) -> int:
        """Return the number of partitions.

        Raises:
            UnknownTopicError: If the topic does not exist.
        """

    def describe_topic(self, topic: str) -> TopicSpec:
        """Return the topic as it is now, with the settings that the broker tells.

        Raises:
            UnknownTopicError: If the topic does not exist.
        """

    def append(self, topic: str, messages: Sequence[Message]) -> Sequence[tuple[int, int]]:
        """Append in order and return (partition, offset) of each, once all are durable.

        After an ``EventLogError`` some may be stored: repeat, readers drop repeats by their
        idempotence key.
        """

    def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_messages: int = 500,
        timeout_seconds: float = 0.0,
    ) -> Sequence[StoredMessage]:
        """Return messages from ``offset`` on, waiting at most ``timeout_seconds`` for the first.

        What is stored is returned even without waiting, so an empty answer means that nothing
        lies at ``offset`` or beyond. Fewer than ``max_messages`` does not mean that.
        """

    def begin_offset(self, topic: str, partition: int) -> int:
        """Return the first offset that may still be read."""

    def end_offset(self, topic: str, partition: int) -> int:
        """Return the offset that the next message will get."""

    def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Store a consumer position: the first offset not consumed."""

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        """Return the stored position, or None."""

    def close(self) -> None:
        """Release everything; idempotent."""


class EventLogError(KnownError):
    """The event log could not do what was asked; the message names the topic and the cure."""


class EventLogUnavailableError(EventLogError):
    """The event log cannot be reached just now; it may come back by itself."""


class UnknownTopicError(EventLogError):
    """The topic does not exist."""


class TopicMismatchError(EventLogError):
    """The topic exists with another shape than declared."""
