"""The Parquet log of a recording: the archiver's layout, written without an event log between.

What one conversation emitted is kept apart until it is complete, so an interrupted one leaves
nothing; complete ones go to files that appear by one rename.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pipeline.archive.log_files import (
    EVENTS_FOLDER,
    LogFile,
    hour_folder,
    log_files,
    publish_log_file,
    remove_unfinished,
)
from schemas.arrow import LoggedEvent, events_from_table, events_to_table, read_table
from schemas.errors import KnownError
from schemas.events import VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

PARTITION = 0


class RecordingExistsError(KnownError):
    """The folder holds a log already; the message names it and the cure."""


def refuse_existing(folder: Path) -> None:
    """Refuse a folder that holds a log, so that no two recordings are ever mixed.

    Raises:
        RecordingExistsError: If it does.
    """
    if any((folder / EVENTS_FOLDER).rglob("*.parquet")):
        raise RecordingExistsError(
            f"{folder}: holds a log already; record to another folder, or go on with --resume"
        )


class RecordingLog:
    """Takes events as they are emitted and writes those of complete conversations.

    Args:
        folder: The recording; files go to ``events/`` in it.
        resume: Go on behind what is there, instead of refusing it.
        conversations_per_file: A file is written after this many, and by ``close``.

    Attributes:
        num_events: Events in files or on their way there.

    Raises:
        RecordingExistsError: If there is a log and ``resume`` is False.
    """

    def __init__(self, folder: Path, *, resume: bool, conversations_per_file: int = 8) -> None:
        files = log_files(folder, VERIFICATION_EVENTS)
        if not resume:
            refuse_existing(folder)
        remove_unfinished(folder, VERIFICATION_EVENTS)
        self._folder = folder
        self._conversations_per_file = conversations_per_file
        self._next_offset = max((file.last_offset + 1 for file in files), default=0)
        self._running: list[VerificationEvent] = []
        self._rows: list[LoggedEvent] = []
        self._num_conversations = 0
        self.num_events = 0

    def recorded(self) -> Iterator[VerificationEvent]:
        """Read the events that are in files, in no particular order.

        Raises:
            OSError, ArrowException: If a file cannot be read.
        """
        for path in sorted((self._folder / EVENTS_FOLDER).glob("date=*/hour=*/*.parquet")):
            if LogFile.parse(path.name) is not None:
                for row in events_from_table(read_table(path)):
                    yield row.event

    def emit(self, event: VerificationEvent) -> None:
        """Keep an event of the conversation that runs; never drops one."""
        self._running.append(event)

    def commit(self) -> None:
        """The conversation is complete.

        Raises:
            OSError: If the file that is due cannot be written; a later ``commit`` or ``close``
                writes it.
        """
        now = datetime.now(UTC)
        for event in self._running:
            offset = self._next_offset + len(self._rows)
            self._rows.append(
                LoggedEvent(
                    topic=VERIFICATION_EVENTS,
                    partition=PARTITION,
                    offset=offset,
                    appended_at=now,
                    event=event,
                )
            )
        self.num_events += len(self._running)
        self._running = []
        self._num_conversations += 1
        if self._num_conversations >= self._conversations_per_file:
            self._write()

    def discard(self) -> None:
        """The conversation was not finished: forget its events."""
        self._running = []

    def close(self) -> None:
        """Write what is complete and not yet in a file."""
        if self._rows:
            self._write()

    def _write(self) -> None:
        last_offset = self._next_offset + len(self._rows) - 1
        file = LogFile(
            topic=VERIFICATION_EVENTS,
            partition=PARTITION,
            first_offset=self._next_offset,
            last_offset=last_offset,
        )
        folder = hour_folder(self._folder, self._rows[0].appended_at)
        publish_log_file(folder, file, events_to_table(self._rows))
        self._next_offset = last_offset + 1
        self._rows = []
        self._num_conversations = 0
