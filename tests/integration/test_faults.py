"""Thirty seeded faults leave what one clean pass over the same log makes of it.

``DRAFTLOOP_TEST_FAULTS`` asks for more of them, ``DRAFTLOOP_TEST_SEED`` for others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from pipeline.boards import LogReleaseBoard
from pipeline.elected_training import GROUP as TRAINER_GROUP
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.ports import EventLogError, Message
from pipeline.group_source import GROUP
from pipeline.registry import DrafterRegistry
from pipeline.topics import TopicPlan, create_topics
from schemas.codec import encode
from schemas.events import DrafterReleased
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.integration.broker import BOOTSTRAP_VARIABLE, free_port, own_broker
from tests.integration.clean_pass import (
    first_wrong_policy,
    first_wrong_row,
    is_archived,
    logged_events,
)
from tests.integration.roles import OPTIONS, TRAINED_STREAM, event, open_log, trainer
from tests.integration.sessions import is_running, sessions_that_end
from tests.learner.trainers import Releases, same

pytestmark = [
    pytest.mark.external_service,
    pytest.mark.skipif(
        "DRAFTLOOP_TEST_FAULTS" not in os.environ,
        reason="takes minutes and is not stable yet: after the last change of the membership the "
        "services did not settle in time; DRAFTLOOP_TEST_FAULTS=30 runs it",
    ),
]

NUM_FAULTS = int(os.environ.get("DRAFTLOOP_TEST_FAULTS", "30"))
SEED = int(os.environ.get("DRAFTLOOP_TEST_SEED", "7"))
NUM_PARTITIONS = 4
NUM_LATE = 10_000
SECONDS_BETWEEN = 0.4
QUIET_SECONDS = 3.0
"""Learners, trainer and archiver have stored what they owe after so long without events."""
MOST_SECONDS = 100.0
STARTED = {"learner": 2, "trainer": 2, "archiver": 1, "worker": 2}
HISTORY_WORKER, COPY_WORKER, CLOCK_WORKER = 101, 102, 103


class Stage:
    """A broker, services in processes, and the means to disturb them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._port = free_port()
        self._broker = ExitStack()
        stack.callback(self._broker.close)
        self.servers = self._broker.enter_context(own_broker(folder, self._port))
        self.log: KafkaEventLog = open_log(self.servers)
        stack.callback(lambda: self.log.close())
        create_topics(self.log, TopicPlan(num_partitions=NUM_PARTITIONS))
        self._server = stack.enter_context(_server(self.servers, folder))
        if BOOTSTRAP_VARIABLE not in os.environ:
            groups = (GROUP, TRAINER_GROUP)
            seconds = OPTIONS.session_timeout_seconds
            stack.enter_context(sessions_that_end(self.servers, groups, seconds))
        self.role_to_ids: dict[str, list[int]] = {role: [] for role in STARTED}
        stack.callback(self.kill_all)
        self._num_started = 0
        self.sequence = 0

    def start(self, role: str) -> None:
        self._num_started += 1
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(f"{role} {self._num_started}\n".encode())
        self.role_to_ids[role].append(int(self._server.stdout.readline()))

    def stop_one(self, role: str, number: int) -> None:
        if self.role_to_ids[role]:
            with suppress(ProcessLookupError):
                os.kill(self.role_to_ids[role].pop(0), number)

    def kill_all(self) -> None:
        for role in self.role_to_ids:
            while self.role_to_ids[role]:
                self.stop_one(role, signal.SIGKILL)

    def restart_broker(self) -> None:
        """Stop it, which takes it away from everybody at once, and start it on its data."""
        self._broker.close()
        time.sleep(SECONDS_BETWEEN)
        self._broker.enter_context(own_broker(self.folder, self._port))

    def append(self, messages: list[Message]) -> None:
        """Append, however long the broker takes to come back."""
        until(lambda: self._is_appended(messages))

    def _is_appended(self, messages: list[Message]) -> bool:
        try:
            self.log.append(VERIFICATION_EVENTS, messages)
        except EventLogError:
            return False
        return True


