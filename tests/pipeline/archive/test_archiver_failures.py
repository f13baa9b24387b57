"""The archiver where processes die, disks are full, and the log is away, trimmed or another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.archive.archiver import Archiver
from pipeline.archive.log_files import LogFile, publish_log_file
from pipeline.archive.log_rewriting import delete_streams
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLogError, StoredMessage
from pipeline.messaging.dead_letters import DeadLetterTopic
from schemas.arrow import read_table
from schemas.topics import DEAD_LETTERS
from tests.pipeline.archiving import (
    TOPIC,
    Crash,
    append_events,
    crash_at,
    fail_at,
    parquet_paths,
    ranges,
    sequences,
    undecodable,
    wait_until,
)


@pytest.mark.parametrize("step", ["open", "write", "fsync", "rename", "sync_folder", "after"])
def test_a_crash_at_any_step_of_writing_loses_and_doubles_nothing(
    log: EmbeddedEventLog,
    folder: Path,
    open_archiver: Callable[..., Archiver],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    append_events(log, 15)
    archiver = open_archiver(max_events_per_file=5)
    archiver.run_once()
    with monkeypatch.context() as patch:
        crash_at(step, patch)
        with pytest.raises(Crash):
            while archiver.run_once():
                pass
    archiver.close()
    finished = [path for path in parquet_paths(folder) if not path.name.startswith("_")]
    assert all(pq.ParquetFile(path).metadata.num_rows == 5 for path in finished)

    append_events(log, 2, first=15)
    open_archiver(max_events_per_file=5).drain()
    assert sequences(folder) == list(range(17))
    assert [path for path in folder.rglob("_*.parquet")] == []


@pytest.mark.parametrize("step", ["open", "rename"])
def test_a_crash_after_setting_aside_does_not_set_aside_twice(
    log: EmbeddedEventLog,
    folder: Path,
    open_archiver: Callable[..., Archiver],
    monkeypatch: pytest.MonkeyPatch,
    step: str,
) -> None:
    log.append(TOPIC, undecodable())
    archiver = open_archiver()
    with monkeypatch.context() as patch:
        crash_at(step, patch)
        with pytest.raises(Crash):
            archiver.drain()
    archiver.close()
    log.append(TOPIC, undecodable()[:1])
    open_archiver().drain()
    offsets = [letter.message.headers["offset"] for letter in log.read(DEAD_LETTERS, 0, 0)]
    assert offsets == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert ranges(folder) == [(0, 5)]


@pytest.mark.parametrize("step", ["open", "fsync", "rename", "sync_folder"])
def test_a_full_disk_pauses_archiving_raises_an_alarm_and_loses_nothing(
    log: EmbeddedEventLog,
    folder: Path,
    open_archiver: Callable[..., Archiver],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    step: str,
) -> None:
    append_events(log, 12)
    archiver = open_archiver(max_events_per_file=5)
    stop = threading.Event()
    monkeypatch.setattr("pipeline.archive.archiver.FIRST_RETRY_SECONDS", 0.01)
    patch = pytest.MonkeyPatch()
    fail_at(step, patch)
    thread = threading.Thread(target=archiver.run, args=(stop,))
    thread.start()
    try:
        wait_until(lambda: archiver.num_failures >= 3)
        finished = [path for path in parquet_paths(folder) if not path.name.startswith("_")]
        assert step == "sync_folder" or finished == []
        assert archiver.num_files == 0
        append_events(log, 3, first=12)
        patch.undo()
        wait_until(lambda: archiver.num_files >= 2)
    finally:
        patch.undo()
        stop.set()
        thread.join()
    assert sequences(folder) == list(range(15))
    assert ranges(folder) == [(0, 4), (5, 9), (10, 14)]
    assert "No space left on device" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def test_a_failed_file_is_written_again_as_it_was_even_if_more_has_arrived(
    log: EmbeddedEventLog,
    folder: Path,
    open_archiver: Callable[..., Archiver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append_events(log, 3)
    archiver = open_archiver(max_events_per_file=10)
    (folder / "events" / "date=2026-03-29" / "hour=00").mkdir(parents=True)
    with monkeypatch.context() as patch:
        fail_at("sync_folder", patch)
        with pytest.raises(OSError, match="No space left"):
            archiver.drain()
    assert ranges(folder) == [(0, 2)]
    append_events(log, 2, first=3)
    archiver.drain()
    assert ranges(folder) == [(0, 2), (3, 4)]
    assert sequences(folder) == [0, 1, 2, 3, 4]


class TrimmedLog(EmbeddedEventLog):
    """A log whose retention has deleted everything below ``kept_from``."""

    kept_from = 0

    def begin_offset(self, topic: str, partition: int) -> int:
        return max(self.kept_from, super().begin_offset(topic, partition))

    def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_messages: int = 500,
        timeout_seconds: float = 0.0,
    ) -> Sequence[StoredMessage]:
        kept = max(offset, self.kept_from if topic == TOPIC else 0)
        return super().read(
            topic, partition, kept, max_messages=max_messages, timeout_seconds=timeout_seconds
        )


def test_offsets_deleted_by_retention_are_counted_and_claimed_by_no_name(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = TrimmedLog(tmp_path / "trimmed.sqlite")
    for spec in declared_topics(1):
        log.create_topic(spec)
    append_events(log, 4)
    with Archiver(log, TOPIC, folder, dead_letters=DeadLetterTopic(log)) as archiver:
        archiver.run_once()
        append_events(log, 6, first=4)
        log.kept_from = 7
        archiver.drain()
        assert archiver.num_lost_offsets == 3
    log.close()
    assert ranges(folder) == [(0, 3), (7, 9)]
    assert "offsets 4..6 were deleted" in caplog.text


class AbsentLog(EmbeddedEventLog):
    """A log whose broker is away while ``is_away``."""

    is_away = False

    def end_offset(self, topic: str, partition: int) -> int:
        self._answer()
        return super().end_offset(topic, partition)

    def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_messages: int = 500,
        timeout_seconds: float = 0.0,
    ) -> Sequence[StoredMessage]:
        self._answer()
        return super().read(
            topic, partition, offset, max_messages=max_messages, timeout_seconds=timeout_seconds
        )

    def _answer(self) -> None:
        if self.is_away:
            raise EventLogError("Kafka at host:9092: nobody answers; start the broker")


@pytest.fixture
def absent_log(tmp_path: Path) -> Iterator[AbsentLog]:
    log = AbsentLog(tmp_path / "absent.sqlite")
    for spec in declared_topics(1):
        log.create_topic(spec)
    yield log
    log.close()


def test_a_log_that_is_away_is_waited_for(
    absent_log: AbsentLog, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.archive.archiver.FIRST_RETRY_SECONDS", 0.01)
    append_events(absent_log, 4)
    stop = threading.Event()
    with Archiver(
        absent_log, TOPIC, folder, dead_letters=DeadLetterTopic(absent_log), max_events_per_file=4
    ) as archiver:
        absent_log.is_away = True
        thread = threading.Thread(target=archiver.run, args=(stop,))
        thread.start()
        try:
            wait_until(lambda: archiver.num_failures >= 2)
            absent_log.is_away = False
            wait_until(lambda: archiver.num_files == 1)
        finally:
            stop.set()
            thread.join()
    assert sequences(folder) == [0, 1, 2, 3]


def test_stopping_while_the_log_is_away_ends_with_an_alarm(
    absent_log: AbsentLog, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stop = threading.Event()
    stop.set()
    letters = DeadLetterTopic(absent_log)
    with Archiver(absent_log, TOPIC, folder, dead_letters=letters) as archiver:
        absent_log.is_away = True
        archiver.run(stop)
    assert archiver.num_failures == 1
    assert "nobody answers; start the broker" in caplog.text


def test_invalid_log_that_ends_before_the_files_is_refused_with_both_offsets(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver], tmp_path: Path
) -> None:
    append_events(log, 5)
    archiver = open_archiver()
    archiver.drain()
    archiver.close()
    with pytest.raises(EventLogError, match=r"up to offset 4, but the event log ends at 0"):
        _open_on_empty_log(tmp_path / "new.sqlite", folder)
    assert ranges(folder) == [(0, 4)]


def _open_on_empty_log(path: Path, folder: Path) -> None:
    empty = EmbeddedEventLog(path)
    try:
        for spec in declared_topics(3):
            empty.create_topic(spec)
        Archiver(empty, TOPIC, folder, dead_letters=DeadLetterTopic(empty))
    finally:
        empty.close()


@pytest.mark.parametrize("meanwhile", ["deleted", "merged and deleted", "nothing"])
def test_a_retry_after_a_failed_sync_brings_no_deleted_row_back(
    log: EmbeddedEventLog,
    folder: Path,
    open_archiver: Callable[..., Archiver],
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: str,
) -> None:
    gone, kept = "tenant-7", "tenant-9"  # of one partition
    append_events(log, 2, stream=kept)
    archiver = open_archiver()
    archiver.drain()
    append_events(log, 2, first=2, stream=gone)
    append_events(log, 2, first=4, stream=kept)
    with monkeypatch.context() as patch:
        fail_at("sync_folder", patch)
        with pytest.raises(OSError, match="No space left"):
            archiver.drain()
    assert ranges(folder) == [(0, 1), (2, 5)]
    if meanwhile == "merged and deleted":
        short, last = parquet_paths(folder)
        longer = LogFile(
            topic=TOPIC,
            partition=LogFile.parse(last.name).partition,  # type: ignore[union-attr]
            first_offset=0,
            last_offset=5,
        )
        publish_log_file(last.parent, longer, pa.concat_tables(map(read_table, (short, last))))
        short.unlink()
        last.unlink()
    if meanwhile != "nothing":
        assert delete_streams(folder, TOPIC, [gone]).num_rows == 2
    append_events(log, 1, first=6, stream=kept)
    archiver.drain()
    assert sequences(folder) == [0, 1, *([2, 3] if meanwhile == "nothing" else []), 4, 5, 6]
    assert ranges(folder)[-1] == (6, 6)
    assert (archiver.num_files, archiver.num_events) == (3, 7)
