"""The declared topics, over both logs: made once, compared, refused with both values."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.eventlog.opening import open_event_log
from pipeline.eventlog.ports import EventLog, TopicMismatchError, TopicSpec
from pipeline.messaging.topics import (
    TopicPlan,
    check_topics,
    create_topics,
    description,
    refuse_apart,
)
from schemas.topics import DEAD_LETTERS, DRAFTER_RELEASES, POLICIES, VERIFICATION_EVENTS
from tests.integration.broker import blank_broker, kafka_admin, kafka_log

PLAN = TopicPlan(num_partitions=3, retention_days=2)


@pytest.fixture(
    params=["embedded", pytest.param("kafka", marks=pytest.mark.external_service)],
)
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    if request.param == "embedded":
        with closing(open_event_log(str(tmp_path))) as opened:
            yield opened
    else:
        # A broker of its own: the declared names may be taken on a shared one.
        with blank_broker(tmp_path) as servers:
            log = kafka_log(servers)
            yield log
            log.close()


def test_topics_are_made_as_declared_and_making_them_again_changes_nothing(log: EventLog) -> None:
    assert len(check_topics(log, PLAN)) == len(PLAN.declared()) == 4
    for _ in range(2):
        create_topics(log, PLAN)
        assert check_topics(log, PLAN) == []
    assert log.num_partitions(POLICIES) == log.num_partitions(VERIFICATION_EVENTS) == 3
    assert log.num_partitions(DRAFTER_RELEASES) == 1


def test_every_difference_is_a_line_with_both_values(log: EventLog) -> None:
    create_topics(log, PLAN)
    lines = check_topics(log, TopicPlan(num_partitions=5, retention_days=2))
    assert f"topic {VERIFICATION_EVENTS}: partitions is 3, declared 5" in lines
    assert f"topic {POLICIES}: partitions is 3, declared 5" in lines
    assert len(lines) == 2


def test_the_description_tells_shape_and_size(log: EventLog) -> None:
    create_topics(log, PLAN)
    rows = {row["topic"]: row for row in description(log, PLAN)}
    assert list(rows) == [VERIFICATION_EVENTS, POLICIES, DRAFTER_RELEASES, DEAD_LETTERS]
    assert rows[POLICIES]["cleanup"] == "compact"
    assert rows[VERIFICATION_EVENTS]["partitions"] == "3"
    assert {row["offsets"] for row in rows.values()} == {"0"}


def test_invalid_events_and_policies_with_other_partition_counts_are_refused_with_both(
    log: EventLog,
) -> None:
    log.create_topic(TopicSpec(name=VERIFICATION_EVENTS, num_partitions=6))
    log.create_topic(TopicSpec(name=POLICIES, num_partitions=4, is_compacted=True))
    with pytest.raises(TopicMismatchError, match="have 6 and 4 partitions"):
        refuse_apart(log)
    with pytest.raises(TopicMismatchError, match=r"num_partitions=4.*num_partitions=6"):
        create_topics(log, TopicPlan(num_partitions=6))


def test_invalid_policies_that_are_not_compacted_are_refused(log: EventLog) -> None:
    log.create_topic(TopicSpec(name=POLICIES, num_partitions=3))
    with pytest.raises(TopicMismatchError, match=r"is_compacted=False.*is_compacted=True"):
        create_topics(log, PLAN)
    assert any("cleanup policy is delete, declared compact" in x for x in check_topics(log, PLAN))


@pytest.mark.external_service
def test_the_broker_keeps_what_the_declaration_says(bootstrap_servers: str) -> None:
    name = f"declared-{uuid.uuid4().hex}"
    events = PLAN.declared()[0]
    spec = TopicSpec(name=name, num_partitions=1, configs=events.configs)
    with closing(kafka_log(bootstrap_servers)) as log:
        log.create_topic(spec)
        found = log.describe_topic(name)
    assert {k: found.configs.get(k) for k in events.configs} == dict(events.configs)
    assert found.configs["retention.ms"] == str(2 * 24 * 3600 * 1000)
    admin = kafka_admin(bootstrap_servers)
    admin.delete_topics([name])
    admin.close()
