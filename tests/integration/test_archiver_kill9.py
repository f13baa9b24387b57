"""An archiver that is killed again and again ends with the rows of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.archiver import Archiver
from pipeline.dead_letters import DeadLetterTopic
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import Message
from pipeline.log_files import log_files
from replay.reader import LogReader
from schemas.arrow import LoggedEvent, events_from_table, read_table
from schemas.codec import encode
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.schemas.builders import make_event

NUM_KILLS = 20
NUM_PARTITIONS = 2
MOST_FILES_ALIVE = 3
MOST_SECONDS_BEYOND = 0.03
MOST_SECONDS_WAITING = 60.0
UNDECODABLE_EVERY = 17


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedEventLog]:
    log = EmbeddedEventLog(tmp_path / "log.sqlite")
    for spec in declared_topics(NUM_PARTITIONS):
        log.create_topic(spec)
    yield log
    log.close()


def test_rows_after_twenty_kills_equal_those_of_an_undisturbed_run(
    log: EmbeddedEventLog, tmp_path: Path
) -> None:
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    generator = np.random.default_rng(7)
    with _events_flowing(log), _archivers(tmp_path / "log.sqlite", killed) as archivers:
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


@contextmanager
def _events_flowing(log: EmbeddedEventLog) -> Iterator[None]:
    """Append events, and now and then something that is none, until the block ends."""
    stop = threading.Event()

    def append() -> None:
        sequence = 0
        while not stop.wait(0.01):
            event = make_event(sequence=sequence, num_windows=2, stream=f"stream-{sequence % 5}")
            is_decodable = sequence % UNDECODABLE_EVERY != 0
            value = encode(event) if is_decodable else b"no event"
            log.append(VERIFICATION_EVENTS, [Message(key=event.stream.encode(), value=value)])
            sequence += 1

    thread = threading.Thread(target=append)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def _archivers(log_path: Path, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start archivers on demand; none is left when the block has ended."""
    command = [sys.executable, "-m", "tests.integration.archive", str(log_path), str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as process:
        yield process


def _archive_and_kill(
    archivers: subprocess.Popen[bytes], folder: Path, generator: np.random.Generator
) -> None:
    assert archivers.stdin is not None
    assert archivers.stdout is not None
    archivers.stdin.write(b"start\n")
    process_id = int(archivers.stdout.readline())
    try:
        _await_files(folder, int(generator.integers(0, MOST_FILES_ALIVE + 1)))
        time.sleep(generator.uniform(0.0, MOST_SECONDS_BEYOND))
    finally:
        os.kill(process_id, signal.SIGKILL)


def _await_files(folder: Path, num_files: int) -> None:
    """Wait for new files, so that the kill meets a working archiver on a slow machine too."""
    num_wanted = len(log_files(folder, VERIFICATION_EVENTS)) + num_files
    deadline = time.monotonic() + MOST_SECONDS_WAITING
    while len(log_files(folder, VERIFICATION_EVENTS)) < num_wanted:
        assert time.monotonic() < deadline, f"no {num_files} files in {MOST_SECONDS_WAITING} s"
        time.sleep(0.002)


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
