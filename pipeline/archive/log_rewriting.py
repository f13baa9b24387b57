"""Rows leave the Parquet log: those of some streams, or all that are old.

The archiver's state is the names of the files, so a name that it goes on from is never removed: a
file is replaced under its own name by one rename, with fewer rows or with none. Whenever this
dies, every file is whole, old or new, and the next run does the rest. Features go before the row
that refers to them, which is all that tells whose they are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.archive.log_files import (
    LogFile,
    hour_of,
    log_paths,
    publish_log_file,
    remove_unfinished,
    rewriting,
)
from pipeline.storage import FEATURES_FOLDER, LEFTOVER_SECONDS, ArtifactError, Storage
from schemas.arrow import VERIFICATION_EVENT_SCHEMA, read_table

Through = Callable[[Sequence[Path]], Iterable[Path]]
"""Passes on the files to look at: all of them, with a bar, or until a job must end."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamDeletion:
    """What a run has deleted, or would have.

    Attributes:
        num_rows: Rows of the streams, counted per file that held them.
        num_files: Files that held such rows.
        num_feature_files: Files of hidden states that these rows referred to.
        unreadable: Files that may hold such rows, and cannot be read; relative to the data folder.
    """

    num_rows: int
    num_files: int
    num_feature_files: int
    unreadable: tuple[str, ...]


def delete_streams(
    data_folder: Path,
    topic: str,
    streams: Collection[str],
    *,
    is_dry_run: bool = False,
    through: Through = iter,
) -> StreamDeletion:
    """Delete all rows and features of streams from the files that are there now.

    What the event log still holds and the archiver has not read yet comes after it: run it again.

    Args:
        data_folder: Holds ``events/`` and ``features/``.
        topic: Whose files.
        streams: Ids of streams, exactly as events name them.
        is_dry_run: Count, change nothing, and do not wait for whoever is changing something: rows
            that are being merged may then be counted twice.
        through: See ``Through``.

    Raises:
        LockError: If files are being merged or rewritten already.
        OSError: If a file could not be written. What is done is kept: run it again.
        ArtifactError: If features could not be deleted. Likewise.
    """
    num_rows = num_files = num_features = 0
    unreadable = []
    storage = Storage(str(data_folder))
    # What only counts writes nothing, not even a lock.
    with nullcontext() if is_dry_run else rewriting(data_folder):
        if not is_dry_run:
            remove_unfinished(data_folder, topic, before=time.time() - LEFTOVER_SECONDS)
        for path in through(log_paths(data_folder, topic)):
            try:
                found = _rows_of(path, streams)
            except FileNotFoundError:
                continue  # Merged meanwhile: nobody has held the log.
            except (pa.ArrowException, OSError):
                unreadable.append(str(path.relative_to(data_folder)))
                continue
            if found.num_rows:
                num_rows += found.num_rows
                num_files += 1
                num_features += _delete_features(storage, found, is_dry_run=is_dry_run)
                if not is_dry_run:
                    _rewrite_without(path, streams)
    logger.info("%d rows, %d features deleted from %d files", num_rows, num_features, num_files)
    return StreamDeletion(
        num_rows=num_rows,
        num_files=num_files,
        num_feature_files=num_features,
        unreadable=tuple(unreadable),
    )


def delete_old_events(
    data_folder: Path, topic: str, before: datetime, *, through: Through = iter
) -> int:
    """Delete the files of hours that ended before a time (UTC); return how many.

    The file that the archiver goes on from in its partition stays by its name, without rows.

    Raises:
        LockError: If files are being merged or rewritten already.
        OSError: If a file could not be removed or written; run it again.
    """
    num_deleted = 0
    with rewriting(data_folder):
        paths = log_paths(data_folder, topic)
        newest = _newest(paths)
        for path in through(paths):
            hour = hour_of(path)
            if hour is None or hour + timedelta(hours=1) > before:
                continue
            if path in newest:
                num_deleted += _empty(path)
            else:
                path.unlink(missing_ok=True)
                num_deleted += 1
                with suppress(OSError):  # Not empty yet.
                    path.parent.rmdir()
                    path.parent.parent.rmdir()
    return num_deleted


def _rows_of(path: Path, streams: Collection[str]) -> pa.Table:
    """Return the features of the rows of streams; a file is read whole only if it has any."""
    columns = pq.read_table(path, columns=["stream", "content_features_uri"], partitioning=None)
    return columns.filter(_is_of(columns, streams))


def _is_of(table: pa.Table, streams: Collection[str]) -> pa.ChunkedArray:
    values = pa.array(sorted(streams), table.schema.field("stream").type)
    return pc.is_in(table["stream"], value_set=values)


def _delete_features(storage: Storage, found: pa.Table, *, is_dry_run: bool) -> int:
    num_deleted = 0
    for uri in found["content_features_uri"].to_pylist():
        # An event says where its features are; it cannot say that of anything else.
        if uri is None or not uri.startswith(f"{FEATURES_FOLDER}/"):
            continue
        try:
            is_there = storage.exists(uri)
        except ArtifactError as error:
            logger.warning("no features, left alone: %s", error)
            continue
        if is_there and not is_dry_run:
            storage.delete_file(uri)
        num_deleted += is_there
    return num_deleted


def _rewrite_without(path: Path, streams: Collection[str]) -> None:
    table = read_table(path)
    publish_log_file(path.parent, _file(path), table.filter(pc.invert(_is_of(table, streams))))


def _empty(path: Path) -> bool:
    """Leave a file its name alone; tell whether it had rows, or could not be read."""
    with suppress(pa.ArrowException, OSError):
        if not pq.read_metadata(path).num_rows:
            return False
    publish_log_file(path.parent, _file(path), VERIFICATION_EVENT_SCHEMA.empty_table())
    return True


def _newest(paths: Sequence[Path]) -> set[Path]:
    """Return per partition the file that reaches furthest."""
    partition_to_newest: dict[int, Path] = {}
    for path in sorted(paths, key=lambda path: _file(path).last_offset):
        partition_to_newest[_file(path).partition] = path
    return set(partition_to_newest.values())


def _file(path: Path) -> LogFile:
    file = LogFile.parse(path.name)
    assert file is not None, f"{path} is no log file"
    return file
