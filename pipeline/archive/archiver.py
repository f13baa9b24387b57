"""The archiver: verification events from the event log to rolling Parquet files.

The files are its only state. It goes on after the last offset that their names hold, and a file
appears by one rename, so whenever it dies, nothing is missing and nothing is there twice.
"""

from __future__ import annotations

import fcntl
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Self

from pipeline.archive.log_compaction import compact_log
from pipeline.archive.log_files import (
    EVENTS_FOLDER,
    UNFINISHED,
    LogFile,
    hour_folder,
    is_covered,
    log_files,
    make_names_durable,
    publish_log_file,
    remove_unfinished,
)
from pipeline.eventlog.ports import EventLog, EventLogError, StoredMessage
from pipeline.messaging.dead_letters import DeadLetters
from pipeline.messaging.event_decoding import decode_events
from pipeline.operations.loops import Loop
from schemas.arrow import events_to_table
from schemas.errors import KnownError

MAX_BYTES_PER_FILE = 64 * 2**20
"""Bytes of messages after which a file is cut, which bounds the memory of the archiver."""

MESSAGES_PER_READ = 500
IDLE_SECONDS = 0.1
COMPACT_SECONDS = 600.0
"""Time between two looks for short files to merge."""
LAG_SECONDS = 5.0
"""Time between two looks at where the log ends."""
FIRST_RETRY_SECONDS = 0.5
LAST_RETRY_SECONDS = 30.0

logger = logging.getLogger(__name__)


class ArchiverError(KnownError):
    """The archiver cannot work in its folder; the message names it and the cure."""


@dataclass(slots=True)
class _Pending:
    """What one partition has read since its last file.

    Once ``is_sealed``, writing has been tried, perhaps with success, so nothing may be added: the
    next try must give the same file.
    """

    first_offset: int
    messages: list[StoredMessage] = field(default_factory=list)
    num_bytes: int = 0
    started_seconds: float = 0.0
    is_sealed: bool = False

    @property
    def next_offset(self) -> int:
        return self.messages[-1].offset + 1 if self.messages else self.first_offset

    def add(self, messages: Sequence[StoredMessage], now_seconds: float) -> None:
        if not self.messages:
            self.started_seconds = now_seconds
        self.messages.extend(messages)
        self.num_bytes += sum(len(stored.message.value or b"") for stored in messages)

    def restart(self) -> None:
        """Go on behind what has been written."""
        self.first_offset = self.next_offset
        self.messages = []
        self.num_bytes = 0
        self.is_sealed = False


