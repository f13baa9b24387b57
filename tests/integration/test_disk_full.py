"""A disk that is really full: a small file system in memory, where this user may mount one."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from pipeline.archive.archiver import Archiver
from pipeline.archive.log_files import log_files
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import EventLogError, Message
from pipeline.messaging.dead_letters import DeadLetterTopic
from pipeline.messaging.topics import TopicPlan, create_topics
from pipeline.releases.registry import DrafterRegistry
from replay.reader import LogReader
from schemas.codec import encode
from schemas.topics import VERIFICATION_EVENTS
from tests.pipeline.archiving import wait_until
from tests.schemas.builders import make_event

SIZE = "2m"
NUM_EVENTS = 60


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk with")
    if mounted.returncode:
        pytest.skip(f"this user may not mount a small disk: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take all of the space that is left."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(os.urandom(4096)):
            pass
    return path


def append(log: EmbeddedEventLog, first: int, count: int) -> None:
    events = [make_event(sequence=n, num_windows=40) for n in range(first, first + count)]
    log.append(
        VERIFICATION_EVENTS, [Message(key=e.stream.encode(), value=encode(e)) for e in events]
    )


def test_a_full_disk_stops_archiving_with_an_alarm_and_loses_nothing(
    small_disk: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I5: what is there stays whole, the rest follows once there is space."""
    monkeypatch.setattr("pipeline.archive.archiver.FIRST_RETRY_SECONDS", 0.02)
    monkeypatch.setattr("pipeline.archive.archiver.LAST_RETRY_SECONDS", 0.1)
    with closing(EmbeddedEventLog(tmp_path / "log.sqlite")) as log:
        create_topics(log, TopicPlan())
        append(log, 0, NUM_EVENTS // 2)
        archiver = Archiver(
            log,
            VERIFICATION_EVENTS,
            small_disk,
            dead_letters=DeadLetterTopic(log),
            max_events_per_file=10,
        )
        stop = threading.Event()
        thread = threading.Thread(target=archiver.run, args=(stop,))
        thread.start()
        try:
            wait_until(lambda: archiver.num_files == 3)
            filler = fill(small_disk)
            append(log, NUM_EVENTS // 2, NUM_EVENTS // 2)
            wait_until(lambda: archiver.num_failures >= 3)
            assert [row.event.sequence for row in LogReader(small_disk)] == list(range(30))
            filler.unlink()
            wait_until(lambda: archiver.num_files == 6)
        finally:
            stop.set()
            thread.join()
            archiver.close()
    assert "No space left on device" in caplog.text
    assert [row.event.sequence for row in LogReader(small_disk)] == list(range(NUM_EVENTS))
    ranges = [(f.first_offset, f.last_offset) for f in log_files(small_disk, VERIFICATION_EVENTS)]
    assert ranges == [(n, n + 9) for n in range(0, NUM_EVENTS, 10)]
    assert not list(small_disk.rglob("_*.parquet"))


def test_an_event_log_on_a_full_disk_refuses_in_one_line_and_keeps_what_it_has(
    small_disk: Path,
) -> None:
    """I5: the queue of the worker holds its events and drops the oldest, counted."""
    with closing(EmbeddedEventLog(small_disk / "log.sqlite")) as log:
        create_topics(log, TopicPlan())
        append(log, 0, 5)
        filler = fill(small_disk)
        with pytest.raises(EventLogError, match="free space on the disk"):
            append(log, 5, 200)
        assert log.end_offset(VERIFICATION_EVENTS, 0) == 5
        filler.unlink()
        append(log, 5, 5)
        assert log.end_offset(VERIFICATION_EVENTS, 0) == 10


def test_the_registry_on_a_full_disk_keeps_its_older_versions(small_disk: Path) -> None:
    """I5: the checkpoint that is there stays intact."""
    import torch

    registry = DrafterRegistry(str(small_disk))
    tensors = {"weight": torch.arange(10_000, dtype=torch.float32)}
    stored = registry.write("head", 0, tensors, {"architecture": "test"})
    fill(small_disk)
    with pytest.raises(Exception, match="No space left"):
        registry.write("head", 1, tensors, {"architecture": "test"})
    assert list(registry.versions("head")) == [0]
    config = registry.read_config(stored.uri, manifest_sha256=stored.manifest_sha256)
    assert config["architecture"] == "test"
