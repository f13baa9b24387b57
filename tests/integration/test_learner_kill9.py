"""A learner that is killed again and again ends with the policies of one that never was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.ports import PolicyBoard
from pipeline.boards import LogPolicyBoard
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLog, Message
from schemas.codec import encode
from schemas.equality import first_difference
from schemas.events import PolicyPublished, VerificationEvent
from schemas.topics import POLICIES, VERIFICATION_EVENTS
from tests.integration.learn import make_learner
from tests.learner.fakes import FakePolicyBoard
from tests.schemas.builders import PRODUCED_AT, make_drafters, make_event

NUM_KILLS = 20
NUM_PARTITIONS = 2
NUM_STREAMS = 5
MOST_PUBLICATIONS_ALIVE = 3
MOST_SECONDS_BEYOND = 0.03
MOST_SECONDS_WAITING = 60.0
COPY_EVERY = 7
UNDECODABLE_EVERY = 17


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedEventLog]:
    log = EmbeddedEventLog(tmp_path / "log.sqlite")
    for spec in declared_topics(NUM_PARTITIONS):
        log.create_topic(spec)
    yield log
    log.close()


def test_policies_after_twenty_kills_equal_those_of_an_undisturbed_run(
    log: EmbeddedEventLog, tmp_path: Path
) -> None:
    generator = np.random.default_rng(7)
    with _events_flowing(log), _learners(tmp_path / "log.sqlite") as learners:
        for _ in range(NUM_KILLS):
            _learn_and_kill(learners, log, generator)
    killed = _learn_the_rest(log, LogPolicyBoard(log, source="killed"), group="killed")
    expected = _learn_the_rest(log, FakePolicyBoard(), group="undisturbed")

    assert len(expected) == NUM_STREAMS
    assert set(killed) == set(expected)
    assert sum(policy.version for policy in expected.values()) > NUM_KILLS
    for stream, policy in killed.items():
        assert first_difference(policy, expected[stream]) is None


@contextmanager
def _events_flowing(log: EmbeddedEventLog) -> Iterator[None]:
    """Append events, copies of earlier ones and undecodable ones until the block ends."""
    stop = threading.Event()

    def append() -> None:
        sequence = 0
        while not stop.wait(0.01):
            event = _event(sequence)
            value = encode(event) if sequence % UNDECODABLE_EVERY else b"no event"
            messages = [Message(key=event.stream.encode(), value=value)]
            if sequence % COPY_EVERY == 0 and sequence:
                copy = _event(sequence // 2)
                messages.append(Message(key=copy.stream.encode(), value=encode(copy)))
            log.append(VERIFICATION_EVENTS, messages)
            sequence += 1

    thread = threading.Thread(target=append)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _event(sequence: int) -> VerificationEvent:
    """Build the event of a sequence; the pool changes as it grows."""
    pool = make_drafters(5)[sequence // 50 % 3 :][:3]
    return make_event(
        sequence=sequence, stream=f"stream-{sequence % NUM_STREAMS}", num_windows=3, drafters=pool
    )


@contextmanager
def _learners(log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start learners on demand; none is left when the block has ended."""
    command = [sys.executable, "-m", "tests.integration.learn", str(log_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0) as process:
        yield process


def _learn_and_kill(
    learners: subprocess.Popen[bytes], log: EventLog, generator: np.random.Generator
) -> None:
    assert learners.stdin is not None
    assert learners.stdout is not None
    learners.stdin.write(b"%d\n" % generator.integers(1, 8))
    process_id = int(learners.stdout.readline())
    try:
        _await_publications(log, int(generator.integers(0, MOST_PUBLICATIONS_ALIVE + 1)))
        time.sleep(generator.uniform(0.0, MOST_SECONDS_BEYOND))
    finally:
        os.kill(process_id, signal.SIGKILL)


def _await_publications(log: EventLog, count: int) -> None:
    """Wait for new policies, so that the kill meets a working learner on a slow machine too."""
    num_wanted = _num_policies(log) + count
    deadline = time.monotonic() + MOST_SECONDS_WAITING
    while _num_policies(log) < num_wanted:
        assert time.monotonic() < deadline, f"no {count} policies in {MOST_SECONDS_WAITING} s"
        time.sleep(0.002)


def _num_policies(log: EventLog) -> int:
    return sum(log.end_offset(POLICIES, p) for p in range(log.num_partitions(POLICIES)))


def _learn_the_rest(log: EventLog, board: PolicyBoard, *, group: str) -> dict[str, PolicyPublished]:
    """Learn what is left and return the newest policies, times set equal."""
    learner, source = make_learner(log, publish_every_events=50, board=board, group=group)
    learner.run(lambda: source.is_drained)
    return {policy.stream: replace(policy, produced_at=PRODUCED_AT) for policy in board.read_all()}
