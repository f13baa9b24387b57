"""What only the embedded event log promises: its file, its compaction, its refusals."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.eventlog.embedded import TOMBSTONE_RETENTION, EmbeddedEventLog
from pipeline.eventlog.ports import EventLogError, Message, TopicSpec
from pipeline.eventlog.sqlite_file import SqliteFile

NOON = datetime(2026, 10, 25, 12, tzinfo=UTC)


class Clock:
    """A hand-driven clock."""

    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.sqlite"


@pytest.fixture
def log(path: Path, clock: Clock) -> Iterator[EmbeddedEventLog]:
    log = EmbeddedEventLog(path, clock=clock)
    log.create_topic(TopicSpec(name="plain", num_partitions=3))
    log.create_topic(TopicSpec(name="compacted", num_partitions=1, is_compacted=True))
    yield log
    log.close()


def offsets_and_values(log: EmbeddedEventLog, topic: str) -> list[tuple[int, bytes | None]]:
    return [(stored.offset, stored.message.value) for stored in log.read(topic, 0, 0)]


def test_a_key_goes_to_its_crc32_partition(log: EmbeddedEventLog) -> None:
    keys = [b"stream-%d" % number for number in range(30)]
    places = log.append("plain", [Message(key=key, value=b"") for key in keys])
    assert [partition for partition, _ in places] == [zlib.crc32(key) % 3 for key in keys]


def test_messages_without_key_take_turns(log: EmbeddedEventLog) -> None:
    places = log.append("plain", [Message(key=None, value=b"v") for _ in range(9)])
    assert sorted(places) == [(p, offset) for p in range(3) for offset in range(3)]


def test_whoever_waits_long_looks_less_and_less_often(
    log: EmbeddedEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    seconds = 0.0

    def sleep(pause: float) -> None:
        nonlocal seconds
        pauses.append(pause)
        seconds += pause

    # The log's clock alone: other threads of this process sleep, too.
    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: seconds)
    monkeypatch.setattr("pipeline.eventlog.embedded.time", clock)
    assert log.read("plain", 0, 0, timeout_seconds=1.0) == []
    assert pauses[:4] == pytest.approx([0.01, 0.02, 0.04, 0.05])
    assert max(pauses) == 0.05
    assert seconds == pytest.approx(1.0)


def test_compaction_removes_what_is_superseded_and_renumbers_nothing(
    log: EmbeddedEventLog,
) -> None:
    values = [(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"c", b"4"), (b"b", b"5")]
    log.append("compacted", [Message(key=key, value=value) for key, value in values])
    assert offsets_and_values(log, "compacted") == [(2, b"3"), (3, b"4"), (4, b"5")]
    log.append("compacted", [Message(key=b"a", value=b"6")])
    assert offsets_and_values(log, "compacted") == [(3, b"4"), (4, b"5"), (5, b"6")]
    assert (log.begin_offset("compacted", 0), log.end_offset("compacted", 0)) == (3, 6)


def test_a_tombstone_stays_for_slow_readers_and_then_goes(
    log: EmbeddedEventLog, clock: Clock
) -> None:
    log.append("compacted", [Message(key=b"a", value=b"1"), Message(key=b"b", value=b"2")])
    log.append("compacted", [Message(key=b"a", value=None)])
    assert offsets_and_values(log, "compacted") == [(1, b"2"), (2, None)]
    clock.now += TOMBSTONE_RETENTION
    log.append("compacted", [Message(key=b"c", value=b"3")])
    assert (2, None) in offsets_and_values(log, "compacted")
    clock.now += timedelta(microseconds=1)
    log.append("compacted", [Message(key=b"c", value=b"4")])
    assert offsets_and_values(log, "compacted") == [(1, b"2"), (4, b"4")]


def test_offsets_are_not_reused_when_nothing_is_left(log: EmbeddedEventLog, clock: Clock) -> None:
    log.append("compacted", [Message(key=b"a", value=None)])
    clock.now += 2 * TOMBSTONE_RETENTION
    log.append("compacted", [Message(key=b"a", value=None)])
    clock.now += 2 * TOMBSTONE_RETENTION
    log.append("compacted", [Message(key=b"b", value=b"1")])
    assert offsets_and_values(log, "compacted") == [(2, b"1")]


def test_an_ordinary_topic_is_never_compacted(log: EmbeddedEventLog, clock: Clock) -> None:
    log.append("plain", [Message(key=b"k", value=None) for _ in range(3)])
    clock.now += 2 * TOMBSTONE_RETENTION
    places = log.append("plain", [Message(key=b"k", value=b"v")])
    assert len(log.read("plain", places[0][0], 0)) == 4


def test_a_read_of_large_messages_is_cut_by_bytes(log: EmbeddedEventLog) -> None:
    value = bytes(8 * 2**20)
    partition = log.append("plain", [Message(key=b"k", value=value) for _ in range(6)])[0][0]
    assert [stored.offset for stored in log.read("plain", partition, 0)] == [0, 1, 2, 3]
    assert [stored.offset for stored in log.read("plain", partition, 4)] == [4, 5]


def test_the_time_of_appending_keeps_its_microseconds(log: EmbeddedEventLog, clock: Clock) -> None:
    clock.now = NOON + timedelta(microseconds=123457)
    log.append("compacted", [Message(key=b"k", value=b"v")])
    (stored,) = log.read("compacted", 0, 0)
    assert stored.appended_at == clock.now


def test_connections_are_shared_not_kept_per_thread(log: EmbeddedEventLog) -> None:
    descriptors = Path("/proc/self/fd")
    num_before = len(list(descriptors.iterdir()))
    for _ in range(20):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(log.append, "plain", [Message(key=b"k", value=b"v")]).result()
    assert len(list(descriptors.iterdir())) < num_before + 20
    assert sum(log.end_offset("plain", partition) for partition in range(3)) == 20


def test_an_append_that_fails_stores_nothing(path: Path, log: EmbeddedEventLog) -> None:
    bad = Message(key=b"k", value="text")  # type: ignore[arg-type]
    with pytest.raises(EventLogError, match=str(path)):
        log.append("plain", [Message(key=b"k", value=b"v"), bad])
    assert sum(log.end_offset("plain", partition) for partition in range(3)) == 0


def test_a_full_disk_is_one_clear_line_and_later_appends_work(path: Path) -> None:
    file = SqliteFile(path, busy_seconds=1.0)
    insert = "INSERT INTO messages VALUES (0, 0, ?, 0, NULL, zeroblob(200000), '{}', NULL)"
    with file.connection() as connection:
        connection.execute("PRAGMA max_page_count = 30")
    with (
        pytest.raises(EventLogError, match=rf"{path}: .* full; free space"),
        file.transaction() as connection,
    ):
        connection.execute(insert, (0,))
    with file.connection() as connection:
        connection.execute("PRAGMA max_page_count = 1000")
    with file.transaction() as connection:
        connection.execute(insert, (0,))
    file.close()


def test_a_writer_that_never_ends_is_reported_after_busy_seconds(path: Path) -> None:
    log = EmbeddedEventLog(path, busy_seconds=0.1)
    log.create_topic(TopicSpec(name="plain", num_partitions=1))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(EventLogError, match=rf"{path}: .* locked; another process writes"):
        log.append("plain", [Message(key=b"k", value=b"v")])
    other.close()
    assert log.append("plain", [Message(key=b"k", value=b"v")]) == [(0, 0)]
    log.close()


def test_invalid_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    path = tmp_path / "taken" / "log.sqlite"
    with pytest.raises(EventLogError, match=rf"{path}: .*can be written"):
        EmbeddedEventLog(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_invalid_read_only_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(EventLogError, match=r"can be written"):
            EmbeddedEventLog(tmp_path / "log.sqlite")
    finally:
        tmp_path.chmod(0o700)


def test_invalid_path_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EventLogError, match=rf"{tmp_path}: .*folder"):
        EmbeddedEventLog(tmp_path)


def test_invalid_file_that_is_no_database_is_refused_and_left_alone(path: Path) -> None:
    path.write_bytes(b"some other file\n" * 1000)
    with pytest.raises(EventLogError, match=rf"{path}: .*no event log; move it away"):
        EmbeddedEventLog(path)
    assert path.read_bytes() == b"some other file\n" * 1000


def test_invalid_damaged_file_is_refused(path: Path, log: EmbeddedEventLog) -> None:
    log.append("plain", [Message(key=b"k", value=bytes(1000)) for _ in range(200)])
    log.close()
    damaged = bytearray(path.read_bytes())
    damaged[4096:] = b"\xff" * (len(damaged) - 4096)
    path.write_bytes(damaged)
    reopened = EmbeddedEventLog(path)
    with pytest.raises(EventLogError, match=rf"{path}: .*damaged; move it away or restore"):
        reopened.read("plain", 0, 0)
    reopened.close()


def test_invalid_database_of_another_program_is_refused_and_left_alone(path: Path) -> None:
    other = sqlite3.connect(path)
    other.execute("CREATE TABLE recipes (name TEXT)")
    other.close()
    with pytest.raises(EventLogError, match=rf"{path}: is another program's database"):
        EmbeddedEventLog(path)
    other = sqlite3.connect(path)
    assert other.execute("SELECT name FROM sqlite_schema").fetchall() == [("recipes",)]
    assert other.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    other.close()


def test_invalid_newer_layout_is_refused_with_both_versions(
    path: Path, log: EmbeddedEventLog
) -> None:
    log.close()
    newer = sqlite3.connect(path)
    newer.execute("PRAGMA user_version = 7")
    newer.close()
    with pytest.raises(EventLogError, match=rf"{path}: has layout version 7, .* reads 1; upgrade"):
        EmbeddedEventLog(path)


def test_invalid_topic_without_partitions_is_refused(log: EmbeddedEventLog) -> None:
    with pytest.raises(EventLogError, match="topic none: num_partitions=0"):
        log.create_topic(TopicSpec(name="none", num_partitions=0))


def test_invalid_use_after_a_fork_is_refused(
    log: EmbeddedEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(EventLogError, match=f"opened in process {here}, used in {here + 1}"):
        log.end_offset("plain", 0)
