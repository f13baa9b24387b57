"""A learner that is killed again and again ends with the policies of one that never was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.ports import PolicyBoard
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import EventLog, Message
from pipeline.messaging.boards import LogPolicyBoard
from schemas.codec import encode
from schemas.equality import first_difference
from schemas.events import PolicyPublished, VerificationEvent
from schemas.topics import POLICIES
from tests.integration.killing import (
    ForkServer,
    embedded_log,
    events_flowing,
    fork_server,
    kill_amid_work,
    kill_and_wait,
)
from tests.integration.learn import make_learner
from tests.learner.fakes import FakePolicyBoard
from tests.schemas.builders import PRODUCED_AT, make_drafters, make_event

NUM_KILLS = 20
NUM_PARTITIONS = 2
NUM_STREAMS = 5
MOST_PUBLICATIONS_ALIVE = 3
MOST_SECONDS_BEYOND = 0.03
COPY_EVERY = 7
UNDECODABLE_EVERY = 17


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedEventLog]:
    with embedded_log(tmp_path / "log.sqlite", NUM_PARTITIONS) as log:
        yield log


def test_policies_after_twenty_kills_equal_those_of_an_undisturbed_run(
    log: EmbeddedEventLog, tmp_path: Path
) -> None:
    generator = np.random.default_rng(7)
    learn = fork_server("tests.integration.learn", tmp_path / "log.sqlite")
    with events_flowing(log, _messages), learn as learners:
        for _ in range(NUM_KILLS):
            _learn_and_kill(learners, log, generator)
    killed = _learn_the_rest(log, LogPolicyBoard(log, source="killed"), group="killed")
    expected = _learn_the_rest(log, FakePolicyBoard(), group="undisturbed")

    assert len(expected) == NUM_STREAMS
    assert set(killed) == set(expected)
    assert sum(policy.version for policy in expected.values()) > NUM_KILLS
    for stream, policy in killed.items():
        assert first_difference(policy, expected[stream]) is None


def _messages(sequence: int) -> list[Message]:
    """Return an event or something undecodable, and now and then a copy of an earlier event."""
    event = _event(sequence)
    value = encode(event) if sequence % UNDECODABLE_EVERY else b"no event"
    messages = [Message(key=event.stream.encode(), value=value)]
    if sequence % COPY_EVERY == 0 and sequence:
        copy = _event(sequence // 2)
        messages.append(Message(key=copy.stream.encode(), value=encode(copy)))
    return messages


def _event(sequence: int) -> VerificationEvent:
    """Build the event of a sequence; the pool changes as it grows."""
    pool = make_drafters(5)[sequence // 50 % 3 :][:3]
    return make_event(
        sequence=sequence, stream=f"stream-{sequence % NUM_STREAMS}", num_windows=3, drafters=pool
    )


def _learn_and_kill(learners: ForkServer, log: EventLog, generator: np.random.Generator) -> None:
    process_id = learners.start(str(generator.integers(1, 8)))
    wanted = _num_policies(log) + int(generator.integers(0, MOST_PUBLICATIONS_ALIVE + 1))
    kill_amid_work(
        lambda: kill_and_wait(process_id),
        lambda: _num_policies(log) >= wanted,
        generator,
        most_seconds_beyond=MOST_SECONDS_BEYOND,
    )


def _num_policies(log: EventLog) -> int:
    return sum(log.end_offset(POLICIES, p) for p in range(log.num_partitions(POLICIES)))


def _learn_the_rest(log: EventLog, board: PolicyBoard, *, group: str) -> dict[str, PolicyPublished]:
    """Learn what is left and return the newest policies, times set equal."""
    learner, source = make_learner(log, publish_every_events=50, board=board, group=group)
    learner.run(lambda: source.is_drained)
    return {policy.stream: replace(policy, produced_at=PRODUCED_AT) for policy in board.read_all()}
