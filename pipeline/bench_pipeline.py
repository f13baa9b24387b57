"""The pipeline benchmark: how fast events are encoded, decoded, learned and moved over a broker.

Every share compares two things of the same run on the same machine, so that a slow minute slows
both. A window is one scored start position of N drafters and K levels.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from inference.emission import Emitter
from learner.service import LearnerSettings, PolicyLearner
from pipeline.boards import LogPolicyBoard, PolicyFollower
from pipeline.event_decoding import decode_events
from pipeline.event_sender import LogEventSender
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaClients, KafkaOptions
from pipeline.eventlog.ports import Message, StoredMessage
from pipeline.group_source import GroupEventSource
from pipeline.json_files import write_json
from pipeline.topics import TopicPlan, create_topics
from schemas.codec import decode_verification_event, encode
from schemas.events import PolicyPublished, VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

BARE_TOPIC = "draftloop.bench-bare"
IDLE_SECONDS = 30.0


class BenchError(Exception):
    """The benchmark could not be finished; the message says how far it came."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineBench:
    """How much is measured.

    Attributes:
        num_events: Events per measurement, >= 1.
        delay_seconds: How long events flow while the delay to their policy is measured.
        num_streams: Streams they are spread over.
        round_seconds: A round of decoding, against which emission is compared.
    """

    num_events: int = 2000
    delay_seconds: float = 10.0
    num_streams: int = 16
    round_seconds: float = 0.02


class _Policies:
    """Policies in memory (``learner.ports.PolicyBoard``)."""

    def read_all(self, partitions: object = None) -> Sequence[PolicyPublished]:
        return []

    def publish(self, policies: Sequence[PolicyPublished]) -> None:
        for policy in policies:
            encode(policy)


def run_pipeline_bench(
    events: Sequence[VerificationEvent],
    servers: str,
    bench: PipelineBench,
    *,
    json_file: Path | None,
    console: Console,
) -> dict[str, float]:
    """Measure and print; the events give the payload.

    Args:
        events: Different events of one size, used in turns.
        servers: ``host:port`` of a broker that holds nothing else.
        bench: How much.
        json_file: Where to write the numbers.
        console: Where to print them.
    """
    windows = len(events[0].windows.start)
    values = [encode(event) for event in events]
    results = {
        "encode_windows_per_second": windows * _rate(lambda i: encode(_nth(events, i)), bench),
        "decode_windows_per_second": windows
        * _rate(lambda i: decode_verification_event(values[i % len(values)]), bench),
        "apply_windows_per_second": windows * _apply_rate(events, bench),
        "emission_share": _emission_seconds(events, bench) / bench.round_seconds,
    }
    options = KafkaOptions(compression="zstd", session_timeout_seconds=10.0)
    with closing(KafkaEventLog(servers.split(","), options)) as log:
        create_topics(log, TopicPlan(num_partitions=1))
        bare = _bare_rate(servers, options, log, events, bench)
        with closing(_Whole(log)) as whole:
            rate = _end_to_end_rate(log, whole, events, bench)
            delays = _publish_delays(log, events, bench, rate=rate / 2)
        results["bare_windows_per_second"] = windows * bare
        results["end_to_end_windows_per_second"] = windows * rate
        results["end_to_end_share_of_bare"] = rate / bare
        results["publish_delay_p99_seconds"] = float(np.quantile(delays, 0.99))
    for name, value in results.items():
        console.print(f"{name:32} {value:14,.4f}", highlight=False)
    if json_file is not None:
        write_json(json_file, results)
    return results


def _nth(events: Sequence[VerificationEvent], index: int) -> VerificationEvent:
    """Return an event never sent before: its own sequence, so that it is learned."""
    event = events[index % len(events)]
    stream = f"bench-{index % len(events)}"
    return replace(event, sequence=index, event_id=f"bench.{index}", stream=stream)


def _rate(act: Callable[[int], Any], bench: PipelineBench) -> float:
    """Return calls per second of processor time, which other processes do not slow."""
    act(0)
    begun = time.process_time()
    for index in range(bench.num_events):
        act(index)
    return bench.num_events / (time.process_time() - begun)


def _stored(events: Sequence[VerificationEvent], num_events: int) -> list[StoredMessage]:
    drawn = (_nth(events, index) for index in range(num_events))
    return [
        StoredMessage(
            partition=0,
            offset=index,
            appended_at=datetime.now(UTC),
            message=Message(key=event.stream.encode(), value=encode(event)),
        )
        for index, event in enumerate(drawn)
    ]


def _apply_rate(events: Sequence[VerificationEvent], bench: PipelineBench) -> float:
    """Return events per second of processor time from bytes to published policies."""
    messages = _stored(events, bench.num_events)
    source: Any = _NoSource()
    learner = PolicyLearner(source, _Policies(), LearnerSettings(), now=lambda: datetime.now(UTC))
    begun = time.process_time()
    for start in range(0, len(messages), 100):
        rows, _ = decode_events(VERIFICATION_EVENTS, messages[start : start + 100])
        for row in rows:
            learner.learn_one(row)
        learner.publish()
    return len(messages) / (time.process_time() - begun)


class _NoSource:
    """A source that is only committed to."""

    partitions = (0,)

    def is_owner(self) -> bool:
        return True

    def commit(self, partition: int, offset: int) -> None:
        """Pass over."""


