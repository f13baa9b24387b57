"""A member whose owner takes long over a step: it stays one, until the owner must be dead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.eventlog.kafka_clients import KafkaClients, KafkaOptions
from pipeline.eventlog.kafka_membership import ChangeKind, KafkaMembership
from pipeline.kafka_options import kafka_options
from pipeline.topics import TopicPlan, create_topics
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.broker import blank_broker, kafka_log, kafka_settings

pytestmark = pytest.mark.external_service

GROUP = "draftloop.long-steps"
NUM_PARTITIONS = 2
POLL_SECONDS = 1.0
STEP_SECONDS = 2.5
MOST_SECONDS = 60.0


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


def test_an_owner_that_must_be_dead_loses_its_partitions_to_the_others(servers: str) -> None:
    """D3: the membership's thread alone must not hold them for ever."""
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
            kinds = [change.kind for change in silent.take_changes()]
            assert kinds[0] is ChangeKind.ASSIGNED
            assert set(kinds[1:]) <= {ChangeKind.LOST, ChangeKind.REVOKED, ChangeKind.ASSIGNED}
            assert ChangeKind.LOST in kinds
