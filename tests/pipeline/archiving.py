"""A hand-driven clock, events to archive, what lies in a folder, and ways to fail."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO

import pyarrow as pa
import pytest

from pipeline.archive import log_files
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import Message
from schemas.arrow import LoggedEvent, events_from_table, read_table, write_table
from schemas.codec import encode
from schemas.events import FeatureReference, VerificationEvent
from schemas.topics import VERIFICATION_EVENTS
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


def append_events(
    log: EmbeddedEventLog, count: int, *, first: int = 0, stream: str = "stream-a"
) -> int:
    """Append events of one stream and return their partition."""
    events = [make_event(sequence=n, stream=stream) for n in range(first, first + count)]
    messages = [Message(key=stream.encode(), value=encode(event)) for event in events]
    return log.append(TOPIC, messages)[0][0]


def event_with_features(uri: str, *, sequence: int, stream: str) -> VerificationEvent:
    """Build an event that says its hidden states are there."""
    event = make_event(sequence=sequence, stream=stream, with_content=True)
    assert event.content is not None
    reference = FeatureReference(
        uri=uri, first_row=0, num_rows=event.num_positions, sha256="0" * 64
    )
    return replace(event, content=replace(event.content, features=reference))


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


def crash_at(step: str, patch: pytest.MonkeyPatch) -> None:
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


def undecodable() -> list[Message]:
    whole = encode(make_event(sequence=99))
    return [
        Message(key=b"stream-a", value=value, headers={"ce_id": b"x"})
        for value in (b"\xff", b"", None, whole[:-1], b"\x00\x00\x00\xff\xff" + whole[5:])
    ]


def fail_at(step: str, patch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    if step == "fsync":
        patch.setattr("pipeline.archive.log_files.os.fsync", full)
    elif step == "rename":
        patch.setattr(Path, "rename", full)
    else:
        name = {"open": "_make_folders", "sync_folder": "_sync_folder"}[step]
        patch.setattr(log_files, name, full)


def wait_until(is_true: Callable[[], bool]) -> None:
    for _ in range(6000):
        if is_true():
            return
        threading.Event().wait(0.01)
    raise AssertionError("did not happen within 60 s")
