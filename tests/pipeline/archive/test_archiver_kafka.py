"""The archiver over a Kafka broker."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from kafka import TopicPartition

from pipeline.archive.archiver import Archiver
from pipeline.archive.log_files import log_files
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.ports import Message, TopicSpec
from pipeline.messaging.dead_letters import DeadLetter
from replay.reader import LogReader
from schemas.codec import encode
from tests.integration.broker import kafka_admin, kafka_log
from tests.schemas.builders import make_event

pytestmark = pytest.mark.external_service


class Letters:
    """Dead letters in memory, so that the test leaves no mark in a shared broker's topic."""

    def __init__(self) -> None:
        self.offsets: list[int] = []

    def set_aside(self, letters: Sequence[DeadLetter]) -> None:
        self.offsets += [letter.stored.offset for letter in letters]


@pytest.fixture
def log(bootstrap_servers: str) -> Iterator[KafkaEventLog]:
    log = kafka_log(bootstrap_servers)
    yield log
    log.close()


@pytest.fixture
def topic(log: KafkaEventLog) -> str:
    name = f"archived-{uuid.uuid4().hex}"
    log.create_topic(TopicSpec(name=name, num_partitions=2))
    return name


def append_events(log: KafkaEventLog, topic: str, *, first: int, count: int) -> None:
    events = [make_event(sequence=n, stream=f"s{n % 4}") for n in range(first, first + count)]
    log.append(topic, [Message(key=e.stream.encode(), value=encode(e)) for e in events])


def test_events_are_archived_once_over_a_restart(
    log: KafkaEventLog, topic: str, tmp_path: Path
) -> None:
    letters = Letters()
    append_events(log, topic, first=0, count=30)
    log.append(topic, [Message(key=b"s0", value=b"\xff"), Message(key=b"s0", value=None)])
    with Archiver(log, topic, tmp_path, dead_letters=letters, max_events_per_file=7) as archiver:
        archiver.run_once()
    append_events(log, topic, first=30, count=10)
    with Archiver(log, topic, tmp_path, dead_letters=letters, max_events_per_file=7) as archiver:
        archiver.drain()
    logged = list(LogReader(tmp_path))
    assert sorted(row.event.sequence for row in logged) == list(range(40))
    assert len(letters.offsets) == 2
    for partition in range(2):
        files = [file for file in log_files(tmp_path, topic) if file.partition == partition]
        ends = [file.last_offset + 1 for file in files]
        assert ends[-1] == log.end_offset(topic, partition)
        assert [file.first_offset for file in files] == [0, *ends[:-1]]


def test_offsets_that_the_broker_deleted_are_counted_and_claimed_by_no_name(
    log: KafkaEventLog, topic: str, tmp_path: Path, bootstrap_servers: str
) -> None:
    append_events(log, topic, first=0, count=20)
    end = log.end_offset(topic, 0)
    with Archiver(log, topic, tmp_path, dead_letters=Letters(), max_events_per_file=2) as archiver:
        archiver.run_once()
        admin = kafka_admin(bootstrap_servers)
        admin.delete_records({TopicPartition(topic, 0): end - 1})
        admin.close()
    # Another client, since the first has fetched ahead and would not notice.
    reopened = kafka_log(bootstrap_servers)
    with Archiver(reopened, topic, tmp_path, dead_letters=Letters()) as archiver:
        archiver.drain()
        assert archiver.num_lost_offsets == end - 3
    reopened.close()
    ranges = [(f.first_offset, f.last_offset) for f in log_files(tmp_path, topic)]
    assert ranges[:2] == [(0, 1), (end - 1, end - 1)]
