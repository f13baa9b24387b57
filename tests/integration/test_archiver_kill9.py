"""An archiver that is killed again and again ends with the rows of one that never was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.archive.archiver import Archiver
from pipeline.archive.log_files import log_files
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import Message
from pipeline.messaging.dead_letters import DeadLetterTopic
from replay.reader import LogReader
from schemas.arrow import LoggedEvent, events_from_table, read_table
from schemas.codec import encode
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.integration.killing import (
    ForkServer,
    embedded_log,
    events_flowing,
    fork_server,
    kill_amid_work,
    kill_and_wait,
)
from tests.schemas.builders import make_event

NUM_KILLS = 20
NUM_PARTITIONS = 2
MOST_FILES_ALIVE = 3
MOST_SECONDS_BEYOND = 0.03
UNDECODABLE_EVERY = 17


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedEventLog]:
    with embedded_log(tmp_path / "log.sqlite", NUM_PARTITIONS) as log:
        yield log


def test_rows_after_twenty_kills_equal_those_of_an_undisturbed_run(
    log: EmbeddedEventLog, tmp_path: Path
) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    generator = np.random.default_rng(7)
    archive = fork_server("tests.integration.archive", tmp_path / "log.sqlite", killed)
    with events_flowing(log, _messages), archive as archivers:
        for _ in range(NUM_KILLS):
            _archive_and_kill(archivers, killed, generator)
    _archive(log, killed)
    letters = log.end_offset(DEAD_LETTERS, 0)
    _archive(log, undisturbed)

    rows, expected = _rows(killed), _rows(undisturbed)
    ends = [log.end_offset(VERIFICATION_EVENTS, p) for p in range(NUM_PARTITIONS)]
    assert [_content(row) for row in rows] == [_content(row) for row in expected]
    assert len(rows) + letters == sum(ends)
    assert letters == log.end_offset(DEAD_LETTERS, 0) > 0
    _assert_ranges_touch(killed, ends)
    assert list(killed.rglob("_*.parquet")) == []
    reader = LogReader(killed)
    assert len(list(reader)) == len(rows)
    assert (reader.summary().num_duplicates, reader.summary().problems) == (0, ())


def _messages(sequence: int) -> list[Message]:
    """Return an event, and now and then something that is none."""
    event = make_event(sequence=sequence, num_windows=2, stream=f"stream-{sequence % 5}")
    value = encode(event) if sequence % UNDECODABLE_EVERY else b"no event"
    return [Message(key=event.stream.encode(), value=value)]


def _archive_and_kill(archivers: ForkServer, folder: Path, generator: np.random.Generator) -> None:
    process_id = archivers.start("start")
    wanted = _num_files(folder) + int(generator.integers(0, MOST_FILES_ALIVE + 1))
    kill_amid_work(
        lambda: kill_and_wait(process_id),
        lambda: _num_files(folder) >= wanted,
        generator,
        most_seconds_beyond=MOST_SECONDS_BEYOND,
    )


def _num_files(folder: Path) -> int:
    return len(log_files(folder, VERIFICATION_EVENTS))


def _archive(log: EmbeddedEventLog, folder: Path) -> None:
    letters = DeadLetterTopic(log)
    with Archiver(log, VERIFICATION_EVENTS, folder, dead_letters=letters) as archiver:
        archiver.drain()


def _rows(folder: Path) -> list[LoggedEvent]:
    """Every row that is in a file, without the reader's own removal of duplicates."""
    paths = folder.rglob("[!_]*.parquet")
    found = [row for path in paths for row in events_from_table(read_table(path))]
    return sorted(found, key=lambda row: (row.partition, row.offset))


def _content(row: LoggedEvent) -> tuple[int, int, object, bytes]:
    return row.partition, row.offset, row.appended_at, encode(row.event)


def _assert_ranges_touch(folder: Path, ends: list[int]) -> None:
    for partition, end in enumerate(ends):
        files = [f for f in log_files(folder, VERIFICATION_EVENTS) if f.partition == partition]
        starts = [file.first_offset for file in files]
        assert [*starts, end] == [0, *(file.last_offset + 1 for file in files)]
