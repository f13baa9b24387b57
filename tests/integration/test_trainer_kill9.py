"""A gated trainer killed while it updates, publishes and rolls back leaves nothing half done."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np

from learner.trial import shadow_id
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import Message
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.releases.registry import DrafterRegistry
from schemas.codec import encode
from schemas.events import (
    AcceptanceRule,
    DrafterReleased,
    DrafterVersion,
    ReleaseState,
    VerificationEvent,
)
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.tiny_run import wait_until
from tests.integration.train import STEPS_PER_EVENT
from tests.learner.trainers import event_of
from tests.pipeline.messages import open_log
from tests.schemas.builders import make_windows

HEAD = "softmax"
NUM_KILLS = 20
EVENTS_PER_LIFE = 8


class Workers:
    """Serves with what stands on the board, and sends events of it.

    Every version on trial is better than the live one; once live, every second one turns bad.
    """

    def __init__(self, log: EmbeddedEventLog) -> None:
        self._log = log
        self._board = LogReleaseBoard(log, source="test")
        self._version_to_live_since: dict[int, int] = {}
        self.num_sent = 0
        self.states: set[ReleaseState] = set()
        self.live_versions: list[int] = []

    def live(self) -> DrafterReleased | None:
        """Return what stands in the drafter's place."""
        return next(iter(self._board.read_all()), None)

    def send(self) -> None:
        """Serve one request and send its event."""
        live = self.live()
        beside = next(iter(self._board.read_beside()), None)
        assert live is not None
        self.live_versions.append(live.version)
        self._version_to_live_since.setdefault(live.version, self.num_sent)
        versions = [live.version]
        if beside is not None and beside.version != live.version:
            self.states.add(beside.state)
            if beside.state in (ReleaseState.SHADOW, ReleaseState.CANARY):
                versions.append(beside.version)
            if beside.state is ReleaseState.CANARY and self.num_sent % 2:
                versions.reverse()
        event = self._event(versions)
        self._log.append(
            VERIFICATION_EVENTS, [Message(key=event.stream.encode(), value=encode(event))]
        )
        self.num_sent += 1

    def _event(self, versions: list[int]) -> VerificationEvent:
        made = event_of(self.num_sent, num_windows=24, num_drafters=len(versions))
        rng = np.random.default_rng(self.num_sent)
        rates = np.array([self._rate(version) for version in versions])
        shape = (24, made.num_speculative_tokens, len(versions))
        windows = make_windows(
            rng,
            num_windows=24,
            num_drafters=len(versions),
            num_speculative_tokens=made.num_speculative_tokens,
            first_position=int(made.windows.start[0]),
            rule=AcceptanceRule.GREEDY,
            acceptance_probability=(rng.random(shape) < rates).astype(np.float64),
        )
        ids = [HEAD, shadow_id(HEAD)][: len(versions)]
        return replace(
            made,
            request_id=f"request-{self.num_sent}",
            windows=windows,
            drafters=tuple(
                DrafterVersion(drafter_id=drafter_id, weights_version=version)
                for drafter_id, version in zip(ids, versions, strict=True)
            ),
        )

    def _rate(self, version: int) -> float:
        since = self._version_to_live_since.get(version)
        if since is None:
            return 0.8
        return 0.05 if list(self._version_to_live_since).index(version) % 2 else 0.5


@contextmanager
def nursery(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.train", str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def start(process: subprocess.Popen[str]) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def check_registry(folder: Path, live: DrafterReleased) -> None:
    """Every version is whole, and the live one is among them."""
    registry = DrafterRegistry(str(folder))
    versions = registry.versions(HEAD)
    assert live.version in versions
    registry.read_training_state(live.artifact_uri, manifest_sha256=live.manifest_sha256)
    for version in versions:
        stored = registry.find(HEAD, version)
        registry.read(stored.uri, manifest_sha256=stored.manifest_sha256)
        config = registry.read_config(stored.uri, manifest_sha256=stored.manifest_sha256)
        contained = config["contained"].get("0", {"offset": 0})["offset"]
        assert config["num_updates"] <= STEPS_PER_EVENT * contained, "learned twice"


def test_twenty_kills_leave_whole_versions_one_of_them_live_and_nothing_learned_twice(
    tmp_path: Path,
) -> None:
    rng = np.random.default_rng(0)
    with closing(open_log(tmp_path, num_partitions=1)) as log, nursery(tmp_path) as process:
        workers = Workers(log)
        child = start(process)
        wait_until(lambda: workers.live() is not None)
        for _ in range(NUM_KILLS):
            for _ in range(EVENTS_PER_LIFE):
                workers.send()
                time.sleep(0.01)
            time.sleep(float(rng.uniform(0.0, 0.1)))
            os.kill(child, signal.SIGKILL)
            child = start(process)
            live = workers.live()
            assert live is not None
            assert live.state is ReleaseState.LIVE
            check_registry(tmp_path, live)
        position = tmp_path / "position"
        wait_until(lambda: position.exists() and _number(position) >= workers.num_sent)
        for _ in range(40):
            workers.send()
            sent = workers.num_sent
            wait_until(lambda sent=sent: _number(position) >= sent)  # type: ignore[misc]
        os.kill(child, signal.SIGKILL)
        last = workers.live()
        assert last is not None
        check_registry(tmp_path, last)
        assert {ReleaseState.SHADOW, ReleaseState.CANARY} <= workers.states
        moves = np.diff(workers.live_versions)
        assert np.count_nonzero(moves > 0) >= 3, "promoted"
        assert np.count_nonzero(moves < 0) >= 2, "rolled back"


def _number(path: Path) -> int:
    with suppress(ValueError):
        return int(path.read_text())
    return -1
