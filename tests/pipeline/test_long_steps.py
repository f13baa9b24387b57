"""A member whose owner takes long over a step: it stays one, until the owner must be dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaClients, KafkaOptions
from pipeline.eventlog.kafka_membership import ChangeKind, KafkaMembership
from pipeline.local_broker import local_broker
from pipeline.messaging.kafka_options import kafka_options
from pipeline.messaging.topics import TopicPlan, create_topics
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.broker import blank_broker, kafka_log, kafka_settings
from tests.integration.broker_proxy import slow_proxy

pytestmark = pytest.mark.external_service

GROUP = "draftloop.long-steps"
NUM_PARTITIONS = 2
POLL_SECONDS = 1.0
STEP_SECONDS = 2.5
MOST_SECONDS = 60.0
"""The broker of the tests leaves a joining unanswered now and then; it is repeated."""


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[str]:
    with blank_broker(tmp_path) as started:
        with closing(kafka_log(started)) as log:
            create_topics(log, TopicPlan(num_partitions=NUM_PARTITIONS))
        yield started


def member(servers: str, *, most_silent_seconds: float = 300.0) -> KafkaMembership:
    """Return a member whose client leaves its group unless it is polled every second."""
    security = dict(kafka_options(kafka_settings(servers)).security)
    options = KafkaOptions(
        session_timeout_seconds=6.0,
        security={**security, "max_poll_interval_ms": round(1000 * POLL_SECONDS)},
    )
    clients = KafkaClients(servers.split(","), options)
    return KafkaMembership(
        lambda assignor: clients.member(GROUP, assignor),
        VERIFICATION_EVENTS,
        session_timeout_seconds=6.0,
        most_silent_seconds=most_silent_seconds,
    )


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {MOST_SECONDS:.0f} s in vain"
        time.sleep(0.02)


def test_a_step_longer_than_the_poll_interval_costs_no_partition(servers: str) -> None:
    """D3: of two members, the one that is busy keeps what it has."""
    with closing(member(servers)) as busy, closing(member(servers)) as other:
        busy.start()
        other.start()

        def is_shared() -> bool:
            for one in (busy, other):
                for change in one.take_changes():
                    change.done.set()
            return len(busy.owned) == len(other.owned) == NUM_PARTITIONS // 2

        until(is_shared)
        busy.commit(min(busy.owned), 0)
        owned, num_rebalances = busy.owned, busy.num_rebalances
        began = time.monotonic()
        while time.monotonic() - began < STEP_SECONDS:
            assert other.take_changes() == []
            time.sleep(0.05)
        assert (busy.owned, busy.num_rebalances) == (owned, num_rebalances)
        assert busy.take_changes() == []
        assert busy.is_confirmed(MOST_SECONDS)


def test_an_owner_that_must_be_dead_loses_its_partitions_until_it_asks_again(servers: str) -> None:
    """D3: the membership's thread alone must not hold them, nor take them back for nobody."""
    with closing(member(servers, most_silent_seconds=POLL_SECONDS)) as silent:
        silent.start()
        until(lambda: len(silent.owned) == NUM_PARTITIONS)
        with closing(member(servers)) as other:
            other.start()

            def has_everything() -> bool:
                for change in other.take_changes():
                    change.done.set()
                return len(other.owned) == NUM_PARTITIONS

            until(has_everything)
            time.sleep(2 * POLL_SECONDS)
            assert has_everything()
            kinds = [change.kind for change in silent.take_changes()]
            assert kinds == [ChangeKind.ASSIGNED, ChangeKind.LOST]

            def is_shared() -> bool:
                silent.take_changes()
                return not has_everything() and len(silent.owned) == NUM_PARTITIONS // 2

            until(is_shared)


def test_a_join_that_nobody_answers_is_asked_again(tmp_path: Path) -> None:
    options = KafkaOptions(timeout_seconds=5.0, session_timeout_seconds=6.0)
    with local_broker(tmp_path) as broker, slow_proxy(broker) as proxy:
        with closing(KafkaEventLog([proxy.servers], options)) as log:
            create_topics(log, TopicPlan(num_partitions=NUM_PARTITIONS))
            proxy.num_joins_to_lose = 1
            with closing(log.member(VERIFICATION_EVENTS, GROUP)) as one:
                one.start()
                until(lambda: len(one.owned) == NUM_PARTITIONS)
        assert proxy.num_joins_to_lose == 0