@contextmanager
def _server(servers: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.integration.roles", servers, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()


def until(condition: Callable[[], bool], seconds: float = MOST_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        time.sleep(0.05)


def messages_of(worker: int, sequences: list[int], clock_step: float = 0.0) -> list[Message]:
    events = [event(worker, n) for n in sequences]
    events = [replace(e, produced_at=e.produced_at + timedelta(seconds=clock_step)) for e in events]
    return [Message(key=e.stream.encode(), value=encode(e)) for e in events]


def kill(role: str) -> Callable[[Stage, np.random.Generator], None]:
    def act(stage: Stage, generator: np.random.Generator) -> None:
        stage.stop_one(role, signal.SIGKILL)
        stage.start(role)

    return act


def join(stage: Stage, generator: np.random.Generator) -> None:
    stage.start("learner")


def leave(stage: Stage, generator: np.random.Generator) -> None:
    stage.stop_one("learner", signal.SIGTERM)
    if not stage.role_to_ids["learner"]:
        stage.start("learner")


def pause(stage: Stage, generator: np.random.Generator) -> None:
    """Stop a learner for longer than its session, so that it wakes as nobody's member."""
    learner = stage.role_to_ids["learner"][0]
    with suppress(ProcessLookupError):
        os.kill(learner, signal.SIGSTOP)
        time.sleep(8.0)
        os.kill(learner, signal.SIGCONT)


def restart_broker(stage: Stage, generator: np.random.Generator) -> None:
    """Take the broker away from readers and members; on the emulated one, not from writers.

    Stopped while it is written to, the emulated broker (0.2.3, SIGTERM) forgets a message that it
    has acknowledged and gives its offset to another one: the log itself changes, and there is
    nothing left that a clean pass could be compared with. So workers end before and begin after.
    Writing through a stop needs a real broker.
    """
    workers = list(stage.role_to_ids["worker"])
    while stage.role_to_ids["worker"]:
        stage.stop_one("worker", signal.SIGTERM)
    until(lambda: not any(is_running(one) for one in workers))
    time.sleep(QUIET_SECONDS)
    stage.restart_broker()
    for _ in workers:
        stage.start("worker")


def duplicate(stage: Stage, generator: np.random.Generator) -> None:
    stage.append(messages_of(HISTORY_WORKER, list(range(stage.sequence, stage.sequence + 20))) * 2)
    stage.sequence += 20


def reorder(stage: Stage, generator: np.random.Generator) -> None:
    order = stage.sequence + generator.permutation(40)
    stage.append(messages_of(HISTORY_WORKER, [int(n) for n in order]))
    stage.sequence += 40


def late(stage: Stage, generator: np.random.Generator) -> None:
    """Deliver again what is ten thousand events old."""
    oldest = stage.sequence - NUM_LATE
    stage.append(messages_of(HISTORY_WORKER, list(range(oldest, oldest + 20))))


def poison(stage: Stage, generator: np.random.Generator) -> None:
    whole = encode(event(COPY_WORKER, 1))
    values = [None, b"", b"\xff", whole[:-9], b"\x00\x00\x00\xff\xff" + whole[5:], whole + b"\x00"]
    stage.append([Message(key=b"stream-1", value=value) for value in values])


def step_clock(stage: Stage, generator: np.random.Generator) -> None:
    """A worker's clock jumps a day ahead and an hour back."""
    for seconds in (86_400.0, -3_600.0):
        sequences = list(range(stage.sequence, stage.sequence + 10))
        stage.append(messages_of(CLOCK_WORKER, sequences, seconds))
        stage.sequence += 10


def fill_disk(stage: Stage, generator: np.random.Generator) -> None:
    """Take all space of the archive's small disk for a while."""
    filler = stage.folder / "archive" / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(65536)):
            pass
    stage.append(messages_of(HISTORY_WORKER, list(range(stage.sequence, stage.sequence + 200))))
    stage.sequence += 200
    time.sleep(1.0)
    filler.unlink()


NAME_TO_FAULT: dict[str, Callable[[Stage, np.random.Generator], None]] = {
    "kill learner": kill("learner"),
    "kill trainer": kill("trainer"),
    "kill archiver": kill("archiver"),
    "kill worker": kill("worker"),
    "learner joins": join,
    "learner leaves": leave,
    "learner is paused": pause,
    "broker restarts": restart_broker,
    "duplicates": duplicate,
    "reordering": reorder,
    "late by 10,000": late,
    "poison": poison,
    "clock steps": step_clock,
    "disk full": fill_disk,
}
RARE = {"learner is paused": 1, "broker restarts": 2, "disk full": 2}
"""Those that take long are drawn so often in thirty; the others share the rest."""


def drawn_faults(generator: np.random.Generator) -> list[str]:
    """Return the faults in their order: each kind at least once."""
    names = [name for name in NAME_TO_FAULT for _ in range(RARE.get(name, 1))]
    often = [name for name in NAME_TO_FAULT if name not in RARE]
    names += [often[int(i)] for i in generator.integers(0, len(often), NUM_FAULTS - len(names))]
    return [names[int(i)] for i in generator.permutation(len(names))]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        disk = tmp_path / "archive"
        disk.mkdir()
        stack.enter_context(_small_disk(disk))
        yield Stage(tmp_path, stack)


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """Make the archive's folder a small disk, where this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    if not is_mounted:
        # Filling the real one is no test.
        NAME_TO_FAULT.pop("disk full", None)
    yield
    if is_mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.timeout(0)
def test_policies_releases_and_rows_after_thirty_faults_equal_those_of_a_clean_pass(
    stage: Stage,
) -> None:
    generator = np.random.default_rng(SEED)
    for start in range(1, NUM_LATE + 1, 500):
        stage.append(messages_of(HISTORY_WORKER, list(range(start, start + 500))))
    stage.sequence = NUM_LATE + 1
    for role, count in STARTED.items():
        for _ in range(count):
            stage.start(role)
    faults = drawn_faults(generator)
    for name in faults:
        NAME_TO_FAULT[name](stage, generator)
        time.sleep(SECONDS_BETWEEN * generator.uniform(0.5, 1.5))
    _let_everything_settle(stage)

    events = logged_events(stage.log)
    print(f"seed {SEED}, {len(events)} events, faults {dict(Counter(faults))}")  # noqa: T201
    assert len(faults) >= 30
    assert first_wrong_policy(stage.log, events) is None
    assert first_wrong_row(stage.folder / "archive", events) is None
    _assert_dead_letters_are_complete(stage, len(events))
    _assert_releases_are_those_of_a_clean_pass(stage)


def _let_everything_settle(stage: Stage) -> None:
    while stage.role_to_ids["worker"]:
        stage.stop_one("worker", signal.SIGTERM)
    time.sleep(6.0)  # the workers send what is queued
    # Behind the last event there may be dead letters, over which no position is committed.
    ends = {row.partition: row.offset + 1 for row in logged_events(stage.log)}
    until(lambda: {p: _committed(stage, p) for p in range(NUM_PARTITIONS)} == ends)
    until(lambda: is_archived(stage.log, stage.folder / "archive"))
    until(lambda: _latest_release(stage).training_window.partition_to_offset == _trained(stage))
    for role in ("learner", "trainer", "archiver"):
        while stage.role_to_ids[role]:
            stage.stop_one(role, signal.SIGTERM)


def _committed(stage: Stage, partition: int) -> int | None:
    with suppress(EventLogError):
        return stage.log.committed(GROUP, VERIFICATION_EVENTS, partition)
    return None


def _latest_release(stage: Stage) -> DrafterReleased:
    (release,) = LogReleaseBoard(stage.log, source="test").read_all()
    return release


def _assert_dead_letters_are_complete(stage: Stage, num_events: int) -> None:
    """Every message is an event or, once, a dead letter."""
    ends = [stage.log.end_offset(VERIFICATION_EVENTS, p) for p in range(NUM_PARTITIONS)]
    letters = stage.log.read(DEAD_LETTERS, 0, 0, max_messages=10_000)
    places = {
        tuple(stored.message.headers[name] for name in ("topic", "partition", "offset"))
        for stored in letters
    }
    assert len(places) == sum(ends) - num_events


def _clean_trainer(stage: Stage) -> tuple[Releases, Path]:
    board, folder = Releases(), stage.folder / "clean"
    online = trainer(stage.log, board, folder)  # type: ignore[arg-type]
    for row in logged_events(stage.log):
        online.train(row)
    return board, folder


def _trained(stage: Stage) -> dict[int, int]:
    return dict(_clean_trainer_of(stage)[0].all_releases()[-1].training_window.partition_to_offset)


_stage_to_clean: dict[int, tuple[Releases, Path]] = {}


def _clean_trainer_of(stage: Stage) -> tuple[Releases, Path]:
    """Train cleanly once per stage."""
    if id(stage) not in _stage_to_clean:
        _stage_to_clean[id(stage)] = _clean_trainer(stage)
    return _stage_to_clean[id(stage)]


def _assert_releases_are_those_of_a_clean_pass(stage: Stage) -> None:
    """The last weights are the same bit for bit; numbers may have gaps where a trainer died."""
    board, folder = _clean_trainer_of(stage)
    expected, found = board.all_releases()[-1], _latest_release(stage)
    states = [
        DrafterRegistry(str(place)).read_training_state(
            one.artifact_uri, manifest_sha256=one.manifest_sha256
        )
        for place, one in ((folder, expected), (stage.folder / "data", found))
    ]
    assert same(*states), f"weights after {TRAINED_STREAM} differ: {expected} and {found}"
