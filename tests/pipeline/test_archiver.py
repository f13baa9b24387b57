"""The archiver over the real embedded log and real files."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline import log_files
from pipeline.archiver import Archiver, ArchiverError
from pipeline.dead_letters import DeadLetterTopic
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLogError, Message, StoredMessage
from pipeline.log_files import LogFile
from replay.reader import LogReader
from schemas.arrow import LoggedEvent, events_from_table, read_table, write_table
from schemas.codec import encode
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.schemas.builders import make_event

TOPIC = VERIFICATION_EVENTS
START = datetime(2026, 3, 29, 0, 59, 59, tzinfo=UTC)


class Clock:
    """A hand-driven clock, for the log (UTC) and for the archiver (monotonic seconds)."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def utc(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    def monotonic(self) -> float:
        return self.seconds


class Crash(BaseException):
    """The process dies here: no handler of the code under test may see it."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[EmbeddedEventLog]:
    log = EmbeddedEventLog(tmp_path / "log.sqlite", clock=clock.utc)
    for spec in declared_topics(3):
        log.create_topic(spec)
    yield log
    log.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def open_archiver(
    log: EmbeddedEventLog, folder: Path, clock: Clock
) -> Iterator[Callable[..., Archiver]]:
    opened: list[Archiver] = []

    def open_one(max_events_per_file: int = 10, max_seconds_per_file: float = 60.0) -> Archiver:
        archiver = Archiver(
            log,
            TOPIC,
            folder,
            dead_letters=DeadLetterTopic(log),
            max_events_per_file=max_events_per_file,
            max_seconds_per_file=max_seconds_per_file,
            clock=clock.monotonic,
        )
        opened.append(archiver)
        return archiver

    yield open_one
    for archiver in opened:
        archiver.close()


def append_events(
    log: EmbeddedEventLog, count: int, *, first: int = 0, stream: str = "stream-a"
) -> int:
    """Append events of one stream and return their partition."""
    events = [make_event(sequence=n, stream=stream) for n in range(first, first + count)]
    messages = [Message(key=stream.encode(), value=encode(event)) for event in events]
    return log.append(TOPIC, messages)[0][0]


def parquet_paths(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.parquet"))


def ranges(folder: Path) -> list[tuple[int, int]]:
    return [(f.first_offset, f.last_offset) for f in log_files.log_files(folder, TOPIC)]


def rows(folder: Path) -> list[LoggedEvent]:
    """Every row of every finished file, duplicates included."""
    finished = [path for path in parquet_paths(folder) if not path.name.startswith("_")]
    return [row for path in finished for row in events_from_table(read_table(path))]


def sequences(folder: Path) -> list[int]:
    return [row.event.sequence for row in sorted(rows(folder), key=lambda row: row.offset)]


def test_rows_carry_the_event_and_its_place(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver], clock: Clock
) -> None:
    partition = append_events(log, 3)
    open_archiver().drain()
    found = rows(folder)
    assert [row.offset for row in found] == [0, 1, 2]
    assert {(row.topic, row.partition, row.appended_at) for row in found} == {
        (TOPIC, partition, clock.utc())
    }
    assert [encode(row.event) for row in found] == [
        encode(make_event(sequence=n)) for n in range(3)
    ]


def test_a_file_is_cut_at_max_events_and_its_name_holds_its_offsets(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    partition = append_events(log, 25)
    archiver = open_archiver(max_events_per_file=10)
    while archiver.run_once():
        pass
    assert ranges(folder) == [(0, 9), (10, 19)]
    first = parquet_paths(folder)[0]
    assert first.relative_to(folder) == Path(
        "events/date=2026-03-29/hour=00",
        f"{TOPIC}-{partition:05}-{0:019}-{9:019}.parquet",
    )
    assert (archiver.num_files, archiver.num_events) == (2, 20)


def test_a_file_is_cut_when_its_first_message_is_old_enough(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver], clock: Clock
) -> None:
    archiver = open_archiver(max_seconds_per_file=60.0)
    append_events(log, 2)
    archiver.run_once()
    clock.seconds += 59.0
    append_events(log, 1, first=2)
    archiver.run_once()
    assert ranges(folder) == []
    clock.seconds += 1.0
    archiver.run_once()
    assert ranges(folder) == [(0, 2)]


def test_the_folder_is_the_hour_of_the_first_event(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver], clock: Clock
) -> None:
    archiver = open_archiver()
    append_events(log, 1)
    clock.seconds = 2.0
    append_events(log, 1, first=1)
    archiver.drain()
    append_events(log, 1, first=2)
    archiver.drain()
    hours = [path.parent.name for path in parquet_paths(folder)]
    assert hours == ["hour=00", "hour=01"]
    assert ranges(folder) == [(0, 1), (2, 2)]


def test_an_empty_topic_writes_nothing(
    folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    archiver = open_archiver()
    assert archiver.run_once() == 0
    archiver.drain()
    assert parquet_paths(folder) == []


def test_every_partition_has_its_own_files(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    streams = [f"stream-{n}" for n in range(12)]
    partitions = {append_events(log, 2, stream=stream) for stream in streams}
    assert partitions == {0, 1, 2}
    open_archiver(max_events_per_file=3).drain()
    found = rows(folder)
    assert sorted(row.event.stream for row in found) == sorted(2 * streams)
    for partition in partitions:
        offsets = sorted(row.offset for row in found if row.partition == partition)
        assert offsets == list(range(log.end_offset(TOPIC, partition)))


def test_it_resumes_after_the_last_offset_of_its_files(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    append_events(log, 14)
    first = open_archiver(max_events_per_file=10)
    first.run_once()
    first.run_once()
    first.close()
    append_events(log, 6, first=14)
    open_archiver(max_events_per_file=10).drain()
    assert ranges(folder) == [(0, 9), (10, 19)]
    assert sequences(folder) == list(range(20))


def test_it_resumes_after_the_greatest_of_overlapping_names(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    partition = append_events(log, 10)
    archiver = open_archiver(max_events_per_file=4)
    archiver.drain()
    archiver.close()
    # What a copied-back backup can look like: a longer file over shorter ones.
    first, second, _ = parquet_paths(folder)
    table = read_table(first)
    longer = LogFile(topic=TOPIC, partition=partition, first_offset=0, last_offset=5)
    log_files.publish_log_file(first.parent, longer, table)
    second.unlink()
    append_events(log, 2, first=10)
    open_archiver().drain()
    assert ranges(folder)[-1] == (10, 11)
    assert len(list(LogReader(folder))) == 4 + 2 + 2


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
        _crash_at(step, patch)
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


def _crash_at(step: str, patch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise Crash

    if step == "open":
        patch.setattr(log_files, "_make_folders", crash)
    elif step == "write":

        def write_half(table: pa.Table, stream: IO[bytes]) -> None:
            write_table(table, stream)
            stream.truncate(100)
            raise Crash

        patch.setattr(log_files, "write_table", write_half)
    elif step == "fsync":
        patch.setattr(os, "fsync", crash)
    elif step == "rename":
        patch.setattr(Path, "rename", crash)
    elif step == "sync_folder":
        patch.setattr(log_files, "_sync_folder", crash)
    else:
        sync = log_files._sync_folder

        def sync_and_crash(path: Path) -> None:
            sync(path)
            raise Crash

        patch.setattr(log_files, "_sync_folder", sync_and_crash)


def test_only_its_own_leftovers_are_removed(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    hour = folder / "events" / "date=2026-03-29" / "hour=00"
    hour.mkdir(parents=True)
    own = LogFile(topic=TOPIC, partition=0, first_offset=0, last_offset=9).name
    other = LogFile(topic="other.topic", partition=0, first_offset=0, last_offset=9).name
    for name in (f"_{own}", f"_{other}", "_notes.txt", "_SUCCESS"):
        (hour / name).write_bytes(b"half")
    open_archiver()
    assert {path.name for path in hour.iterdir()} == {"_SUCCESS", f"_{other}", "_notes.txt"}


def test_a_reader_beside_the_archiver_sees_whole_files_only(
    log: EmbeddedEventLog,
    folder: Path,
    open_archiver: Callable[..., Archiver],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append_events(log, 8)
    archiver = open_archiver(max_events_per_file=4)
    archiver.run_once()
    seen: list[int] = []

    def write_watched(table: pa.Table, stream: IO[bytes]) -> None:
        stream.write(b"half")
        stream.flush()
        reader = LogReader(folder)
        seen.append(len(list(reader)))
        assert reader.summary().problems == ()
        stream.seek(0)
        write_table(table, stream)

    monkeypatch.setattr(log_files, "write_table", write_watched)
    archiver.drain()
    assert seen == [4]
    assert len(list(LogReader(folder))) == 8


def undecodable() -> list[Message]:
    whole = encode(make_event(sequence=99))
    return [
        Message(key=b"stream-a", value=value, headers={"ce_id": b"x"})
        for value in (b"\xff", b"", None, whole[:-1], b"\x00\x00\x00\xff\xff" + whole[5:])
    ]


def test_undecodable_messages_are_set_aside_and_their_offsets_are_covered(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    partition = append_events(log, 2)
    log.append(TOPIC, undecodable())
    append_events(log, 2, first=2)
    archiver = open_archiver()
    archiver.drain()
    assert sequences(folder) == [0, 1, 2, 3]
    assert ranges(folder) == [(0, 8)]
    assert (archiver.num_events, archiver.num_dead_letters) == (4, 5)

    letters = log.read(DEAD_LETTERS, 0, 0)
    assert [letter.message.value for letter in letters] == [m.value for m in undecodable()]
    for offset, letter in enumerate(letters, start=2):
        headers = letter.message.headers
        assert (headers["topic"], headers["ce_id"]) == (TOPIC.encode(), b"x")
        assert headers["partition"] == str(partition).encode()
        assert headers["offset"] == str(offset).encode()
        assert headers["reason"]


def test_a_range_without_a_single_event_is_covered_too(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    log.append(TOPIC, undecodable())
    archiver = open_archiver()
    archiver.drain()
    archiver.close()
    assert ranges(folder) == [(0, 4)]
    append_events(log, 1)
    open_archiver().drain()
    assert ranges(folder) == [(0, 4), (5, 5)]
    assert len(log.read(DEAD_LETTERS, 0, 0)) == 5


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
        _crash_at(step, patch)
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
    monkeypatch.setattr("pipeline.archiver.FIRST_RETRY_SECONDS", 0.01)
    patch = pytest.MonkeyPatch()
    _fail_at(step, patch)
    thread = threading.Thread(target=archiver.run, args=(stop,))
    thread.start()
    try:
        _wait_until(lambda: archiver.num_failures >= 3)
        finished = [path for path in parquet_paths(folder) if not path.name.startswith("_")]
        assert step == "sync_folder" or finished == []
        assert archiver.num_files == 0
        append_events(log, 3, first=12)
        patch.undo()
        _wait_until(lambda: archiver.num_files >= 2)
    finally:
        patch.undo()
        stop.set()
        thread.join()
    assert sequences(folder) == list(range(15))
    assert ranges(folder) == [(0, 4), (5, 9), (10, 14)]
    assert "No space left on device" in caplog.text
    assert {record.levelno for record in caplog.records} == {logging.ERROR}


def _fail_at(step: str, patch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if step == "fsync":
        patch.setattr("pipeline.log_files.os.fsync", full)
    elif step == "rename":
        patch.setattr(Path, "rename", full)
    else:
        name = {"open": "_make_folders", "sync_folder": "_sync_folder"}[step]
        patch.setattr(log_files, name, full)


def _wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(1000):
        if is_true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("did not happen within 10 s")


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
        _fail_at("sync_folder", patch)
        with pytest.raises(OSError, match="No space left"):
            archiver.drain()
    assert ranges(folder) == [(0, 2)]
    append_events(log, 2, first=3)
    archiver.drain()
    assert ranges(folder) == [(0, 2), (3, 4)]
    assert sequences(folder) == [0, 1, 2, 3, 4]


def test_stopping_archives_what_is_left(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    append_events(log, 7)
    stop = threading.Event()
    stop.set()
    open_archiver(max_events_per_file=5).run(stop)
    assert ranges(folder) == [(0, 4), (5, 6)]


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
    monkeypatch.setattr("pipeline.archiver.FIRST_RETRY_SECONDS", 0.01)
    append_events(absent_log, 4)
    stop = threading.Event()
    with Archiver(
        absent_log, TOPIC, folder, dead_letters=DeadLetterTopic(absent_log), max_events_per_file=4
    ) as archiver:
        absent_log.is_away = True
        thread = threading.Thread(target=archiver.run, args=(stop,))
        thread.start()
        try:
            _wait_until(lambda: archiver.num_failures >= 2)
            absent_log.is_away = False
            _wait_until(lambda: archiver.num_files == 1)
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


def test_invalid_folder_is_refused_with_its_name(log: EmbeddedEventLog, tmp_path: Path) -> None:
    folder = tmp_path / "taken"
    folder.write_text("a file")
    with pytest.raises(ArchiverError, match=rf"{folder}: .*can be written"):
        Archiver(log, TOPIC, folder, dead_letters=DeadLetterTopic(log))


def test_invalid_second_archiver_of_a_folder_is_refused(
    folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    first = open_archiver()
    with pytest.raises(ArchiverError, match=rf"{folder}: another archiver of {TOPIC}"):
        open_archiver()
    first.close()
    open_archiver()


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


def test_events_with_and_without_content_and_drafters_share_a_file(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    events = [
        make_event(sequence=0, num_windows=0, num_drafters=0),
        make_event(sequence=1, with_content=True),
        replace(make_event(sequence=2), drafters=make_event(num_drafters=3).drafters),
    ]
    log.append(TOPIC, [Message(key=b"stream-a", value=encode(event)) for event in events])
    open_archiver().drain()
    assert [encode(row.event) for row in rows(folder)] == [encode(event) for event in events]
