"""Learners that share partitions: together they know what one would, whoever comes and goes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from learner.service import LearnerSettings, PolicyLearner
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.eventlog.ports import EventLog, EventLogError, Message
from pipeline.messaging.boards import LogEventSource, LogPolicyBoard
from pipeline.messaging.group_source import GROUP, GroupEventSource
from pipeline.messaging.topics import TopicPlan, create_topics
from schemas.codec import encode
from schemas.equality import first_difference
from schemas.events import PolicyPublished
from schemas.topics import DEAD_LETTERS, POLICIES, VERIFICATION_EVENTS
from tests.integration.broker import BOOTSTRAP_VARIABLE, blank_broker, kafka_log
from tests.integration.sessions import sessions_that_end
from tests.learner.fakes import FakePolicyBoard
from tests.schemas.builders import PRODUCED_AT, make_event, make_policy

pytestmark = pytest.mark.external_service

NUM_PARTITIONS = 6
NUM_STREAMS = 24
SESSION_SECONDS = 6.0
MOST_SECONDS = 120.0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[str]:
    """A broker of its own: the topics and the group have fixed names."""
    with blank_broker(tmp_path) as started:
        with closing(open_log(started)) as log:
            create_topics(log, TopicPlan(num_partitions=NUM_PARTITIONS))
        if BOOTSTRAP_VARIABLE in os.environ:
            yield started
            return
        with sessions_that_end(started, [GROUP], 2 * SESSION_SECONDS, are_processes=False):
            yield started


def open_log(servers: str) -> KafkaEventLog:
    options = KafkaOptions(timeout_seconds=5.0, session_timeout_seconds=SESSION_SECONDS)
    return kafka_log(servers, options)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {MOST_SECONDS} s in vain"
        time.sleep(0.02)


def append(log: EventLog, sequences: range) -> None:
    events = [
        make_event(num_windows=2, sequence=n, stream=f"stream-{n % NUM_STREAMS}") for n in sequences
    ]
    log.append(
        VERIFICATION_EVENTS, [Message(key=e.stream.encode(), value=encode(e)) for e in events]
    )


class Member:
    """One learner of the group in a thread of its own."""

    def __init__(self, servers: str, name: str) -> None:
        self.log = open_log(servers)
        self.source = GroupEventSource(self.log)
        self.learner = PolicyLearner(
            self.source,
            LogPolicyBoard(self.log, source=name),
            LearnerSettings(learner_id="group", publish_every_events=7, poll_seconds=0.05),
            now=lambda: datetime.now(UTC),
        )
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.learner.run, args=(self.stop.is_set,))
        self.thread.start()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(MOST_SECONDS)
        self.source.close()
        self.log.close()


@contextmanager
def member(servers: str, name: str) -> Iterator[Member]:
    with closing(Member(servers, name)) as joined:
        yield joined


def published(log: EventLog) -> dict[str, PolicyPublished]:
    policies = LogPolicyBoard(log, source="test").read_all()
    return {p.stream: replace(p, produced_at=PRODUCED_AT) for p in policies}


def num_contained(log: EventLog) -> int:
    return sum(policy.version for policy in published(log).values())


def learned_alone(log: EventLog) -> dict[str, PolicyPublished]:
    """Return what one learner that was never disturbed makes of the same log."""
    board = FakePolicyBoard()
    source = LogEventSource(log, range(NUM_PARTITIONS), group="alone")
    learner = PolicyLearner(
        source, board, LearnerSettings(learner_id="group"), now=lambda: PRODUCED_AT
    )
    learner.resume()
    while events := source.poll(0.5):
        for received in events:
            learner.learn_one(received)
    learner.publish()
    return {policy.stream: policy for policy in board.read_all()}


def assert_equal_states(found: dict[str, PolicyPublished], log: EventLog) -> None:
    expected = learned_alone(log)
    assert found.keys() == expected.keys()
    for stream, policy in expected.items():
        assert first_difference(found[stream], policy) is None, stream


def test_learners_that_join_and_leave_know_together_what_one_would(servers: str) -> None:
    with closing(open_log(servers)) as log, ExitStack() as rest:
        append(log, range(200))
        with member(servers, "first") as first:
            wait_until(lambda: len(first.source.partitions) == NUM_PARTITIONS)
            second = rest.enter_context(member(servers, "second"))
            third = rest.enter_context(member(servers, "third"))
            append(log, range(200, 400))
            members = (first, second, third)
            wait_until(lambda: all(len(m.source.partitions) == 2 for m in members))
            owned = [p for m in members for p in m.source.partitions]
            assert sorted(owned) == list(range(NUM_PARTITIONS))
            append(log, range(400, 600))
        append(log, range(600, 700))
        wait_until(lambda: num_contained(log) == 700)
        assert_equal_states(published(log), log)


def test_a_member_lets_go_of_the_streams_of_the_partitions_it_gives_away(servers: str) -> None:
    with closing(open_log(servers)) as log, member(servers, "first") as first:
        append(log, range(120))
        wait_until(lambda: num_contained(log) == 120)
        assert len(first.learner.stream_to_state) == NUM_STREAMS
        with member(servers, "second") as second:
            wait_until(lambda: len(second.source.partitions) == 3)
            append(log, range(120, 240))
            wait_until(lambda: num_contained(log) == 240)
            states = [m.learner.stream_to_state for m in (first, second)]
            # A rebalance may be under way: a partition between two owners is in neither's state.
            wait_until(lambda: sum(map(len, states)) == NUM_STREAMS)
            assert set(states[0]).isdisjoint(states[1])


def test_a_member_that_was_taken_for_dead_publishes_nothing_more(servers: str) -> None:
    """Its thread goes on after its session ended, as a process does that was stopped for long."""
    with closing(open_log(servers)) as log, closing(open_log(servers)) as old:
        append(log, range(50))
        source = GroupEventSource(old)
        learner = PolicyLearner(
            source,
            LogPolicyBoard(old, source="zombie"),
            LearnerSettings(learner_id="zombie", publish_every_events=10_000),
            now=lambda: PRODUCED_AT,
        )
        source.listen(learner)
        learned = 0
        while learned < 50:
            for received in source.poll(0.1):
                learner.learn_one(received)
                learned += 1
        # The membership ends behind the learner's back.
        source._member.close()
        assert not source.is_owner()
        with member(servers, "heir"):
            wait_until(lambda: num_contained(log) == 50)
            learner.publish()
            assert {p.learner_id for p in published(log).values()} == {"group"}
        source.close()


def test_an_older_state_behind_a_newer_one_is_passed_over(servers: str) -> None:
    """What slipped through between the check and the write cannot take the state back."""
    with closing(open_log(servers)) as log:
        board = LogPolicyBoard(log, source="test")
        board.publish([make_policy(stream="s", version=9)])
        board.publish([make_policy(stream="s", version=5)])
        assert [policy.version for policy in board.read_all()] == [9]
        (place,) = log.append(POLICIES, [Message(key=b"s", value=None)])
        assert board.read_all([place[0]]) == []
        board.publish([make_policy(stream="s", version=1)])
        assert [policy.version for policy in board.read_all()] == [1]


def test_invalid_session_time_is_refused_in_one_line_with_the_cure(servers: str) -> None:
    options = KafkaOptions(timeout_seconds=5.0, session_timeout_seconds=1.0)
    refusal = pytest.raises(EventLogError, match=r"kafka\.session_timeout_seconds")
    log = kafka_log(servers, options)
    with closing(log), closing(GroupEventSource(log)) as source, refusal:
        wait_until(lambda: bool(source.poll(0.05)))


def test_poison_messages_do_not_hold_up_a_group(servers: str) -> None:
    whole = encode(make_event(sequence=1, stream="stream-1"))
    poison = [None, b"", b"\xff", whole[:-3], b"\x00\x00\x00\xff\xff" + whole[5:], whole + b"x"]
    with closing(open_log(servers)) as log, member(servers, "only") as only:
        messages = [Message(key=b"stream-1", value=value) for value in poison]
        log.append(VERIFICATION_EVENTS, [*messages, Message(key=b"another", value=whole)])
        append(log, range(10))
        wait_until(lambda: num_contained(log) == 10)
        assert only.source.num_dead_letters == len(poison) + 1
        letters = log.read(DEAD_LETTERS, 0, 0)
        assert len(letters) == len(poison) + 1
        assert {stored.message.headers["topic"] for stored in letters} == {
            VERIFICATION_EVENTS.encode()
        }
        (misplaced,) = [s for s in letters if s.message.key == b"another"]
        assert misplaced.message.value == whole
        assert b"key" in misplaced.message.headers["reason"]
