"""What a broker may bring: refused with a count and kept whole, while everything else goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from inference.emission import Emitter
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.eventlog.ports import EventLog, EventLogUnavailableError, Message
from pipeline.messaging.boards import LogEventSender, LogEventSource
from pipeline.messaging.topics import TopicPlan, create_topics
from schemas.avro import PACKAGED
from schemas.codec import encode
from schemas.errors import ContractError
from schemas.events import VerificationEvent
from schemas.records import from_verification_event
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.integration.broker import blank_broker, free_port, kafka_log, own_broker
from tests.integration.broker_proxy import Proxy, slow_proxy
from tests.pipeline.messages import event, message, open_log, read_everything
from tests.schemas.builders import make_event
from tests.schemas.test_evolution import framed, stored_schema

LONG = "k" * 10_240
SLOW_SECONDS = 0.4


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.external_service)])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EventLog]:
    if request.param == "embedded":
        with closing(open_log(tmp_path, num_partitions=1)) as opened:
            yield opened
        return
    with blank_broker(tmp_path) as servers, closing(kafka_log(servers)) as opened:
        create_topics(opened, TopicPlan(num_partitions=1))
        yield opened


def long_stream() -> bytes:
    """Return an event that no build of ours would write: its stream has ten kilobytes."""
    record = from_verification_event(event(1)) | {"stream": LONG, "schema_version": 2}
    return framed(PACKAGED.newest["verification_event"], record)


def test_a_key_of_ten_kilobytes_is_set_aside_whole_and_counted(log: EventLog) -> None:
    strange = [
        Message(key=LONG.encode(), value=encode(event(1))),
        Message(key=LONG.encode(), value=long_stream()),
    ]
    log.append(VERIFICATION_EVENTS, [message(0), *strange, message(2)])
    source = LogEventSource(log, [0])
    found: list[int] = []
    deadline = time.monotonic() + 60
    while len(found) < 2 and time.monotonic() < deadline:
        found += [received.event.sequence for received in source.poll(1.0)]
    assert found == [0, 2]
    assert source.kind_to_dead_letters == {"key": 1, "field": 1}
    letters = [stored.message for stored in read_everything(log, DEAD_LETTERS)]
    assert [(one.key, one.value) for one in letters] == [(one.key, one.value) for one in strange]
    assert all(len(one.headers["reason"]) < 1000 for one in letters), "a reason is a line"


def test_invalid_stream_of_ten_kilobytes_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ContractError, match="stream"):
        make_event(stream=LONG)


def test_an_event_of_the_future_schema_is_a_counted_refusal_without_a_registry(
    log: EventLog,
) -> None:
    extra = {"schema_version": 3, "worker_region": "north", "energy_joules": 1.5}
    future = framed(stored_schema(3), from_verification_event(event(1)) | extra)
    log.append(VERIFICATION_EVENTS, [Message(key=b"stream-a", value=future), message(2)])
    source = LogEventSource(log, [0])
    found: list[int] = []
    while not found:
        found = [received.event.sequence for received in source.poll(1.0)]
    assert found == [2]
    assert source.kind_to_dead_letters == {"schema_id": 1}
    (letter,) = read_everything(log, DEAD_LETTERS)
    assert letter.message.value == future
    assert b"if it is newer, upgrade Draftloop" in letter.message.headers["reason"]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Proxy]:
    with own_broker(tmp_path, free_port()) as servers, slow_proxy(servers) as proxy:
        with closing(KafkaEventLog([proxy.servers])) as log:
            create_topics(log, TopicPlan(num_partitions=1))
        yield proxy


@pytest.mark.external_service
def test_a_broker_that_answers_slowly_costs_serving_nothing_and_the_newest_arrive(
    slow: Proxy,
) -> None:
    """D2: the queue is bounded, what does not fit is dropped, oldest first, and counted."""
    with closing(KafkaEventLog([slow.servers], KafkaOptions(timeout_seconds=20.0))) as log:
        emitter = Emitter(LogEventSender(lambda: log, source="worker"), capacity=50, max_batch=10)
        emitter.emit(event(0))
        while emitter.num_sent == 0:
            time.sleep(0.01)
        slow.delay_seconds = SLOW_SECONDS
        events: list[VerificationEvent] = [event(n) for n in range(1, 301)]
        seconds = []
        for one in events:
            began = time.thread_time()
            emitter.emit(one)
            seconds.append(time.thread_time() - began)
        assert float(np.median(seconds)) < SLOW_SECONDS / 100
        assert emitter.close(60.0) == 0
        assert emitter.num_dropped > 100
        assert emitter.num_sent == 301 - emitter.num_dropped
        slow.delay_seconds = 0.0
        received = LogEventSource(log, [0]).poll(5.0)
    assert received[-1].event.sequence == 300
    assert len({one.event.sequence for one in received}) == emitter.num_sent


@pytest.mark.external_service
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_broker_that_answers_too_slowly_is_one_that_is_away(slow: Proxy) -> None:
    with closing(KafkaEventLog([slow.servers], KafkaOptions(timeout_seconds=1.0))) as log:
        assert log.end_offset(VERIFICATION_EVENTS, 0) == 0
        slow.delay_seconds = 4.0
        with pytest.raises(EventLogUnavailableError, match="start the broker, or correct"):
            log.append(VERIFICATION_EVENTS, [message(1)])
        slow.delay_seconds = 0.0
        deadline = time.monotonic() + 60
        while True:
            try:
                log.append(VERIFICATION_EVENTS, [message(1)])
                break
            except EventLogUnavailableError:
                assert time.monotonic() < deadline
        assert LogEventSource(log, [0]).poll(5.0)
