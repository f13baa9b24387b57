"""A deletion killed with SIGKILL before each of its file operations, and finished by the next."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import traceback
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.archive.log_files import LogFile, hour_folder, log_files, publish_log_file
from pipeline.archive.log_rewriting import delete_streams
from replay.reader import LogReader
from schemas.arrow import LoggedEvent, events_to_table
from schemas.topics import VERIFICATION_EVENTS
from tests.pipeline.archiving import event_with_features

# The child deletes and dies; it takes no lock that a thread of the parent could hold.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

FILE_OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove")
GONE, KEPT = "tenant-7", "tenant-8"
HOUR = datetime(2026, 3, 29, 1, tzinfo=UTC)
KEPT_SEQUENCES = {0, 2, 4, 6}


def write_log(folder: Path) -> None:
    """Write two files of four events each, of two streams in turn, all with features."""
    for first in (0, 4):
        rows = [_logged(folder, sequence) for sequence in range(first, first + 4)]
        file = LogFile(
            topic=VERIFICATION_EVENTS, partition=0, first_offset=first, last_offset=first + 3
        )
        publish_log_file(hour_folder(folder, HOUR), file, events_to_table(rows))


def _logged(folder: Path, sequence: int) -> LoggedEvent:
    uri = f"features/2026-03-29/worker-0/{sequence}.safetensors"
    (folder / uri).parent.mkdir(parents=True, exist_ok=True)
    (folder / uri).write_bytes(b"rows")
    stream = GONE if sequence % 2 else KEPT
    event = event_with_features(uri, sequence=sequence, stream=stream)
    return LoggedEvent(
        topic=VERIFICATION_EVENTS, partition=0, offset=sequence, appended_at=HOUR, event=event
    )


def delete_until(folder: Path, number: int) -> int:
    """Delete in a child that dies just before the ``number``-th operation; return its exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    countdown = itertools.count(number - 1, -1)

    def watch(event: str, _: tuple[object, ...]) -> None:
        if event in FILE_OPERATIONS and next(countdown) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        sys.addaudithook(watch)
        delete_streams(folder, VERIFICATION_EVENTS, [GONE])
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def test_a_deletion_killed_before_any_file_operation_leaves_whole_files_and_is_finished_later(
    tmp_path: Path,
) -> None:
    num_left = []
    for number in range(1, 100):
        folder = tmp_path / str(number)
        write_log(folder)
        before = log_files(folder, VERIFICATION_EVENTS)
        code = delete_until(folder, number)
        assert code in (0, -signal.SIGKILL)
        assert log_files(folder, VERIFICATION_EVENTS) == before
        reader = LogReader(folder)
        rows = {row.event.sequence for row in reader}
        assert reader.summary().problems == ()
        assert rows >= KEPT_SEQUENCES
        num_left.append(len(rows - KEPT_SEQUENCES))
        delete_streams(folder, VERIFICATION_EVENTS, [GONE])
        assert {row.event.sequence for row in LogReader(folder)} == KEPT_SEQUENCES
        features = {int(path.stem) for path in (folder / "features").rglob("*.safetensors")}
        assert features == KEPT_SEQUENCES, "no feature is left that no row names any more"
        if code == 0:
            break
    assert code == 0
    assert set(num_left) == {4, 2, 0}, "a file is there as it was, or without the stream"
    assert num_left == sorted(num_left, reverse=True)
