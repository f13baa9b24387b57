"""A learner that trains, killed again and again, ends like one that never was.

Every event is learned once and trained on once, in the order of the log: policies, released
weights, and the optimizer's state behind them come out equal, to the last bit. The number of a
version does not have to: a learner that dies between writing a version and announcing it leaves
that number taken, and the next one writes the same weights under the number after it.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from pipeline.eventlog.ports import EventLog
from pipeline.messaging.boards import LogPolicyBoard, LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.releases.registry import DrafterRegistry
from schemas.equality import first_difference
from schemas.events import DrafterReleased, PolicyPublished
from schemas.topics import POLICIES, VERIFICATION_EVENTS
from tests.integration.commands import Commands, open_commands
from tests.integration.killing import kill_amid_work
from tests.integration.tiny_run import TinyRun, save_tiny_model, wait_until
from tests.schemas.builders import PRODUCED_AT

NUM_KILLS = 20
MOST_SECONDS_BEYOND = 0.2
SERVE = ("worker", "--prompts", "prompts.jsonl", "--max-tokens", "64")
"""With segments of 16 tokens, four events a prompt."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What a learner has left: by stream, and by drafter."""

    policies: dict[str, PolicyPublished]
    releases: dict[str, DrafterReleased]
    tensors: dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with open_commands() as opened:
        yield opened


@pytest.fixture(scope="module")
def served(commands: Commands, tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Serve once, with nobody who learns: events and features lie ready."""
    folder = tmp_path_factory.mktemp("served")
    save_tiny_model(folder / "model")
    run = TinyRun.make(folder, folder / "model", num_prompts=30)
    status, _, complaint = commands.run(folder, *SERVE)
    assert status == 0, complaint
    return run


@pytest.fixture(scope="module")
def undisturbed(commands: Commands, served: TinyRun) -> Learned:
    """Learn all of it in one life."""
    run = _copy(served, "undisturbed")
    learner = commands.start(run.folder, "learner")
    with closing(open_log(run.settings)) as log:
        wait_until(lambda: _position(log) == log.end_offset(VERIFICATION_EVENTS, 0))
        learner.send_signal(signal.SIGTERM)
        assert learner.wait() == 0, run.output("learner")
        return _learned(run, log)


def test_policies_and_weights_after_many_kills_equal_those_of_an_undisturbed_run(
    commands: Commands, served: TinyRun, undisturbed: Learned
) -> None:
    run = _copy(served, "killed")
    generator = np.random.default_rng(11)
    with closing(open_log(run.settings)) as log:
        positions = [_learn_and_kill(commands, run, log, generator) for _ in range(NUM_KILLS)]
        learner = commands.start(run.folder, "learner")
        wait_until(lambda: _is_done(log, undisturbed))
        learner.send_signal(signal.SIGTERM)
        assert learner.wait() == 0, run.output("learner")
        killed = _learned(run, log)
        end = log.end_offset(VERIFICATION_EVENTS, 0)

    assert len(set(positions)) > NUM_KILLS // 2, positions
    assert sum(position < end for position in positions) > NUM_KILLS // 2, positions
    assert first_difference(killed.policies, undisturbed.policies) is None
    for drafter_id, release in undisturbed.releases.items():
        found = killed.releases[drafter_id]
        assert release.version > NUM_KILLS
        assert found.version >= release.version
        # Which events the weights contain.
        assert first_difference(found.training_window, release.training_window) is None
        _check_equal(killed.tensors[drafter_id], undisturbed.tensors[drafter_id])
    # What a kill left half-written has a temporary name, which nobody reads and age deletes.
    paths = (run.folder / "data" / "drafters").glob("*/*")
    names = [path.name for path in paths if not path.name.startswith("_")]
    assert names
    assert all(name.isdecimal() for name in names), names


def _copy(served: TinyRun, name: str) -> TinyRun:
    """Return a run of its own over a copy of the events and features."""
    folder = served.folder / name
    folder.mkdir()
    shutil.copytree(served.folder / "data", folder / "data")
    run = TinyRun.make(folder, served.folder / "model")
    # Slow enough for a life to end in the midst of the log.
    run.edit_settings("batch_size = 32", "batch_size = 32\nsteps_per_event = 10")
    return run


def _learn_and_kill(
    commands: Commands, run: TinyRun, log: EventLog, generator: np.random.Generator
) -> int:
    """Let a learner publish a few times, kill it at a random moment, return how far it came."""
    before = log.end_offset(POLICIES, 0)
    learner = commands.start(run.folder, "learner")
    wanted = before + int(generator.integers(0, 3))
    end = log.end_offset(VERIFICATION_EVENTS, 0)

    def kill() -> None:
        learner.send_signal(signal.SIGKILL)
        assert learner.wait() == -signal.SIGKILL

    kill_amid_work(
        kill,
        lambda: log.end_offset(POLICIES, 0) >= wanted or _position(log) == end,
        generator,
        most_seconds_beyond=MOST_SECONDS_BEYOND,
    )
    return _position(log)


def _position(log: EventLog) -> int:
    """Return the offset up to which the policies have learned."""
    policies = LogPolicyBoard(log, source="test").read_all()
    return max((p.watermark.partition_to_offset.get(0, 0) for p in policies), default=0)


def _is_done(log: EventLog, expected: Learned) -> bool:
    windows = {r.drafter_id: r.training_window for r in _releases(log)}
    wanted = {name: release.training_window for name, release in expected.releases.items()}
    is_learned = _position(log) == log.end_offset(VERIFICATION_EVENTS, 0)
    return is_learned and first_difference(windows, wanted) is None


def _releases(log: EventLog) -> Sequence[DrafterReleased]:
    return LogReleaseBoard(log, source="test").read_all()


def _learned(run: TinyRun, log: EventLog) -> Learned:
    """Read policies, releases, and all tensors of the newest version: weights and optimizer."""
    registry = DrafterRegistry(str(run.settings.data))
    policies = LogPolicyBoard(log, source="test").read_all()
    releases = {release.drafter_id: release for release in _releases(log)}
    tensors = {
        drafter_id: {
            **registry.read(r.artifact_uri, manifest_sha256=r.manifest_sha256).tensors,
            **registry.read_training_state(r.artifact_uri, manifest_sha256=r.manifest_sha256),
        }
        for drafter_id, r in releases.items()
    }
    return Learned(
        policies={p.stream: replace(p, produced_at=PRODUCED_AT) for p in policies},
        releases=releases,
        tensors=tensors,
    )


def _check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
