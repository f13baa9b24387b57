"""Reading the Parquet log: what is readable, once, in order, in bounded memory.

A reader looks at the folder once, when it is made, so it can run beside the archiver: names that
start with ``_`` or ``.`` are unfinished and ignored, and a file that cannot be read is skipped
and reported. Rows that were written twice are yielded once.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from replay.errors import ReplayError
from replay.segments import PROMPT, Segment, segment_of_row, segments_of_batch
from schemas.arrow import LoggedEvent, events_from_table
from schemas.packing import EPOCH

FILE_NAME = re.compile(r"(?P<topic>.+)-(?P<partition>\d+)-(?P<first>\d+)-(?P<last>\d+)\.parquet")
MAX_BATCH_ROWS = 512
MAX_BATCH_BYTES = 12 * 2**20
ALL_BATCHES_BYTES = 192 * 2**20
"""Most rows, and about how many bytes of them, that are in memory per partition and in all."""

_Row = tuple[Any, Segment]
"""What is yielded, and the segment that says where it comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that could not be read, and why; ``name`` is relative to the log folder."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSummary:
    """What a log holds, or what was read of it so far.

    Attributes:
        num_files: Readable files, and with ``num_unreadable_files`` all that were looked at.
        num_events: Events yielded, without duplicates.
        num_duplicates: Rows left out because they were there before.
        streams: Stream ids in order of appearance.
        drafter_ids: Drafter ids in order of appearance.
        num_speculative_tokens: The K of the events, ascending.
        schema_versions: Versions in which the files were written, ascending.
        first_produced_at: Earliest and latest ``produced_at``, UTC; None without events.
        problems: What was skipped, in order of discovery.
    """

    num_files: int
    num_unreadable_files: int
    num_events: int
    num_duplicates: int
    streams: tuple[str, ...]
    drafter_ids: tuple[str, ...]
    num_speculative_tokens: tuple[int, ...]
    schema_versions: tuple[int, ...]
    first_produced_at: datetime | None
    last_produced_at: datetime | None
    problems: tuple[Problem, ...]


@dataclass(slots=True)
class SequenceSet:
    """Integers as disjoint half-open intervals: bounded by the number of gaps, not of members."""

    _starts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)

    def add(self, value: int) -> bool:
        """Add ``value``; return whether it was new."""
        at = bisect_right(self._starts, value)
        if at and value < self._ends[at - 1]:
            return False
        joins_left = at > 0 and self._ends[at - 1] == value
        joins_right = at < len(self._starts) and self._starts[at] == value + 1
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._ends[at - 1] = value + 1
        elif joins_right:
            self._starts[at] = value
        else:
            self._starts.insert(at, value)
            self._ends.insert(at, value + 1)
        return True

    @property
    def num_intervals(self) -> int:
        """Intervals held in memory."""
        return len(self._starts)


