"""Rows of a stream and rows that are old leave the log; all others stay, once, and are added to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from pipeline.archive.archiver import Archiver
from pipeline.archive.log_compaction import compact_log
from pipeline.archive.log_files import rewriting
from pipeline.archive.log_rewriting import StreamDeletion, delete_old_events, delete_streams
from pipeline.archive.retention import delete_old_features, retain
from pipeline.commands.data import delete
from pipeline.configuration.schedule_settings import ScheduleSettings
from pipeline.configuration.settings import Settings, SettingsError, load_settings
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import Message
from pipeline.locks import LockError
from pipeline.storage import Storage
from replay.errors import ReplayError
from replay.reader import LogReader
from schemas.codec import encode
from schemas.topics import VERIFICATION_EVENTS
from tests.pipeline.archiving import (
    START,
    TOPIC,
    Clock,
    Crash,
    append_events,
    crash_at,
    event_with_features,
    parquet_paths,
    ranges,
)

OpenArchiver = Callable[..., Archiver]
GONE, KEPT = "tenant-7", "tenant-9"
"""Two that the hash of their names puts into one partition."""

LATER = START + timedelta(hours=5)
NOTHING = StreamDeletion(num_rows=0, num_files=0, num_feature_files=0, unreadable=())


def feature_uri(sequence: int) -> str:
    return f"features/2026-03-29/worker-0/{sequence:020}.safetensors"


def append_with_features(log: EmbeddedEventLog, folder: Path, sequence: int, stream: str) -> None:
    """Append an event that refers to features, which are there."""
    uri = feature_uri(sequence)
    event = event_with_features(uri, sequence=sequence, stream=stream)
    (folder / uri).parent.mkdir(parents=True, exist_ok=True)
    (folder / uri).write_bytes(b"rows")
    log.append(TOPIC, [Message(key=stream.encode(), value=encode(event))])


@pytest.fixture
def two_streams(log: EmbeddedEventLog, folder: Path, open_archiver: OpenArchiver) -> Path:
    """Twelve events of two streams, in turn, in files of four, each with its features."""
    for sequence in range(12):
        append_with_features(log, folder, sequence, GONE if sequence % 2 else KEPT)
    archiver = open_archiver(max_events_per_file=4)
    archiver.drain()
    archiver.close()
    assert len(parquet_paths(folder)) == 3
    return folder


def sequences(folder: Path) -> list[int]:
    return sorted(row.event.sequence for row in LogReader(folder))


def feature_sequences(folder: Path) -> list[int]:
    return sorted(int(path.stem) for path in (folder / "features").rglob("*.safetensors"))


def never() -> bool:
    """Do not ask the job to end."""
    return False


def test_a_deleted_stream_is_gone_with_its_features_and_nothing_else_is(two_streams: Path) -> None:
    before = ranges(two_streams)
    done = delete_streams(two_streams, TOPIC, [GONE])
    assert done == replace(NOTHING, num_rows=6, num_files=3, num_feature_files=6)
    assert sequences(two_streams) == feature_sequences(two_streams) == list(range(0, 12, 2))
    assert ranges(two_streams) == before, "the names say where the archiver goes on"
    assert delete_streams(two_streams, TOPIC, [GONE]) == NOTHING


def test_a_dry_run_counts_the_same_and_changes_nothing(two_streams: Path) -> None:
    contents = {path: path.read_bytes() for path in two_streams.rglob("*") if path.is_file()}
    files = sorted(two_streams.rglob("*"))
    done = delete_streams(two_streams, TOPIC, [GONE], is_dry_run=True)
    assert sorted(two_streams.rglob("*")) == files, "not even a lock is left"
    with rewriting(two_streams):
        assert delete_streams(two_streams, TOPIC, [GONE], is_dry_run=True) == done
    assert (done.num_rows, done.num_files, done.num_feature_files) == (6, 3, 6)
    assert {path: path.read_bytes() for path in contents} == contents
    assert delete_streams(two_streams, TOPIC, [GONE]) == done


def test_a_log_of_one_stream_is_left_empty_and_is_still_added_to_once(
    two_streams: Path, log: EmbeddedEventLog, open_archiver: OpenArchiver
) -> None:
    delete_streams(two_streams, TOPIC, [GONE, KEPT])
    append_with_features(log, two_streams, 12, KEPT)
    open_archiver().drain()
    assert sequences(two_streams) == [12]
    assert delete_streams(two_streams, TOPIC, [GONE]) == NOTHING


def test_merged_files_bring_nothing_back(two_streams: Path) -> None:
    compact_log(two_streams, TOPIC, LATER)
    assert delete_streams(two_streams, TOPIC, [GONE]).num_files == 4, "the short ones are there yet"
    seconds = (LATER - timedelta(hours=1)).timestamp()
    for path in parquet_paths(two_streams):
        os.utime(path, (seconds, seconds))
    compact_log(two_streams, TOPIC, LATER)
    assert len(parquet_paths(two_streams)) == 1
    assert sequences(two_streams) == list(range(0, 12, 2))


def test_only_one_replaces_files_at_a_time(two_streams: Path) -> None:
    with rewriting(two_streams):
        with pytest.raises(LockError, match="another rewriting of the log is at work here; run"):
            delete_streams(two_streams, TOPIC, [GONE])
        assert compact_log(two_streams, TOPIC, LATER).num_merged == 0
    assert compact_log(two_streams, TOPIC, LATER).num_merged == 3


@pytest.mark.parametrize("step", ["open", "write", "fsync", "rename", "sync_folder", "done"])
def test_a_crash_at_any_step_leaves_whole_files_and_the_next_run_does_the_rest(
    two_streams: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with monkeypatch.context() as patch:
        crash_at(step, patch)
        with pytest.raises(Crash):
            delete_streams(two_streams, TOPIC, [GONE])
    assert set(range(0, 12, 2)) <= set(sequences(two_streams))
    assert LogReader(two_streams).summary().problems == ()
    delete_streams(two_streams, TOPIC, [GONE])
    assert sequences(two_streams) == feature_sequences(two_streams) == list(range(0, 12, 2))


def test_a_file_that_cannot_be_read_is_named_and_the_others_are_done(two_streams: Path) -> None:
    broken = parquet_paths(two_streams)[1]
    broken.write_bytes(b"PAR1 no Parquet PAR1")
    done = delete_streams(two_streams, TOPIC, [GONE])
    assert done.num_files == 2
    assert done.unreadable == (str(broken.relative_to(two_streams)),)


def test_an_event_cannot_name_another_file_as_its_features(
    log: EmbeddedEventLog, folder: Path, open_archiver: OpenArchiver
) -> None:
    victim = folder / "events" / "victim"
    victim.parent.mkdir(parents=True)
    victim.write_text("x")
    for number, uri in enumerate(("events/victim", "features/../events/victim")):
        event = event_with_features(uri, sequence=number, stream=GONE)
        log.append(TOPIC, [Message(key=GONE.encode(), value=encode(event))])
    open_archiver().drain()
    assert delete_streams(folder, TOPIC, [GONE]) == replace(NOTHING, num_rows=2, num_files=1)
    assert victim.read_text() == "x"


def test_old_files_go_and_the_archiver_goes_on_where_it_was(
    log: EmbeddedEventLog, folder: Path, open_archiver: OpenArchiver, clock: Clock
) -> None:
    for first in range(0, 6, 2):
        append_events(log, 2, first=first)
    archiver = open_archiver(max_events_per_file=2)
    archiver.drain()
    archiver.close()
    ended = START.replace(minute=0, second=0) + timedelta(hours=1)
    assert delete_old_events(folder, TOPIC, ended - timedelta(seconds=1)) == 0
    assert delete_old_events(folder, TOPIC, ended) == 3
    assert ranges(folder) == [(4, 5)], "without the newest name all would be archived again"
    assert delete_old_events(folder, TOPIC, ended) == 0
    clock.seconds = 7200.0
    append_events(log, 2, first=6)
    open_archiver(max_events_per_file=2).drain()
    assert sequences(folder) == [6, 7]
    assert delete_old_events(folder, TOPIC, ended) == 1
    assert ranges(folder) == [(6, 7)]
    assert len(list((folder / "events").glob("date=*/hour=*"))) == 1


def test_old_features_go_by_the_day(tmp_path: Path) -> None:
    for day in ("2026-03-28", "2026-03-29", "not-a-day"):
        (tmp_path / "features" / day / "worker-0").mkdir(parents=True)
        (tmp_path / "features" / day / "worker-0" / "a.safetensors").write_bytes(b"x")
    storage, before = Storage(str(tmp_path)), START.replace(hour=0, minute=0, second=0)
    assert delete_old_features(storage, before, lambda: True) == 0
    assert delete_old_features(storage, before, never) == 1
    assert storage.children("features") == ["2026-03-29", "not-a-day"]
    assert delete_old_features(storage, before, never) == 0


def settings_with(folder: Path, **keys: object) -> Settings:
    schedule = ScheduleSettings.model_validate({"retention": "0 3 * * *", **keys})
    return Settings(data=folder, schedule=schedule)


def test_the_job_does_what_the_settings_say_and_ends_when_told(two_streams: Path) -> None:
    now: datetime = START + timedelta(days=3)
    both = settings_with(two_streams, deleted_streams=(GONE,), event_days=30, feature_days=30)
    assert retain(both, now, lambda: True).streams == NOTHING
    done = retain(both, now, never)
    assert (done.num_event_files, done.num_feature_days) == (0, 0)
    assert done.streams is not None
    assert done.streams.num_rows == 6
    done = retain(settings_with(two_streams, event_days=2, feature_days=1), now, never)
    assert (done.num_event_files, done.num_feature_days, done.streams) == (3, 1, None)
    with pytest.raises(ReplayError):
        sequences(two_streams)


def test_a_retention_that_would_delete_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "draftloop.toml").write_text('[schedule]\nretention = "0 3 * * *"\n')
    with pytest.raises(SettingsError, match="would delete nothing; set event_days, feature_days"):
        load_settings(tmp_path / "draftloop.toml")


def test_the_command_tells_what_it_did_and_which_file_it_could_not_read(two_streams: Path) -> None:
    app = typer.Typer()
    app.command()(delete)
    config, numbers = two_streams.parent / "draftloop.toml", two_streams.parent / "numbers.json"
    config.write_text(f'data = "{two_streams}"\n')
    command = ["--stream", GONE, "--config", str(config), "--json", str(numbers)]
    dry = CliRunner().invoke(app, [*command, "--dry-run"])
    assert "would delete 6 rows in 3 files of events, and 6 files of hidden states" in dry.output
    assert json.loads(numbers.read_text()) == {
        "streams": [GONE],
        "is_dry_run": True,
        "num_rows": 6,
        "num_files": 3,
        "num_feature_files": 6,
        "unreadable": [],
    }
    parquet_paths(two_streams)[0].write_bytes(b"no Parquet")
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 1
    assert "deleted 4 rows in 2 files" in done.output
    assert f"{VERIFICATION_EVENTS}-" in done.output
    assert "cannot be read and may hold rows of it" in done.output


def test_invalid_data_folder_is_refused_and_nothing_is_made_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTLOOP_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(typer.BadParameter, match="nowhere does not exist"):
        delete(["tenant-7"])
    assert not (tmp_path / "nowhere").exists()
