"""The way over a broker: events from a worker to a learner, and the same bytes without either.

Both ways have two processes, as in production, with the same client settings, messages and
headers. Bare: one sends the encoded messages, the other polls them. Whole: one queues events,
encodes and sends them as a worker does; the other polls, decodes, checks, learns and publishes as
a learner in its group does. The clock starts with the first message and stops once the last is
polled, or contained in a policy that the broker has stored. A third way is the plainest loop: one
process whose threads send and poll.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from kafka import TopicPartition

from inference.emission import Emitter
from learner.service import LearnerSettings, PolicyLearner
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaClients, KafkaOptions
from pipeline.eventlog.ports import EventLog
from pipeline.local_broker import BenchError
from pipeline.messaging.boards import LogPolicyBoard, PolicyFollower
from pipeline.messaging.event_sender import LogEventSender
from pipeline.messaging.group_source import GROUP, GroupEventSource
from pipeline.messaging.topics import TopicPlan
from schemas.codec import cloud_event_headers, encode
from schemas.events import VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

BARE_TOPIC = "draftloop.bench-bare"
IDLE_SECONDS = 60.0
REST_SECONDS = 1.5
FORGET_SECONDS = 0.5
WARM_UP_EVENTS = 50
OPTIONS = KafkaOptions(compression="zstd", session_timeout_seconds=10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """How fast events went from one process to the other.

    Attributes:
        events_per_second: By the clock on the wall.
        sender_seconds: Processor time per event of the process that sends.
        receiver_seconds: Of the one that receives.
    """

    events_per_second: float
    sender_seconds: float
    receiver_seconds: float


@contextmanager
def _other_process(run: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """Run ``run(connection, *arguments)`` in a process of its own, afresh, and end it."""
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
        process.join(IDLE_SECONDS)
    finally:
        process.kill()
        process.join()
        ours.close()


def _heard(connection: Connection, seconds: float = IDLE_SECONDS) -> Any:
    if not connection.poll(seconds):
        raise BenchError(f"the other process was silent for {seconds:.0f} s")
    try:
        return connection.recv()
    except EOFError:
        raise BenchError("the other process has ended; its error is above") from None


def forget(servers: str, log: KafkaEventLog, topic: str) -> None:
    """Delete what a topic of one partition holds, and let the broker come to rest.

    The emulated broker writes all that it holds to its file again, about once a second.
    """
    admin = KafkaClients(servers.split(","), OPTIONS).admin()
    with closing(admin):
        admin.delete_records({TopicPartition(topic, 0): log.end_offset(topic, 0)})
    time.sleep(REST_SECONDS)


@contextmanager
def forgetting(servers: str, log: KafkaEventLog) -> Iterator[None]:
    """Delete, while the block runs, the events that published policies contain."""
    stop = threading.Event()

    def run() -> None:
        with closing(KafkaClients(servers.split(","), OPTIONS).admin()) as admin:
            while not stop.wait(FORGET_SECONDS):
                if contained := log.committed(GROUP, VERIFICATION_EVENTS, 0):
                    admin.delete_records({TopicPartition(VERIFICATION_EVENTS, 0): contained})

    thread = threading.Thread(target=run, name="forgetting")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


Encoded = tuple[bytes, bytes, list[tuple[str, bytes]]]
"""Key, value and headers of a message."""


def bare_passages(
    servers: str, events: Sequence[VerificationEvent], log: KafkaEventLog
) -> tuple[Passage, float]:
    """Send and poll the encoded events with kafka-python alone.

    Returns:
        The passage from process to process, and events per second within one process.
    """
    log.create_topic(replace(TopicPlan().declared()[0], name=BARE_TOPIC))
    messages = [_encoded(event) for event in events]
    producer = KafkaClients(servers.split(","), OPTIONS).producer()
    producer.partitions_for(BARE_TOPIC)
    try:
        two = _to_other_process(producer, servers, messages, log)
        one = _within_process(producer, servers, messages, log)
    finally:
        producer.close()
    return two, one


def _encoded(event: VerificationEvent) -> Encoded:
    headers = cloud_event_headers(event, source="bench")
    return event.stream.encode(), encode(event), list(headers.items())


def _to_other_process(
    producer: Any, servers: str, messages: Sequence[Encoded], log: KafkaEventLog
) -> Passage:
    offset, count = log.end_offset(BARE_TOPIC, 0), len(messages)
    with _other_process(_poll_and_tell, servers, offset, count) as other:
        _heard(other)
        begun, used = time.monotonic(), time.process_time()
        _send_bare(producer, messages)
        used = time.process_time() - used
        ended, received = _heard(other)
    return Passage(
        events_per_second=count / (ended - begun),
        sender_seconds=used / count,
        receiver_seconds=received / count,
    )


def _within_process(
    producer: Any, servers: str, messages: Sequence[Encoded], log: KafkaEventLog
) -> float:
    offset = log.end_offset(BARE_TOPIC, 0)
    consumer = _bare_consumer(servers, offset)
    sending = threading.Thread(target=_send_bare, args=(producer, messages))
    begun = time.monotonic()
    sending.start()
    _poll_bare(consumer, len(messages))
    seconds = time.monotonic() - begun
    sending.join()
    consumer.close(autocommit=False)
    return len(messages) / seconds


def _send_bare(producer: Any, messages: Sequence[Encoded]) -> None:
    for key, value, headers in messages:
        producer.send(BARE_TOPIC, key=key, value=value, headers=headers)
    producer.flush()


def _bare_consumer(servers: str, offset: int) -> Any:
    consumer = KafkaClients(servers.split(","), OPTIONS).consumer(None)
    place = TopicPartition(BARE_TOPIC, 0)
    consumer.assign([place])
    consumer.seek(place, offset)
    consumer.poll(timeout_ms=100)
    return consumer


def _poll_bare(consumer: Any, count: int) -> None:
    received = 0
    while received < count:
        found = consumer.poll(timeout_ms=1000, max_records=2000)
        received += sum(len(records) for records in found.values())


def _poll_and_tell(connection: Connection, servers: str, offset: int, count: int) -> None:
    consumer = _bare_consumer(servers, offset)
    connection.send("ready")
    used = time.process_time()
    _poll_bare(consumer, count)
    connection.send((time.monotonic(), time.process_time() - used))
    consumer.close(autocommit=False)


class LearningProcess:
    """A learner in a process of its own, told how many events to expect."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._num_expected = 0

    def expect(self, num_events: int) -> None:
        """Ask to be told once so many more events are learned and published."""
        self._num_expected += num_events
        self._connection.send(self._num_expected)

    def published(self) -> tuple[float, float]:
        """Wait for that; return the time and the processor time since it was asked."""
        ended, used = _heard(self._connection, 10 * IDLE_SECONDS)
        return float(ended), float(used)