class LogReader:
    """The events of a log, per partition in offset order, partitions merged by time.

    Args:
        log: The data folder, its ``events`` folder, any folder below, or one file.
        streams: Only the events of these; None = all.
        reads_prompts: Read the prompts of requests that consented too.

    Raises:
        ReplayError: If there is no such path or no Parquet file in it.
    """

    def __init__(
        self,
        log: Path,
        *,
        streams: Collection[str] | None = None,
        reads_prompts: bool = False,
    ) -> None:
        self._reads_prompts = reads_prompts
        self._root, self._files = _find_files(log)
        self._log = log
        self._only = streams
        self._reset()

    def _reset(self) -> None:
        self._num_files = 0
        self._num_events = 0
        self._num_duplicates = 0
        self._streams: dict[str, None] = {}
        self._drafter_ids: dict[str, None] = {}
        self._depths: set[int] = set()
        self._versions: set[int] = set()
        self._pool: tuple[str, ...] = ()
        self._first: int | None = None
        self._last: int | None = None
        self._problems: dict[Path, Problem] = {}
        self._offsets: dict[tuple[str, int], SequenceSet] = {}
        self._sequences: dict[tuple[str, int], SequenceSet] = {}

    def __iter__(self) -> Iterator[LoggedEvent]:
        """Read the log from its start, as messages.

        Raises:
            ReplayError: At the end, if no event could be read.
        """
        for logged, _ in self._merged(_events_of_batch):
            yield logged

    def segments(self) -> Iterator[Segment]:
        """Read the log from its start, as segments: the same rows, much faster.

        Raises:
            ReplayError: At the end, if no event could be read.
        """
        for segment, _ in self._merged(_segments_of_batch):
            yield segment

    def _merged(self, read: Callable[[pa.RecordBatch], Iterator[_Row]]) -> Iterator[_Row]:
        self._reset()
        partitions = [self._partition(files, read) for files in self._files]
        for row in heapq.merge(*partitions, key=lambda row: row[1].appended_at):
            is_asked = self._only is None or row[1].stream in self._only
            if is_asked and self._is_new(row[1]):
                self._count(row[1])
                yield row
        if not self._num_events:
            raise ReplayError(f"{self._log} holds no events{self._reasons()}")

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Read the columns of readable files as they lie, unchecked: the floor of any replay."""
        for path in (path for files in self._files for path in files):
            with suppress(OSError, pa.ArrowException):
                yield from self._batches(path)

    def names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the stream and the drafter ids of readable files, without reading the rest."""
        streams: dict[str, None] = {}
        drafter_ids: dict[str, None] = {}
        for path in (path for files in self._files for path in files):
            with suppress(OSError, pa.ArrowException), pq.ParquetFile(path) as file:
                for batch in file.iter_batches(columns=["stream", "drafter_ids"]):
                    streams.update(dict.fromkeys(batch["stream"].unique().to_pylist()))
                    ids = batch["drafter_ids"].flatten().unique()
                    drafter_ids.update(dict.fromkeys(ids.to_pylist()))
        return tuple(streams), tuple(drafter_ids)

    def summary(self) -> LogSummary:
        """Summarise what has been read so far; complete once the iteration has ended."""
        return LogSummary(
            num_files=self._num_files,
            num_unreadable_files=len(self._problems),
            num_events=self._num_events,
            num_duplicates=self._num_duplicates,
            streams=tuple(self._streams),
            drafter_ids=tuple(self._drafter_ids),
            num_speculative_tokens=tuple(sorted(self._depths)),
            schema_versions=tuple(sorted(self._versions)),
            first_produced_at=_time(self._first),
            last_produced_at=_time(self._last),
            problems=tuple(self._problems.values()),
        )

    def _partition(
        self, files: list[Path], read: Callable[[pa.RecordBatch], Iterator[_Row]]
    ) -> Iterator[_Row]:
        for path in files:
            num_read = 0
            try:
                for batch in self._batches(path):
                    for row in read(batch):
                        num_read += 1
                        yield row
                self._num_files += 1
            except (OSError, pa.ArrowException, ValueError) as error:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                if num_read:
                    reason = f"left after {num_read} events: {reason}"
                name = str(path.relative_to(self._root))
                self._problems[path] = Problem(name=name, reason=reason)

    def _batches(self, path: Path) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one file in batches, of the content at most the prompts."""
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = [
                name
                for name in file.schema_arrow.names
                if not name.startswith("content_") or (name == PROMPT and self._reads_prompts)
            ]
            self._versions.add(_written_version(file.schema_arrow))
            size = _rows_per_batch(file.metadata, len(self._files))
            yield from file.iter_batches(batch_size=size, columns=names, use_threads=False)

    def _is_new(self, row: Segment) -> bool:
        offsets = self._offsets.setdefault((row.topic, row.partition), SequenceSet())
        worker = (row.worker_id, row.worker_epoch)
        sequences = self._sequences.setdefault(worker, SequenceSet())
        is_new = offsets.add(row.offset) and sequences.add(row.sequence)
        self._num_duplicates += not is_new
        return is_new

    def _count(self, row: Segment) -> None:
        self._num_events += 1
        self._streams.setdefault(row.stream)
        if row.drafter_ids is not self._pool:
            self._pool = row.drafter_ids
            self._drafter_ids.update(dict.fromkeys(row.drafter_ids))
        self._depths.add(row.num_speculative_tokens)
        moment = row.produced_at
        self._first = moment if self._first is None else min(self._first, moment)
        self._last = moment if self._last is None else max(self._last, moment)

    def _reasons(self) -> str:
        if not self._problems:
            return "; let the worker and the archiver run first"
        listed = "; ".join(str(problem) for problem in list(self._problems.values())[:3])
        return f": {len(self._problems)} unreadable ({listed}); restore or remove them"


def _events_of_batch(batch: pa.RecordBatch) -> Iterator[_Row]:
    for logged in events_from_table(pa.Table.from_batches([batch])):
        yield logged, segment_of_row(logged)


def _segments_of_batch(batch: pa.RecordBatch) -> Iterator[_Row]:
    for segment in segments_of_batch(batch):
        yield segment, segment


def _rows_per_batch(file: pq.FileMetaData, num_partitions: int) -> int:
    groups = [file.row_group(index) for index in range(file.num_row_groups)]
    num_bytes = sum(group.total_byte_size for group in groups)
    room = min(MAX_BATCH_BYTES, ALL_BATCHES_BYTES // max(1, num_partitions))
    return int(min(max(1, room * file.num_rows // max(1, num_bytes)), MAX_BATCH_ROWS))


def _written_version(schema: pa.Schema) -> int:
    """Return the schema version that a file says it was written in."""
    written = (schema.metadata or {}).get(b"draftloop.schema_version", b"1")
    return int(written) if written.isdigit() else 1


def _time(moment: int | None) -> datetime | None:
    return None if moment is None else EPOCH + timedelta(microseconds=moment)


def _find_files(log: Path) -> tuple[Path, list[list[Path]]]:
    """Return the folder that names are relative to, and the files of each partition in order."""
    if log.is_file():
        return log.parent, [[log]]
    root = log / "events" if (log / "events").is_dir() else log
    if not root.is_dir():
        raise ReplayError(f"{log} does not exist; give the data folder or its events folder")
    partitions: dict[tuple[str, int], list[tuple[int, Path]]] = {}
    for path in sorted(root.rglob("*.parquet")):
        if any(part.startswith(("_", ".")) for part in path.relative_to(root).parts):
            continue
        match = FILE_NAME.fullmatch(path.name)
        key = (match["topic"], int(match["partition"])) if match else (path.name, -1)
        first = int(match["first"]) if match else 0
        partitions.setdefault(key, []).append((first, path))
    if not partitions:
        raise ReplayError(
            f"{root} holds no events (no *.parquet); let the worker and the archiver run first"
        )
    return root, [[path for _, path in sorted(files)] for files in partitions.values()]
