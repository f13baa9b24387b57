"""A recording in a process of its own: stopped, killed, gone on with."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay.reader import LogReader
from replay.requests import RequestTrace, join_requests
from replay.rerun import verify_logged_rounds
from tests.integration.commands import Commands, open_commands
from tests.integration.tiny_run import TinyRun, save_tiny_model, wait_until

RECORD = ("record", "prompts.jsonl", "--out", "recorded", "--max-tokens", "40")
NUM_PROMPTS = 24


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with open_commands() as opened:
        yield opened


@pytest.fixture
def run(tmp_path: Path) -> TinyRun:
    save_tiny_model(tmp_path / "model")
    return TinyRun.make(tmp_path, tmp_path / "model", num_prompts=NUM_PROMPTS)


def traces(run: TinyRun) -> list[RequestTrace]:
    return list(join_requests(LogReader(run.folder / "recorded")))


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -9)]
)
def test_what_was_complete_is_readable_after_any_end_and_resume_does_the_rest(
    commands: Commands, run: TinyRun, number: int, status: int
) -> None:
    recorder = commands.start(run.folder, *RECORD)
    wait_until(lambda: any(run.folder.glob("recorded/events/date=*/hour=*/[!_]*.parquet")))
    recorder.send_signal(number)
    assert recorder.wait() == status
    complaint = run.output("record")[1]
    assert "Traceback" not in complaint
    assert status or "interrupted; what is complete can be read, --resume goes on" in complaint
    found = traces(run)
    assert 0 < len(found) < NUM_PROMPTS
    assert all(one.is_complete for one in found)
    assert commands.run(run.folder, *RECORD)[0] == 2  # it holds a log now
    code, _, shown = commands.run(run.folder, *RECORD, "--resume")
    assert code == 0, shown
    assert f"{len(found)} conversations were there already" in shown
    found = traces(run)
    assert len({one.request_id for one in found}) == len(found) == NUM_PROMPTS
    assert not any(verify_logged_rounds(one).disagreements for one in found)
    code, table, complaint = commands.run(run.folder, "replay", "recorded")
    assert (code, complaint) == (0, "")
    assert " 0 disagreements" in " ".join(table.split())