@contextmanager
def learning_process(servers: str) -> Iterator[LearningProcess]:
    """Run a learner beside this process for as long as the block lasts."""
    with _other_process(_learn, servers) as connection:
        _heard(connection)
        yield LearningProcess(connection)
        connection.send(None)


def _learn(connection: Connection, servers: str) -> None:
    # What drawn scores are miscalibrated by is no news here.
    logging.disable(logging.WARNING)
    with closing(KafkaEventLog(servers.split(","), OPTIONS)) as log:
        source = GroupEventSource(log)
        learner = PolicyLearner(
            source,
            LogPolicyBoard(log, source="bench"),
            LearnerSettings(),
            now=lambda: datetime.now(UTC),
        )
        stop = threading.Event()
        answering = threading.Thread(target=_answer, args=(connection, learner, stop))
        answering.start()
        learner.run(stop.is_set)
        source.close()
        answering.join()


def _answer(connection: Connection, learner: PolicyLearner, stop: threading.Event) -> None:
    """Say once as many events as were asked for are published; end at None."""
    connection.send("ready")
    while (wanted := connection.recv()) is not None:
        used = time.process_time()
        while learner.counts.num_learned < wanted or learner.has_unpublished:
            time.sleep(0.002)
        connection.send((time.monotonic(), time.process_time() - used))
    stop.set()


def whole_passage(
    log: EventLog, learning: LearningProcess, events: Sequence[VerificationEvent]
) -> Passage:
    """Send events as a worker does, until the learner has published all they teach."""
    send = LogEventSender(lambda: log, source="bench")
    warm, measured = events[:WARM_UP_EVENTS], events[WARM_UP_EVENTS:]
    learning.expect(len(warm))
    send(warm)
    learning.published()
    learning.expect(len(measured))
    emitter = Emitter(send, capacity=len(events))
    begun, used = time.monotonic(), time.process_time()
    for event in measured:
        emitter.emit(event)
    emitter.close(10 * IDLE_SECONDS)
    used = time.process_time() - used
    ended, learned = learning.published()
    count = len(measured)
    return Passage(
        events_per_second=count / (ended - begun),
        sender_seconds=used / count,
        receiver_seconds=learned / count,
    )


def publish_delays(
    log: EventLog, events: Sequence[VerificationEvent], *, num_streams: int, rate: float
) -> list[float]:
    """Return seconds from ``emit`` to the policy that contains the event, as a worker sees it.

    Args:
        log: Through which they go.
        events: To be sent, their ``sequence`` rising by 1 and their stream going round.
        num_streams: Streams that they go round.
        rate: Events per second.
    """
    first, count = events[0].sequence, len(events)
    emitter = Emitter(LogEventSender(lambda: log, source="bench"), capacity=count)
    emitted: dict[int, float] = {}
    seen: dict[int, float] = {}
    follower = PolicyFollower(log)
    follower.poll()

    def emit() -> None:
        begun = time.monotonic()
        for index, event in enumerate(events):
            time.sleep(max(0.0, begun + index / rate - time.monotonic()))
            emitted[first + index] = time.monotonic()
            emitter.emit(event)

    emitting = threading.Thread(target=emit)
    emitting.start()
    deadline = time.monotonic() + count / rate + IDLE_SECONDS
    while len(seen) < count and time.monotonic() < deadline:
        policies = follower.poll()
        now = time.monotonic()
        for policy in policies:
            for latest in policy.watermark.worker_to_sequence.values():
                for sequence in range(latest, first - 1, -num_streams):
                    if sequence in seen:
                        break
                    seen[sequence] = now
        time.sleep(0.005)
    emitting.join()
    emitter.close(IDLE_SECONDS)
    if len(seen) < count:
        # Left out, the slowest would make the quantile look better.
        raise BenchError(f"{count - len(seen)} of {count} events reached no policy in time")
    return [seen[sequence] - emitted[sequence] for sequence in range(first, first + count)]