class Archiver:
    """Archives one topic of verification events; all its partitions, in offset order.

    Args:
        log: Where the events come from.
        topic: A topic of verification events.
        folder: The data folder; files go to ``events/`` in it.
        dead_letters: Takes the messages that cannot be decoded; their offsets count as archived.
        max_events_per_file: A file is cut at this many messages, >= 1.
        max_seconds_per_file: A file is cut when its first message was read this long ago.
        clock: Monotonic seconds.

    Attributes:
        num_events: Events in the files written by this instance.
        num_files: Files written by this instance.
        num_dead_letters: Messages set aside by this instance.
        kind_to_dead_letters: The same by ``pipeline.messaging.dead_letters.KINDS``.
        lag_messages: Messages still to be read, as last looked.
        num_failures: Steps that failed and were, or will be, repeated: a full disk, a broker away.
        num_lost_offsets: Offsets that the log deleted before they were archived.
        num_merged_files: Short files that were merged into long ones.

    Raises:
        ArchiverError: If the folder cannot be written or another archiver works in it.
        EventLogError: If the log ends before the offsets that the files hold.
    """

    def __init__(
        self,
        log: EventLog,
        topic: str,
        folder: Path,
        *,
        dead_letters: DeadLetters,
        max_events_per_file: int = 10_000,
        max_seconds_per_file: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._topic = topic
        self._folder = folder
        self._dead_letters = dead_letters
        self._max_events = max_events_per_file
        self._max_seconds = max_seconds_per_file
        self._clock = clock
        self.num_events = 0
        self.num_files = 0
        self.num_dead_letters = 0
        self.kind_to_dead_letters: Counter[str] = Counter()
        self.lag_messages = 0
        self._looked_seconds = float("-inf")
        self.num_failures = 0
        self.num_lost_offsets = 0
        self.num_merged_files = 0
        self._compacted_seconds = clock()
        self._lock_file = _lock(folder, topic)
        try:
            remove_unfinished(folder, topic)
            self._partition_to_pending = self._resume()
        except BaseException:
            self._lock_file.close()
            raise

    def run(self, stop: threading.Event, loop: Loop | None = None) -> None:
        """Archive until ``stop`` is set, then archive what is left.

        A step that fails is logged, counted and repeated with growing pauses; nothing is lost.
        """
        loop = loop or Loop("archiver")
        retry_seconds = FIRST_RETRY_SECONDS
        while not stop.is_set():
            try:
                loop.move()
                if not self.run_once():
                    stop.wait(IDLE_SECONDS)
                self._look_if_due()
                self._compact_if_due()
                loop.recover()
                retry_seconds = FIRST_RETRY_SECONDS
            except (OSError, EventLogError) as error:
                loop.miss(str(error))
                self._alarm(error, retry_seconds)
                stop.wait(retry_seconds)
                retry_seconds = min(2 * retry_seconds, LAST_RETRY_SECONDS)
        try:
            self.drain()
        except (OSError, EventLogError) as error:
            self._alarm(error, 0.0)

    def run_once(self) -> int:
        """Read one page of every partition, write the files that are due, return messages read.

        Raises:
            OSError: If a file could not be written. Nothing is lost: call again.
            EventLogError: If the log could not be read. Nothing is lost: call again.
        """
        num_read = 0
        for partition, pending in self._partition_to_pending.items():
            self._write_if_due(partition, pending)
            num_read += self._read(partition, pending)
            self._write_if_due(partition, pending)
        return num_read

    def drain(self) -> None:
        """Archive all that was appended before the call, however short the last files are.

        Raises:
            OSError: As ``run_once``.
            EventLogError: As ``run_once``.
        """
        partition_to_end = {
            partition: self._log.end_offset(self._topic, partition)
            for partition in self._partition_to_pending
        }
        while self._is_behind(partition_to_end) and self.run_once():
            pass
        for partition, pending in self._partition_to_pending.items():
            if pending.messages:
                self._write(partition, pending)

    def close(self) -> None:
        """Let another archiver work in the folder; what is not in a file is read again then."""
        self._lock_file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_if_due(self) -> None:
        if self._clock() - self._looked_seconds < LAG_SECONDS:
            return
        self._looked_seconds = self._clock()
        self.lag_messages = sum(
            self._log.end_offset(self._topic, partition) - pending.next_offset
            for partition, pending in self._partition_to_pending.items()
        )

    def _compact_if_due(self) -> None:
        if self._clock() - self._compacted_seconds < COMPACT_SECONDS:
            return
        self._compacted_seconds = self._clock()
        done = compact_log(self._folder, self._topic, datetime.now(UTC))
        self.num_merged_files += done.num_merged

    def _resume(self) -> dict[int, _Pending]:
        partition_to_next: dict[int, int] = {}
        for file in log_files(self._folder, self._topic):
            known = partition_to_next.get(file.partition, 0)
            partition_to_next[file.partition] = max(known, file.last_offset + 1)
        pendings = {}
        for partition in range(self._log.num_partitions(self._topic)):
            begin = self._log.begin_offset(self._topic, partition)
            offset = partition_to_next.get(partition, begin)
            end = self._log.end_offset(self._topic, partition)
            if offset > end:
                raise EventLogError(
                    f"{self._folder}: holds {self._topic}/{partition} up to offset {offset - 1}, "
                    f"but the event log ends at {end}; restore the log or use another data folder"
                )
            pendings[partition] = _Pending(offset)
        return pendings

    def _read(self, partition: int, pending: _Pending) -> int:
        room = self._max_events - len(pending.messages)
        messages = self._log.read(
            self._topic, partition, pending.next_offset, max_messages=min(room, MESSAGES_PER_READ)
        )
        if messages:
            if messages[0].offset > pending.next_offset:
                self._skip_deleted(partition, pending)
            pending.add(messages, self._clock())
        return len(messages)

    def _skip_deleted(self, partition: int, pending: _Pending) -> None:
        """End the file where the log has lost offsets, so that no name claims them."""
        begin, expected = self._log.begin_offset(self._topic, partition), pending.next_offset
        if begin <= expected:
            return
        if pending.messages:
            self._write(partition, pending)
        pending.first_offset = begin
        self.num_lost_offsets += begin - expected
        logger.error(
            "%s/%d: offsets %d..%d were deleted before they were archived; "
            "keep events longer in the log, or archive faster",
            *(self._topic, partition, expected, begin - 1),
        )

    def _write_if_due(self, partition: int, pending: _Pending) -> None:
        is_due = bool(pending.messages) and (
            pending.is_sealed
            or len(pending.messages) >= self._max_events
            or pending.num_bytes >= MAX_BYTES_PER_FILE
            or self._clock() - pending.started_seconds >= self._max_seconds
        )
        if is_due:
            self._write(partition, pending)

    def _is_behind(self, partition_to_end: dict[int, int]) -> bool:
        return any(
            self._partition_to_pending[partition].next_offset < end
            for partition, end in partition_to_end.items()
        )

    def _write(self, partition: int, pending: _Pending) -> None:
        was_tried, pending.is_sealed = pending.is_sealed, True
        rows, letters = decode_events(self._topic, pending.messages, table=self._log.schemas)
        # Before the file: once its name exists, nobody looks at these messages again.
        self._dead_letters.set_aside(letters)
        file = LogFile(
            topic=self._topic,
            partition=partition,
            first_offset=pending.first_offset,
            last_offset=pending.next_offset - 1,
        )
        folder = hour_folder(self._folder, pending.messages[0].appended_at)
        if was_tried and is_covered(self._folder, file):
            # The last try got as far as the name; since then rows may have been deleted from it.
            make_names_durable(folder)
        else:
            publish_log_file(folder, file, events_to_table(rows))
        pending.restart()
        self.num_events += len(rows)
        self.num_files += 1
        self.num_dead_letters += len(letters)
        self.kind_to_dead_letters.update(letter.kind for letter in letters)

    def _alarm(self, error: Exception, retry_seconds: float) -> None:
        self.num_failures += 1
        logger.error(
            "archiving of %s paused, nothing is lost, next try in %.1f s: %s",
            *(self._topic, retry_seconds, error),
        )


def _lock(folder: Path, topic: str) -> IO[bytes]:
    """Hold the folder for one archiver of the topic, until the file is closed or we die."""
    path = folder / EVENTS_FOLDER / f"{UNFINISHED}{topic}.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise ArchiverError(f"{folder}: {error}; use a data folder that can be written") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ArchiverError(
            f"{folder}: another archiver of {topic} works here; end it or use another data folder"
        ) from error
    return file
