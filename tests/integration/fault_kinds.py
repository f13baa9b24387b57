"""The faults of the fault run, and in which order they happen."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta

import numpy as np

from pipeline.eventlog.ports import Message
from schemas.codec import encode
from tests.integration.roles import OPTIONS, event
from tests.integration.stage import Stage

HISTORY_WORKER, COPY_WORKER, CLOCK_WORKER = 101, 102, 103
FULL_SECONDS = 1.0

Fault = Callable[[Stage, np.random.Generator], None]


def messages_of(worker: int, sequences: list[int], clock_step: float = 0.0) -> list[Message]:
    """Return events as a worker sends them whose clock is ``clock_step`` seconds off."""
    events = [event(worker, n) for n in sequences]
    events = [replace(e, produced_at=e.produced_at + timedelta(seconds=clock_step)) for e in events]
    return [Message(key=e.stream.encode(), value=encode(e)) for e in events]


def kill(role: str) -> Fault:
    """Return the fault that kills the oldest service of a role; another one is started."""

    def act(stage: Stage, generator: np.random.Generator) -> None:
        stage.end(stage.ids(role)[0], signal.SIGKILL)
        stage.start(role)

    return act


def learner_joins(stage: Stage, generator: np.random.Generator) -> None:
    stage.start("learner")


def learner_leaves(stage: Stage, generator: np.random.Generator) -> None:
    stage.end(stage.ids("learner")[0], signal.SIGTERM)
    if not stage.ids("learner"):
        stage.start("learner")


def stands_still(role: str) -> Fault:
    """Return the fault that stops a service beyond its session: it wakes as nobody's member."""

    def act(stage: Stage, generator: np.random.Generator) -> None:
        stage.stand_still(role, OPTIONS.session_timeout_seconds + 2.0)

    return act


def broker_restarts(stage: Stage, generator: np.random.Generator) -> None:
    stage.restart_broker()


def duplicates(stage: Stage, generator: np.random.Generator) -> None:
    stage.append(messages_of(HISTORY_WORKER, _next(stage, 20)) * 2)


def reordering(stage: Stage, generator: np.random.Generator) -> None:
    sequences = _next(stage, 40)
    stage.append(messages_of(HISTORY_WORKER, [sequences[i] for i in generator.permutation(40)]))


def late(num_events: int) -> Fault:
    """Return the fault that delivers again what is ``num_events`` events old."""

    def act(stage: Stage, generator: np.random.Generator) -> None:
        oldest = stage.sequence - num_events
        stage.append(messages_of(HISTORY_WORKER, list(range(oldest, oldest + 20))))

    return act


def poison(stage: Stage, generator: np.random.Generator) -> None:
    whole = encode(event(COPY_WORKER, 1))
    values = [None, b"", b"\xff", whole[:-9], b"\x00\x00\x00\xff\xff" + whole[5:], whole + b"\x00"]
    stage.append([Message(key=b"stream-1", value=value) for value in values])


def clock_steps(stage: Stage, generator: np.random.Generator) -> None:
    """A worker's clock jumps a day ahead and an hour back."""
    for seconds in (86_400.0, -3_600.0):
        stage.append(messages_of(CLOCK_WORKER, _next(stage, 10), seconds))


def disk_full(stage: Stage, generator: np.random.Generator) -> None:
    """Leave the archiver no space for a while."""
    with _filled(stage) if stage.has_small_disk else _limited(stage.ids("archiver")[0]):
        stage.append(messages_of(HISTORY_WORKER, _next(stage, 200)))
        time.sleep(FULL_SECONDS)


@contextmanager
def _filled(stage: Stage) -> Iterator[None]:
    """Take all space of the archive's small disk."""
    filler = stage.folder / "archive" / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(65536)):
            pass
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def _limited(process_id: int) -> Iterator[None]:
    """Forbid a process to make any file longer, where no small disk may be mounted."""
    _, hard = resource.prlimit(process_id, resource.RLIMIT_FSIZE)
    resource.prlimit(process_id, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(process_id, resource.RLIMIT_FSIZE, (hard, hard))


def _next(stage: Stage, count: int) -> list[int]:
    first, stage.sequence = stage.sequence, stage.sequence + count
    return list(range(first, first + count))


def fault_kinds(num_late: int) -> dict[str, Fault]:
    """Return all kinds by name."""
    return {
        "kill learner": kill("learner"),
        "kill trainer": kill("trainer"),
        "kill archiver": kill("archiver"),
        "kill worker": kill("worker"),
        "learner joins": learner_joins,
        "learner leaves": learner_leaves,
        "learner stands still": stands_still("learner"),
        "trainer stands still": stands_still("trainer"),
        "broker restarts": broker_restarts,
        "duplicates": duplicates,
        "reordering": reordering,
        f"late by {num_late}": late(num_late),
        "poison": poison,
        "clock steps": clock_steps,
        "disk full": disk_full,
    }


SLOW = {
    "learner stands still": 1,
    "trainer stands still": 1,
    "broker restarts": 3,
    "disk full": 2,
}
"""Those that take long, and how often they are drawn in a long run."""


def drawn_faults(names: list[str], num_faults: int, generator: np.random.Generator) -> list[str]:
    """Return faults in a random order: each kind at least once, and as many as asked for.

    Those that stand still for longer than a session are left to the long runs.
    """
    if num_faults <= len(names):
        drawn = [name for name in names if not name.endswith("stands still")]
    else:
        drawn = [name for name in names for _ in range(SLOW.get(name, 1))]
        often = [name for name in names if name not in SLOW]
        num_more = num_faults - len(drawn)
        drawn += [often[int(i)] for i in generator.integers(0, len(often), num_more)]
    return [drawn[int(i)] for i in generator.permutation(len(drawn))]
