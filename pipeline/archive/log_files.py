"""The files of the Parquet log: their names, and how they come into being whole.

A file is ``<topic>-<partition>-<first offset>-<last offset>.parquet`` in the folder
``events/date=YYYY-MM-DD/hour=HH`` of its first event. While it is written its name starts with
``_``, which readers ignore.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import pyarrow as pa

from pipeline.locks import only_one
from schemas.arrow import write_table

EVENTS_FOLDER = "events"
UNFINISHED = "_"

_OFFSET_DIGITS = 19
"""Width of the largest 64-bit offset, so that names sort as their offsets do."""

_PATTERN = re.compile(r"(.+)-(\d+)-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class LogFile:
    """What the name of a file says: it covers ``first_offset``..``last_offset``, both included."""

    topic: str
    partition: int
    first_offset: int
    last_offset: int

    @property
    def name(self) -> str:
        """The file's name, without folders."""
        first, last = (f"{o:0{_OFFSET_DIGITS}}" for o in (self.first_offset, self.last_offset))
        return f"{self.topic}-{self.partition:05}-{first}-{last}.parquet"

    @classmethod
    def parse(cls, name: str) -> Self | None:
        """Return what ``name`` says, or None if it is no name of a log file."""
        match = _PATTERN.fullmatch(name)
        if match is None or name.startswith(UNFINISHED):
            return None
        partition, first, last = (int(number) for number in match.groups()[1:])
        return cls(topic=match[1], partition=partition, first_offset=first, last_offset=last)


def hour_folder(data_folder: Path, first_event_at: datetime) -> Path:
    """Return the folder of a file whose first event was appended at this time (UTC)."""
    day = f"date={first_event_at:%Y-%m-%d}"
    return data_folder / EVENTS_FOLDER / day / f"hour={first_event_at:%H}"


def hour_of(path: Path) -> datetime | None:
    """Return when the hour of a file's folder begins (UTC), or None if it is in no such folder."""
    day, hour = path.parent.parent.name.removeprefix("date="), path.parent.name
    try:
        begun = datetime.fromisoformat(day).replace(hour=int(hour.removeprefix("hour=")))
    except ValueError:
        return None
    return begun.replace(tzinfo=UTC)


def log_paths(data_folder: Path, topic: str) -> list[Path]:
    """Return where the finished files of a topic are, in the order of their paths."""
    found = ((path, LogFile.parse(path.name)) for path in _parquet_files(data_folder))
    return sorted(path for path, file in found if file is not None and file.topic == topic)


def log_files(data_folder: Path, topic: str) -> list[LogFile]:
    """Return the finished files of a topic, by partition and offset."""
    found = (LogFile.parse(path.name) for path in _parquet_files(data_folder))
    return sorted(file for file in found if file is not None and file.topic == topic)


def remove_unfinished(data_folder: Path, topic: str, *, before: float = math.inf) -> int:
    """Remove what writers of this topic left behind when they died; return how many files.

    Args:
        data_folder: Holds ``events/``.
        topic: Whose files.
        before: Only what was last written before this time (Unix seconds): where writers are at
            work, that nobody can be writing any more.
    """
    num_removed = 0
    for path in _parquet_files(data_folder):
        file = LogFile.parse(path.name.removeprefix(UNFINISHED))
        if not path.name.startswith(UNFINISHED) or file is None or file.topic != topic:
            continue
        with suppress(FileNotFoundError):  # Whoever was writing it has just finished.
            if path.stat().st_mtime < before:
                path.unlink()
                num_removed += 1
    return num_removed


def rewriting(data_folder: Path) -> AbstractContextManager[None]:
    """Hold the log for one that replaces files: a merged file must not bring deleted rows back.

    Raises:
        LockError: If files are being merged or rewritten already.
    """
    return only_one(data_folder, "rewriting of the log", cure="run this again when it is done")


def publish_log_file(folder: Path, file: LogFile, table: pa.Table) -> Path:
    """Write a file that is there as a whole or not at all, and durable when this returns.

    Raises:
        OSError: If it cannot be stored; then nothing is left under the final name.
    """
    final, unfinished = folder / file.name, folder / f"{UNFINISHED}{file.name}"
    _make_folders(folder)
    try:
        with unfinished.open("wb") as stream:
            write_table(table, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(final)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(folder)
    return final


def is_covered(data_folder: Path, file: LogFile) -> bool:
    """Tell whether a finished file, it or one that it was merged into, covers these offsets."""
    return any(
        one.partition == file.partition
        and one.first_offset <= file.first_offset
        and one.last_offset >= file.last_offset
        for one in log_files(data_folder, file.topic)
    )


def make_names_durable(folder: Path) -> None:
    """Make the names of a folder durable, after a ``publish_log_file`` that could not.

    Raises:
        OSError: If they cannot be.
    """
    _sync_folder(folder)


def _parquet_files(data_folder: Path) -> Iterator[Path]:
    return (data_folder / EVENTS_FOLDER).glob("date=*/hour=*/*.parquet")


def _make_folders(folder: Path) -> None:
    """Create a folder and its parents, each durable in the one above it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
