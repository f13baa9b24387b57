"""The archiver over the real embedded log and real files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import IO

import pyarrow as pa
import pytest

from pipeline.archive import log_files
from pipeline.archive.archiver import Archiver, ArchiverError
from pipeline.archive.log_files import LogFile
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import Message
from pipeline.messaging.dead_letters import DeadLetterTopic
from replay.reader import LogReader
from schemas.arrow import read_table, write_table
from schemas.codec import encode
from schemas.topics import DEAD_LETTERS
from tests.pipeline.archiving import (
    TOPIC,
    Clock,
    append_events,
    parquet_paths,
    ranges,
    rows,
    sequences,
    undecodable,
)
from tests.schemas.builders import make_event


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


def test_stopping_archives_what_is_left(
    log: EmbeddedEventLog, folder: Path, open_archiver: Callable[..., Archiver]
) -> None:
    append_events(log, 7)
    stop = threading.Event()
    stop.set()
    open_archiver(max_events_per_file=5).run(stop)
    assert ranges(folder) == [(0, 4), (5, 6)]


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
