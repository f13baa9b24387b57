"""The embedded event log: topics in one SQLite file, for one machine and several processes."""

from __future__ import annotations

import itertools
import json
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from pipeline.eventlog.ports import (
    EventLogError,
    Message,
    StoredMessage,
    TopicSpec,
    UnknownTopicError,
)
from pipeline.eventlog.refusals import refuse_messages, refuse_mismatch, refuse_partition
from pipeline.eventlog.sqlite_file import SqliteFile
from schemas.avro import PACKAGED, SchemaTable

TOMBSTONE_RETENTION = timedelta(days=1)
"""How long a tombstone stays readable, so that a slow reader still learns of the deletion."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_FIRST_POLL_SECONDS, _LONGEST_POLL_SECONDS = 0.01, 0.05
"""Between two looks for a message, at first and, twice as long each time, at last: whoever waits
long would wake up a hundred times a second for it, on cores that serve."""
_MAX_READ_BYTES = 32 * 2**20


def _utc_now() -> datetime:
    return datetime.now(UTC)


class EmbeddedEventLog:
    """Event log in one SQLite file in WAL mode.

    An append is one transaction, synced to the disk before it returns. A message with a key goes
    to partition ``crc32(key) % num_partitions``; messages without key take turns. A compacted
    topic is compacted as it is written: an append removes the older messages of its keys, and
    the tombstones older than ``TOMBSTONE_RETENTION``. Threads may share one instance; processes
    open one each, after any fork.

    Args:
        path: The file; it and its folders are created where missing.
        busy_seconds: How long to wait for another writer before giving up, > 0.
        clock: Returns the time of appending, UTC.

    Raises:
        EventLogError: If the folder cannot be written, the file is damaged, is no event log, or
            has a newer layout.
    """

    def __init__(
        self,
        path: Path,
        *,
        busy_seconds: float = 30.0,
        clock: Callable[[], datetime] = _utc_now,
    ) -> None:
        self._file = SqliteFile(path, busy_seconds=busy_seconds)
        self._clock = clock
        self._turns = itertools.count()
        self._name_to_topic: dict[str, tuple[int, TopicSpec]] = {}
        self._write_lock = threading.Lock()

    @property
    def schemas(self) -> SchemaTable:
        """Those of this build: nobody else reads this file."""
        return PACKAGED

    def create_topic(self, spec: TopicSpec) -> None:
        """Create the topic; a no-op if it exists as declared.

        Raises:
            TopicMismatchError: If it exists with other partitions or another cleanup policy.
            EventLogError: If ``spec`` asks for less than one partition.
        """
        if spec.num_partitions < 1:
            raise EventLogError(
                f"topic {spec.name}: num_partitions={spec.num_partitions}; use 1 or more"
            )
        with self._write_lock, self._file.transaction() as connection:
            connection.execute(
                "INSERT INTO topics (name, num_partitions, is_compacted) VALUES (?, ?, ?) "
                "ON CONFLICT (name) DO NOTHING",
                (spec.name, spec.num_partitions, spec.is_compacted),
            )
        _, found = self._topic(spec.name)
        refuse_mismatch(found=found, declared=spec)

    def num_partitions(self, topic: str) -> int:
        """Return the number of partitions.

        Raises:
            UnknownTopicError: If the topic does not exist.
        """
        return self._topic(topic)[1].num_partitions

    def describe_topic(self, topic: str) -> TopicSpec:
        """Return the topic as it was created.

        Raises:
            UnknownTopicError: If the topic does not exist.
        """
        return self._topic(topic)[1]

    def append(self, topic: str, messages: Sequence[Message]) -> Sequence[tuple[int, int]]:
        """Append in order and return (partition, offset) of each, once all are durable."""
        topic_id, spec = self._topic(topic)
        refuse_messages(spec, messages)
        if not messages:
            return []
        partitions = [self._partition(message.key, spec) for message in messages]
        with self._write_lock, self._file.transaction() as connection:
            offsets = _next_offsets(connection, topic_id, partitions)
            now = _microseconds(self._clock())
            connection.executemany(
                "INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                _rows(topic_id, partitions, offsets, now, messages, spec.is_compacted),
            )
            if spec.is_compacted:
                _compact(connection, topic_id, partitions, messages, now)
        return list(zip(partitions, offsets, strict=True))

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

        At most ``max_messages``, and fewer once they add up to 32 MiB.
        """
        topic_id = self._checked(topic, partition)
        deadline, pause = time.monotonic() + timeout_seconds, _FIRST_POLL_SECONDS
        while True:
            with self._file.connection() as connection:
                found = _select(connection, topic_id, partition, offset, max_messages)
            remaining = deadline - time.monotonic()
            if found or remaining <= 0:
                return found
            time.sleep(min(pause, remaining))
            pause = min(2.0 * pause, _LONGEST_POLL_SECONDS)

    def begin_offset(self, topic: str, partition: int) -> int:
        """Return the first offset that may still be read."""
        topic_id = self._checked(topic, partition)
        with self._file.connection() as connection:
            (begin,) = connection.execute(
                "SELECT coalesce((SELECT min(message_offset) FROM messages "
                "WHERE topic_id = ?1 AND partition = ?2), (SELECT end_offset FROM ends "
                "WHERE topic_id = ?1 AND partition = ?2), 0)",
                (topic_id, partition),
            ).fetchone()
        return int(begin)

    def end_offset(self, topic: str, partition: int) -> int:
        """Return the offset that the next message will get."""
        topic_id = self._checked(topic, partition)
        with self._file.connection() as connection:
            return _end_offset(connection, topic_id, partition)

    def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Store a consumer position: the first offset not consumed."""
        topic_id = self._checked(topic, partition)
        with self._write_lock, self._file.transaction() as connection:
            connection.execute(
                "INSERT INTO positions VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE "
                "SET message_offset = excluded.message_offset",
                (group, topic_id, partition, offset),
            )

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        """Return the stored position, or None."""
        topic_id = self._checked(topic, partition)
        with self._file.connection() as connection:
            row = connection.execute(
                "SELECT message_offset FROM positions "
                "WHERE consumer_group = ? AND topic_id = ? AND partition = ?",
                (group, topic_id, partition),
            ).fetchone()
        return None if row is None else int(row[0])

    def close(self) -> None:
        """Release everything; idempotent. A call that runs in another thread ends first."""
        self._file.close()

    def _topic(self, name: str) -> tuple[int, TopicSpec]:
        # Topics are never changed or deleted, so what was read once stays true.
        if name not in self._name_to_topic:
            with self._file.connection() as connection:
                row = connection.execute(
                    "SELECT topic_id, num_partitions, is_compacted FROM topics WHERE name = ?",
                    (name,),
                ).fetchone()
            if row is None:
                raise UnknownTopicError(f"topic {name}: does not exist; create it first")
            topic_id, num_partitions, is_compacted = row
            self._name_to_topic[name] = (
                topic_id,
                TopicSpec(
                    name=name, num_partitions=num_partitions, is_compacted=bool(is_compacted)
                ),
            )
        return self._name_to_topic[name]

    def _checked(self, topic: str, partition: int) -> int:
        topic_id, spec = self._topic(topic)
        refuse_partition(spec, partition)
        return topic_id

    def _partition(self, key: bytes | None, spec: TopicSpec) -> int:
        number = next(self._turns) if key is None else zlib.crc32(key)
        return number % spec.num_partitions


def _end_offset(connection: sqlite3.Connection, topic_id: int, partition: int) -> int:
    row = connection.execute(
        "SELECT end_offset FROM ends WHERE topic_id = ? AND partition = ?", (topic_id, partition)
    ).fetchone()
    return 0 if row is None else int(row[0])


def _next_offsets(
    connection: sqlite3.Connection, topic_id: int, partitions: Sequence[int]
) -> list[int]:
    """Take the next offset of its partition for each element of ``partitions``."""
    ends = {p: _end_offset(connection, topic_id, p) for p in set(partitions)}
    offsets = []
    for partition in partitions:
        offsets.append(ends[partition])
        ends[partition] += 1
    connection.executemany(
        "INSERT INTO ends VALUES (?, ?, ?) "
        "ON CONFLICT DO UPDATE SET end_offset = excluded.end_offset",
        [(topic_id, partition, end) for partition, end in ends.items()],
    )
    return offsets


def _rows(
    topic_id: int,
    partitions: Sequence[int],
    offsets: Sequence[int],
    now: int,
    messages: Sequence[Message],
    is_compacted: bool,
) -> Iterable[tuple[int | bytes | str | None, ...]]:
    for partition, offset, message in zip(partitions, offsets, messages, strict=True):
        compaction_key = message.key if is_compacted else None
        headers = _headers_to_text(message.headers)
        content = (message.key, message.value, headers, compaction_key)
        yield (topic_id, partition, offset, now, *content)


def _compact(
    connection: sqlite3.Connection,
    topic_id: int,
    partitions: Sequence[int],
    messages: Sequence[Message],
    now: int,
) -> None:
    """Remove what these messages have superseded, and the tombstones that are old enough."""
    keys = {(topic_id, p, m.key) for p, m in zip(partitions, messages, strict=True)}
    connection.executemany(
        "DELETE FROM messages WHERE topic_id = ?1 AND partition = ?2 AND compaction_key = ?3 "
        "AND message_offset < (SELECT max(message_offset) FROM messages "
        "WHERE topic_id = ?1 AND partition = ?2 AND compaction_key = ?3)",
        keys,
    )
    connection.execute(
        "DELETE FROM messages WHERE compaction_key IS NOT NULL AND message_value IS NULL "
        "AND topic_id = ? AND appended_microseconds < ?",
        (topic_id, now - TOMBSTONE_RETENTION // _MICROSECOND),
    )


def _select(
    connection: sqlite3.Connection, topic_id: int, partition: int, offset: int, max_messages: int
) -> list[StoredMessage]:
    cursor = connection.execute(
        "SELECT message_offset, appended_microseconds, message_key, message_value, headers "
        "FROM messages WHERE topic_id = ? AND partition = ? AND message_offset >= ? "
        "ORDER BY message_offset LIMIT ?",
        (topic_id, partition, offset, max_messages),
    )
    found: list[StoredMessage] = []
    num_bytes = 0
    for message_offset, microseconds, key, value, headers in cursor:
        message = Message(key=key, value=value, headers=_headers_from_text(headers))
        found.append(
            StoredMessage(
                partition=partition,
                offset=message_offset,
                appended_at=_EPOCH + microseconds * _MICROSECOND,
                message=message,
            )
        )
        num_bytes += len(value or b"")
        if num_bytes >= _MAX_READ_BYTES:
            break
    cursor.close()
    return found


def _microseconds(time_utc: datetime) -> int:
    return (time_utc - _EPOCH) // _MICROSECOND


def _headers_to_text(headers: Mapping[str, bytes]) -> str:
    # Latin-1 maps every byte to one character and back, and leaves ASCII readable.
    return json.dumps({name: value.decode("latin-1") for name, value in headers.items()})


def _headers_from_text(text: str) -> dict[str, bytes]:
    return {name: value.encode("latin-1") for name, value in json.loads(text).items()}
