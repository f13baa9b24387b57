"""Short files of the log become long ones, and every row stays readable once throughout."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from pipeline import log_compaction
from pipeline.archiver import Archiver
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.log_compaction import Compaction, compact_log
from replay.reader import LogReader
from tests.pipeline.archiving import START, TOPIC, Crash, append_events, parquet_paths, ranges

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