def _emission_seconds(events: Sequence[VerificationEvent], bench: PipelineBench) -> float:
    """Return the serving thread's seconds per round: an event per segment, spread over its rounds.

    Processor time of the thread, since what the sender does beside it is not waited for.
    """
    emitter = Emitter(lambda _: None, capacity=bench.num_events + 1)
    begun = time.thread_time()
    for index in range(bench.num_events):
        emitter.emit(events[index % len(events)])
    seconds = time.thread_time() - begun
    emitter.close(IDLE_SECONDS)
    rounds_per_event = max(1, len(events[0].rounds.num_draft_tokens))
    return seconds / bench.num_events / rounds_per_event


def _bare_rate(
    servers: str,
    options: KafkaOptions,
    log: KafkaEventLog,
    events: Sequence[VerificationEvent],
    bench: PipelineBench,
) -> float:
    """Return events per second that kafka-python alone sends and receives, with these bytes."""
    from kafka import TopicPartition

    log.create_topic(replace(TopicPlan().declared()[0], name=BARE_TOPIC))
    values = [encode(_nth(events, index)) for index in range(bench.num_events)]
    clients = KafkaClients(servers.split(","), options)
    producer, consumer = clients.producer(), clients.consumer(None)
    place = TopicPartition(BARE_TOPIC, 0)
    consumer.assign([place])
    consumer.seek(place, log.end_offset(BARE_TOPIC, 0))
    begun = time.monotonic()
    sending = threading.Thread(target=_send_bare, args=(producer, values))
    sending.start()
    received = 0
    while received < bench.num_events:
        found = consumer.poll(timeout_ms=1000, max_records=2000)
        received += sum(len(records) for records in found.values())
    seconds = time.monotonic() - begun
    sending.join()
    producer.close()
    consumer.close(autocommit=False)
    return bench.num_events / seconds


def _send_bare(producer: Any, values: Sequence[bytes]) -> None:
    for value in values:
        producer.send(BARE_TOPIC, value=value, key=b"bench")
    producer.flush()


class _Whole:
    """A learner over the broker in a thread, and how fast events went through it."""

    def __init__(self, log: KafkaEventLog) -> None:
        self.source = GroupEventSource(log)
        self.learner = PolicyLearner(
            self.source,
            LogPolicyBoard(log, source="bench"),
            LearnerSettings(publish_every_events=200, poll_seconds=0.02),
            now=lambda: datetime.now(UTC),
        )
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.learner.run, args=(self.stop.is_set,))
        self.thread.start()

    def wait_for(self, num_learned: int) -> None:
        deadline = time.monotonic() + 10 * IDLE_SECONDS
        while self.learner.counts.num_learned < num_learned:
            if time.monotonic() > deadline or not self.thread.is_alive():
                raise BenchError(f"learned {self.learner.counts.num_learned} of {num_learned}")
            time.sleep(0.002)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(IDLE_SECONDS)
        self.source.close()


def _end_to_end_rate(
    log: KafkaEventLog, whole: _Whole, events: Sequence[VerificationEvent], bench: PipelineBench
) -> float:
    """Return events per second from ``emit`` to the learner's state."""
    send = LogEventSender(lambda: log, source="bench")
    send([_nth(events, 0)])
    whole.wait_for(1)
    emitter = Emitter(send, capacity=bench.num_events + 1, max_batch=500)
    begun = time.monotonic()
    for index in range(1, bench.num_events + 1):
        emitter.emit(_nth(events, index))
    whole.wait_for(bench.num_events + 1)
    rate = bench.num_events / (time.monotonic() - begun)
    emitter.close(IDLE_SECONDS)
    return rate


def _publish_delays(
    log: KafkaEventLog,
    events: Sequence[VerificationEvent],
    bench: PipelineBench,
    *,
    rate: float,
) -> list[float]:
    """Return seconds from ``emit`` to the policy that contains the event, as a worker sees it."""
    first = bench.num_events + 1
    count = max(10, round(rate * bench.delay_seconds))
    emitter = Emitter(LogEventSender(lambda: log, source="bench"), capacity=count)
    emitted: dict[int, float] = {}
    seen: dict[int, float] = {}
    follower = PolicyFollower(log)
    follower.poll()

    def emit() -> None:
        for index in range(first, first + count):
            emitted[index] = time.monotonic()
            emitter.emit(_nth(events, index))
            time.sleep(max(0.0, emitted[first] + (index - first + 1) / rate - time.monotonic()))

    emitting = threading.Thread(target=emit)
    emitting.start()
    deadline = time.monotonic() + bench.delay_seconds + IDLE_SECONDS
    while len(seen) < count and time.monotonic() < deadline:
        for policy in follower.poll():
            now = time.monotonic()
            for latest in policy.watermark.worker_to_sequence.values():
                of_stream = range(latest, first - 1, -len(events))
                for index in of_stream:
                    if index in seen:
                        break
                    seen[index] = now
    emitting.join()
    emitter.close(IDLE_SECONDS)
    if len(seen) < count:
        # Left out, the slowest would make the quantile look better.
        raise BenchError(f"{count - len(seen)} of {count} events reached no policy in time")
    return [seen[index] - emitted[index] for index in range(first, first + count)]
