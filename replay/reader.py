"""Reading the Parquet log: what is readable, once, in order, in bounded memory.

A reader looks at the folder once, when it is made, so it can run beside the archiver: names that
start with ``_`` or ``.`` are unfinished and ignored, and a file that cannot be read is skipped
and reported. Rows that were written twice are yielded once.
"""

from __future__ import annotations

import heapq
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from replay.errors import ReplayError
from schemas.arrow import LoggedEvent, events_from_table
from schemas.errors import ContractError

FILE_NAME = re.compile(r"(?P<topic>.+)-(?P<partition>\d+)-(?P<first>\d+)-(?P<last>\d+)\.parquet")
ROWS_PER_BATCH = 64


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

    Raises:
        ReplayError: If there is no such path or no Parquet file in it.
    """

    def __init__(self, log: Path) -> None:
        self._root, self._files = _find_files(log)
        self._log = log
        self._reset()

    def _reset(self) -> None:
        self._num_files = 0
        self._num_events = 0
        self._num_duplicates = 0
        self._streams: dict[str, None] = {}
        self._drafter_ids: dict[str, None] = {}
        self._depths: set[int] = set()
        self._first: datetime | None = None
        self._last: datetime | None = None
        self._problems: dict[Path, Problem] = {}
        self._offsets: dict[tuple[str, int], SequenceSet] = {}
        self._sequences: dict[tuple[str, int], SequenceSet] = {}

    def __iter__(self) -> Iterator[LoggedEvent]:
        """Read the log from its start.

        Raises:
            ReplayError: At the end, if no event could be read.
        """
        self._reset()
        partitions = [self._partition(files) for files in self._files]
        for logged in heapq.merge(*partitions, key=lambda logged: logged.appended_at):
            if self._is_new(logged):
                self._count(logged)
                yield logged
        if not self._num_events:
            raise ReplayError(f"{self._log} holds no events{self._reasons()}")

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
            first_produced_at=self._first,
            last_produced_at=self._last,
            problems=tuple(self._problems.values()),
        )

    def _partition(self, files: list[Path]) -> Iterator[LoggedEvent]:
        for path in files:
            num_read = 0
            try:
                for logged in _read_file(path):
                    num_read += 1
                    yield logged
                self._num_files += 1
            except (OSError, pa.ArrowException, ContractError) as error:
                reason = " ".join(str(error).split())[:300] or type(error).__name__
                if num_read:
                    reason = f"left after {num_read} events: {reason}"
                name = str(path.relative_to(self._root))
                self._problems[path] = Problem(name=name, reason=reason)

    def _is_new(self, logged: LoggedEvent) -> bool:
        event = logged.event
        offsets = self._offsets.setdefault((logged.topic, logged.partition), SequenceSet())
        worker = (event.worker_id, event.worker_epoch)
        sequences = self._sequences.setdefault(worker, SequenceSet())
        is_new = offsets.add(logged.offset) and sequences.add(event.sequence)
        self._num_duplicates += not is_new
        return is_new

    def _count(self, logged: LoggedEvent) -> None:
        event = logged.event
        self._num_events += 1
        self._streams.setdefault(event.stream)
        self._drafter_ids.update(dict.fromkeys(event.drafter_ids))
        self._depths.add(event.num_speculative_tokens)
        moment = event.produced_at
        self._first = moment if self._first is None else min(self._first, moment)
        self._last = moment if self._last is None else max(self._last, moment)

    def _reasons(self) -> str:
        if not self._problems:
            return "; let the worker and the archiver run first"
        listed = "; ".join(str(problem) for problem in list(self._problems.values())[:3])
        return f": {len(self._problems)} unreadable ({listed}); restore or remove them"


def _read_file(path: Path) -> Iterator[LoggedEvent]:
    """Yield the events of one file in batches, without content, which replay never reads."""
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        names = [name for name in file.schema_arrow.names if not name.startswith("content_")]
        for batch in file.iter_batches(batch_size=ROWS_PER_BATCH, columns=names):
            yield from events_from_table(pa.Table.from_batches([batch]))


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
