"""Short files of the log become long ones, and every row stays readable once throughout."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.archive import log_compaction
from pipeline.archive.archiver import Archiver
from pipeline.archive.log_compaction import Compaction, compact_log
from pipeline.archive.log_files import LogFile, hour_folder
from pipeline.eventlog.embedded import EmbeddedEventLog
from replay.reader import LogReader
from schemas.arrow import read_table
from schemas.equality import same_message
from tests.pipeline.archiving import START, TOPIC, Crash, append_events, parquet_paths, ranges
from tests.schemas.test_evolution import DATA

LATER = START + timedelta(hours=5)
OpenArchiver = Callable[..., Archiver]


@pytest.fixture
def short_files(log: EmbeddedEventLog, folder: Path, open_archiver: OpenArchiver) -> Path:
    """Twelve events of two streams in files of two."""
    for first in range(0, 12, 2):
        append_events(log, 2, first=first, stream=f"stream-{first % 4}")
    archiver = open_archiver(max_events_per_file=2)
    archiver.drain()
    archiver.close()
    assert len(parquet_paths(folder)) == 6
    return folder


def sequences(folder: Path) -> list[int]:
    return sorted(row.event.sequence for row in LogReader(folder))


def age(folder: Path) -> None:
    """Let every file be an hour older than the run that follows."""
    seconds = (LATER - timedelta(hours=1)).timestamp()
    for path in parquet_paths(folder):
        os.utime(path, (seconds, seconds))


def test_short_files_become_one_per_partition_and_go_a_run_later(short_files: Path) -> None:
    """E10: many tiny files are merged."""
    before = sequences(short_files)
    done = compact_log(short_files, TOPIC, LATER)
    assert (done.num_merged, done.num_removed) == (6, 0)
    assert sequences(short_files) == before == list(range(12))
    assert LogReader(short_files).summary().problems == ()
    age(short_files)
    assert compact_log(short_files, TOPIC, LATER).num_removed == 6
    assert len(parquet_paths(short_files)) == done.num_written <= 2
    assert sequences(short_files) == before
    nothing = Compaction(num_merged=0, num_written=0, num_removed=0)
    assert compact_log(short_files, TOPIC, LATER) == nothing


def test_an_hour_that_is_still_written_to_is_left_alone(short_files: Path) -> None:
    assert compact_log(short_files, TOPIC, START + timedelta(minutes=50)).num_merged == 0


def test_files_that_do_not_touch_or_are_long_are_not_merged(
    short_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_compaction, "SHORT_BYTES", 10)
    assert compact_log(short_files, TOPIC, LATER).num_merged == 0
    monkeypatch.undo()
    for path in parquet_paths(short_files)[1::2]:
        path.unlink()
    assert compact_log(short_files, TOPIC, LATER).num_written <= 1


def test_an_archiver_goes_on_behind_a_merged_file(
    short_files: Path, log: EmbeddedEventLog, open_archiver: OpenArchiver
) -> None:
    compact_log(short_files, TOPIC, LATER)
    age(short_files)
    compact_log(short_files, TOPIC, LATER)
    append_events(log, 3, first=12)
    open_archiver(max_events_per_file=2).drain()
    assert sequences(short_files) == list(range(15))


@pytest.mark.parametrize("step", ["publish_log_file", "unlink"])
def test_a_crash_at_any_step_loses_and_doubles_nothing(
    short_files: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise Crash

    if step == "unlink":
        compact_log(short_files, TOPIC, LATER)
        age(short_files)
    with monkeypatch.context() as patch:
        place = Path if step == "unlink" else log_compaction
        patch.setattr(place, step, crash)
        with pytest.raises(Crash):
            compact_log(short_files, TOPIC, LATER)
    assert sequences(short_files) == list(range(12))
    compact_log(short_files, TOPIC, LATER)
    age(short_files)
    compact_log(short_files, TOPIC, LATER)
    assert sequences(short_files) == list(range(12))
    assert len(ranges(short_files)) <= 2


def older_files(folder: Path, *, versions: list[int], first: int = 0) -> list[Path]:
    """Lay stored files of older builds, three rows each, one behind the other."""
    hour = hour_folder(folder, START)
    hour.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, version in enumerate(versions):
        begin = first + 3 * number
        table = pq.read_table(DATA / f"events.v{version}.parquet")
        for name in ("offset", "sequence"):
            field = table.schema.field(name)
            numbers = pa.array(range(begin, begin + 3), field.type)
            table = table.set_column(table.schema.get_field_index(name), field, numbers)
        file = LogFile(topic=TOPIC, partition=0, first_offset=begin, last_offset=begin + 2)
        paths.append(hour / file.name)
        pq.write_table(table, paths[-1])
    return paths


def offsets(folder: Path) -> list[int]:
    return sorted(row.offset for row in LogReader(folder))


@pytest.mark.parametrize("version", [0, 1])
def test_short_files_of_an_older_schema_are_merged_and_read_as_before(
    folder: Path, version: int
) -> None:
    older_files(folder, versions=[version] * 3)
    before = [logged.event for logged in LogReader(folder)]
    assert compact_log(folder, TOPIC, LATER).num_written == 1
    age(folder)
    assert compact_log(folder, TOPIC, LATER).num_removed == 3
    (merged,) = parquet_paths(folder)
    assert read_table(merged)["schema_version"].to_pylist() == [version] * 9
    after = [logged.event for logged in LogReader(folder)]
    assert all(same_message(*pair) for pair in zip(before, after, strict=True))
    assert offsets(folder) == list(range(9))


def test_files_of_different_schemas_are_not_mixed(folder: Path) -> None:
    older_files(folder, versions=[1, 2, 1, 2])
    nothing = Compaction(num_merged=0, num_written=0, num_removed=0)
    assert compact_log(folder, TOPIC, LATER) == nothing
    older_files(folder, versions=[1, 1, 2, 2], first=12)
    assert compact_log(folder, TOPIC, LATER).num_written == 2
    for path in parquet_paths(folder):
        assert len(set(read_table(path)["schema_version"].to_pylist())) == 1


@pytest.mark.parametrize("damage", ["torn", "page", "newer"])
def test_a_short_file_that_cannot_be_read_is_left_alone_and_named(
    folder: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = older_files(folder, versions=[2, 2])
    bad = older_files(folder, versions=[2, 2], first=6)
    if damage == "newer":
        bad = older_files(folder, versions=[3, 3], first=6)
    else:
        for path in bad:
            data = bytearray(path.read_bytes())
            middle = len(data) // 4
            data[middle : middle + 40] = b"\xff" * 40
            path.write_bytes(data[: len(data) // 2] if damage == "torn" else data)
    contents = [path.read_bytes() for path in bad]
    done = compact_log(folder, TOPIC, LATER)
    assert (done.num_merged, done.num_written) == (2, 1)
    assert [path.read_bytes() for path in bad] == contents
    assert all(path.exists() for path in good)
    assert bad[0].name in caplog.text
