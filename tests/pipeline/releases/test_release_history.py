"""The steps of releases outlive the topic's compaction, their writers, and a full disk."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pipeline.commands.drafters import drafters
from pipeline.configuration.settings import load_settings
from pipeline.eventlog.ports import EventLog
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import open_log as open_event_log
from pipeline.releases.drafter_versions import DrafterVersions
from pipeline.releases.registry import DrafterRegistry
from pipeline.releases.release_history import RecordedReleases, ReleaseHistory
from pipeline.releases.release_rows import release_rows
from pipeline.storage import ArtifactError
from schemas.events import DrafterReleased, ReleaseState
from tests.learner.test_gate_streams import lived
from tests.pipeline.archiving import Crash
from tests.pipeline.artifacts import rewrite
from tests.pipeline.messages import open_log
from tests.schemas.builders import make_release

HEAD = "drafter-0"
BEGUN = datetime(2026, 11, 29, tzinfo=UTC)
CONFIG = {
    "architecture": "hydra",
    "target_fingerprint": "fingerprint-0",
    "tokenizer_hash": "tokenizer-0",
    "draft_vocabulary_hash": "vocabulary-0",
}


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = open_log(tmp_path, num_partitions=1)
    yield opened
    opened.close()


@pytest.fixture
def history(tmp_path: Path) -> ReleaseHistory:
    return ReleaseHistory(str(tmp_path / "store"))


@pytest.fixture
def board(log: EventLog, history: ReleaseHistory) -> RecordedReleases:
    return RecordedReleases(LogReleaseBoard(log, source="test"), history)


def step(version: int, state: str, seconds: float) -> DrafterReleased:
    return make_release(
        drafter_id=HEAD,
        version=version,
        parent_version=version - 1,
        state=ReleaseState(state),
        produced_at=BEGUN + timedelta(seconds=seconds),
    )


def kept(history: ReleaseHistory) -> list[tuple[int, str]]:
    return [(one.version, one.state) for one in history.steps(HEAD)]


def test_every_step_is_kept_and_the_board_keeps_the_newest(
    board: RecordedReleases, history: ReleaseHistory
) -> None:
    board.publish(step(0, "live", 0.0))
    for state in ("candidate", "shadow", "canary"):
        board.publish_beside(step(1, state, 1.0))
    board.publish(step(1, "live", 2.0))
    board.publish(step(0, "live", 3.0))
    board.publish_beside(step(1, "rolled_back", 3.0))
    assert kept(history) == [
        (0, "live"),
        *((1, state) for state in ("candidate", "shadow", "canary", "live")),
        (0, "live"),
        (1, "rolled_back"),
    ]
    assert [one.version for one in board.read_all()] == [0]
    assert [one.state for one in board.read_beside()] == [ReleaseState.ROLLED_BACK]
    assert [one.state for one in history.steps(HEAD, last=2)] == ["live", "rolled_back"]


def test_a_step_that_its_writer_died_over_is_kept_by_the_next_writer(
    log: EventLog,
    board: RecordedReleases,
    history: ReleaseHistory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    board.publish(step(0, "live", 0.0))

    def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(ReleaseHistory, "add", crash)
        with pytest.raises(Crash):
            board.publish(step(1, "live", 1.0))
    assert kept(history) == [(0, "live")]
    again = RecordedReleases(LogReleaseBoard(log, source="test"), history)
    again.publish(step(2, "live", 2.0))
    assert kept(history) == [(0, "live"), (1, "live"), (2, "live")]


def test_a_store_that_refuses_costs_no_release_and_gets_the_step_later(
    board: RecordedReleases, history: ReleaseHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ArtifactError("store", found="No space left on device", expected="a writable store")

    with monkeypatch.context() as patch:
        patch.setattr(ReleaseHistory, "add", refuse)
        board.publish(step(0, "live", 0.0))
        board.publish(step(1, "live", 1.0))
    assert [one.version for one in board.read_all()] == [1]
    assert kept(history) == []
    board.publish(step(2, "live", 2.0))
    assert kept(history) == [(0, "live"), (1, "live"), (2, "live")]


def test_a_step_that_is_kept_twice_is_there_once(history: ReleaseHistory) -> None:
    history.add(step(0, "live", 0.0))
    history.add(step(0, "live", 0.0))
    assert kept(history) == [(0, "live")]


@pytest.mark.parametrize("data", [b"\xff", b"[]", b"{}", b'{"produced_at": 3}'])
def test_a_damaged_step_is_left_out_and_named(
    history: ReleaseHistory, tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    history.add(step(0, "live", 0.0))
    history.add(step(1, "live", 1.0))
    first = sorted((tmp_path / "store" / "releases" / HEAD).iterdir())[0]
    rewrite(first, data)
    assert kept(history) == [(1, "live")]
    assert f"{first.name}: no release step, left out" in caplog.text


def test_what_an_operator_does_is_shown_as_history(
    log: EventLog, board: RecordedReleases, history: ReleaseHistory, tmp_path: Path
) -> None:
    registry = DrafterRegistry(str(tmp_path / "store"))
    for version in range(2):
        registry.write(HEAD, version, {"w": torch.zeros(2)}, CONFIG)
    moments = iter(BEGUN + timedelta(seconds=number) for number in range(20))
    versions = DrafterVersions(registry, board, now=lambda: next(moments), history=history)
    versions.promote(HEAD, 0, "")
    versions.promote(HEAD, 1, "measured elsewhere")
    versions.rollback(HEAD, None, "slow")
    steps = versions.history(HEAD)
    assert [(one.version, one.state, one.reason) for one in steps] == [
        (0, "live", "by hand"),
        (1, "live", "by hand: measured elsewhere"),
        (0, "live", "by hand: slow"),
        (1, "rolled_back", "by hand: slow"),
    ]
    assert versions.history(HEAD, last=1) == steps[-1:]
    without = DrafterVersions(registry, LogReleaseBoard(log, source="test"), now=lambda: BEGUN)
    assert [one.state for one in without.history(HEAD)] == ["live", "rolled_back"]


def test_the_command_and_the_report_show_what_the_gate_found_in_every_stream(
    tmp_path: Path,
) -> None:
    data, config = tmp_path / "data", tmp_path / "draftloop.toml"
    config.write_text(f'data = "{data}"\n')
    DrafterRegistry(str(data)).write(HEAD, 0, {"w": torch.zeros(2)}, CONFIG)
    _, steps = lived({"code": {1: 0.3, 2: 0.8}, "law": {1: 0.3, 2: 0.8}})
    evidence = next(one.evidence for one in steps if one.state is ReleaseState.LIVE)
    with closing(open_event_log(load_settings(config))) as log:
        board = RecordedReleases(LogReleaseBoard(log, source="test"), ReleaseHistory(str(data)))
        board.publish(make_release(drafter_id=HEAD, version=0, evidence=evidence))
    result = CliRunner().invoke(drafters, ["show", HEAD, "--config", str(config)])
    assert result.exception is None, result.output
    assert evidence is not None
    for one in evidence.streams:
        line = f"{one.stream}: {one.new_acceptance_length:.3f} against"
        assert line in result.output
        assert f"{one.num_windows} windows of {one.num_requests} requests" in result.output
    rows = release_rows(data)
    assert [row.stream for row in rows] == [None, "code", "law"]
    assert [row.difference_low for row in rows[1:]] == [
        one.difference_low for one in evidence.streams
    ]
    assert release_rows(tmp_path) == ()


def test_the_command_shows_the_history_as_a_table_and_as_json(tmp_path: Path) -> None:
    config = tmp_path / "draftloop.toml"
    config.write_text(f'data = "{tmp_path / "data"}"\n')
    DrafterRegistry(str(tmp_path / "data")).write(HEAD, 0, {"w": torch.zeros(2)}, CONFIG)

    def run(*command: str) -> str:
        result = CliRunner().invoke(drafters, [*command, "--config", str(config)])
        assert result.exception is None, result.output
        return result.output

    run("promote", HEAD, "0", "--reason", "first")
    run("retire", HEAD, "--reason", "second")
    shown = run("show", HEAD, "--json", str(tmp_path / "history.json"))
    assert "history" in shown
    assert shown.index("by hand: first") < shown.rindex("by hand: second")
    values = json.loads((tmp_path / "history.json").read_text())
    assert values["versions"] == [{"version": 0, "state": "retired"}]
    assert [(one["state"], one["reason"]) for one in values["history"]] == [
        ("live", "by hand: first"),
        ("retired", "by hand: second"),
    ]
    assert values["history"][0].keys() == {
        *("produced_at", "version", "parent_version", "state", "reason", "evidence"),
        "manifest_sha256",
    }
