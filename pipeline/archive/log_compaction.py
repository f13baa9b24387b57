"""Short files of the Parquet log become long ones; no reader misses a row meanwhile.

The long file appears first, by one rename. The short ones stay for a while, for readers that have
already listed them: rows that are there twice are read once. Whenever this dies, the next run goes
on: what a longer file covers is removed, what none covers is merged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.archive.log_files import EVENTS_FOLDER, LogFile, publish_log_file, rewriting
from pipeline.locks import LockError
from schemas.arrow import read_table
from schemas.errors import ContractError

SHORT_BYTES = 4 * 2**20
"""A file below this is short."""

LONG_BYTES = 32 * 2**20
"""Files are merged up to about this size, which bounds the memory of a run."""

GRACE = timedelta(minutes=10)
"""How long a short file stays beside the long one that covers it."""

SETTLED = timedelta(hours=1)
"""An hour's folder is touched once it ended this long ago: nothing more is written to it."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compaction:
    """What a run has done."""

    num_merged: int
    num_written: int
    num_removed: int


@dataclass(frozen=True, slots=True)
class _Stored:
    file: LogFile
    path: Path
    num_bytes: int
    written_seconds: float


def compact_log(data_folder: Path, topic: str, now: datetime) -> Compaction:
    """Merge short files of hours that are over, and remove what longer files cover.

    While rows are being deleted nothing is merged: the next run does it.

    Args:
        data_folder: Holds ``events/``.
        topic: Whose files.
        now: UTC.

    Raises:
        OSError: If a file could not be written or removed; call again, nothing is lost.
    """
    try:
        with rewriting(data_folder):
            return _compact(data_folder, topic, now)
    except LockError as error:
        logger.warning("compaction left out: %s", error)
        return Compaction(num_merged=0, num_written=0, num_removed=0)


def _compact(data_folder: Path, topic: str, now: datetime) -> Compaction:
    num_merged = num_written = num_removed = 0
    for folder in sorted((data_folder / EVENTS_FOLDER).glob("date=*/hour=*")):
        if not _is_settled(folder, now):
            continue
        stored = _stored(folder, topic)
        num_removed += _remove_covered(stored, now)
        for run in _runs(_uncovered(stored)):
            for part in _readable(run):
                _merge(folder, part)
                num_merged += len(part)
                num_written += 1
    return Compaction(num_merged=num_merged, num_written=num_written, num_removed=num_removed)


def _is_settled(folder: Path, now: datetime) -> bool:
    day, hour = folder.parent.name.removeprefix("date="), folder.name.removeprefix("hour=")
    try:
        begun = datetime.fromisoformat(day).replace(hour=int(hour), tzinfo=now.tzinfo)
    except ValueError:
        return False  # somebody else's folder
    return now - begun > timedelta(hours=1) + SETTLED


def _stored(folder: Path, topic: str) -> list[_Stored]:
    """Return the topic's files of a folder, by partition and first offset, longest first."""
    found = []
    for path in folder.glob("*.parquet"):
        file = LogFile.parse(path.name)
        if file is not None and file.topic == topic:
            status = path.stat()
            found.append(_Stored(file, path, status.st_size, status.st_mtime))
    return sorted(found, key=lambda s: (s.file.partition, s.file.first_offset, -s.file.last_offset))


def _covering(one: _Stored, stored: Sequence[_Stored]) -> _Stored | None:
    return next(
        (
            other
            for other in stored
            if other.file.partition == one.file.partition
            and other.file != one.file
            and other.file.first_offset <= one.file.first_offset
            and other.file.last_offset >= one.file.last_offset
        ),
        None,
    )


def _uncovered(stored: Sequence[_Stored]) -> list[_Stored]:
    return [one for one in stored if _covering(one, stored) is None]


def _remove_covered(stored: Sequence[_Stored], now: datetime) -> int:
    num_removed = 0
    for one in stored:
        longer = _covering(one, stored)
        if longer and now.timestamp() - longer.written_seconds > GRACE.total_seconds():
            one.path.unlink(missing_ok=True)
            num_removed += 1
    return num_removed


def _runs(stored: Sequence[_Stored]) -> Iterator[list[_Stored]]:
    """Yield two or more short files in a row that touch and together stay under the limit."""
    for _, of_partition in groupby(stored, key=lambda s: s.file.partition):
        run: list[_Stored] = []
        for one in of_partition:
            if run and not _continues(run, one):
                yield from [run] if len(run) > 1 else []
                run = []
            if one.num_bytes < SHORT_BYTES:
                run.append(one)
        yield from [run] if len(run) > 1 else []


def _continues(run: Sequence[_Stored], one: _Stored) -> bool:
    num_bytes = sum(member.num_bytes for member in run)
    return (
        one.num_bytes < SHORT_BYTES
        and one.file.first_offset == run[-1].file.last_offset + 1
        and num_bytes + one.num_bytes <= LONG_BYTES
        and _has_schema_of(one.path, run[0].path)
    )


def _has_schema_of(path: Path, other: Path) -> bool:
    """Tell whether two files are of one version; one that cannot be read is of none."""
    schemas = []
    for one in (path, other):
        try:
            schemas.append(pq.read_schema(one))
        except (pa.ArrowException, OSError) as error:
            logger.warning("%s is not merged: %s", one.name, error)
            return False
    return bool(schemas[0].equals(schemas[1], check_metadata=True))


def _readable(run: Sequence[_Stored]) -> Iterator[list[tuple[_Stored, pa.Table]]]:
    """Yield two or more files in a row with their rows; what cannot be read is left alone.

    Files of an older version come with the columns of the newest: every row says itself by which
    version it was written, and what it lacks is filled as any reader fills it.
    """
    part: list[tuple[_Stored, pa.Table]] = []
    for one in run:
        try:
            part.append((one, read_table(one.path)))
        except ContractError as error:
            logger.warning("%s is not merged: %s", one.path.name, error)
            yield from [part] if len(part) > 1 else []
            part = []
    yield from [part] if len(part) > 1 else []


def _merge(folder: Path, part: Sequence[tuple[_Stored, pa.Table]]) -> None:
    first, last = part[0][0].file, part[-1][0].file
    merged = LogFile(
        topic=first.topic,
        partition=first.partition,
        first_offset=first.first_offset,
        last_offset=last.last_offset,
    )
    publish_log_file(folder, merged, pa.concat_tables([table for _, table in part]))
    logger.info("%d short files became %s", len(part), merged.name)
