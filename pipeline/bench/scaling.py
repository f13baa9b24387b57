"""The scaling benchmark: how much faster several learners catch up with a backlog than one.

Learners are processes of a consumer group over a real broker, as in production. They join and
settle; then they stand still (SIGSTOP) while the backlog is appended, and are let go together. Both
sizes of the group are measured in turns, and a ratio is always of two neighbours, so that a slow
minute slows both. At the end of each measurement the published states are compared, stream by
stream, with what one undisturbed learner makes of the same log.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from kafka.partitioner.default import murmur2
from rich.console import Console

from learner.service import LearnerSettings, PolicyLearner
from pipeline.bench.events import bench_event
from pipeline.bench.given_broker import emptied_broker
from pipeline.bench.group import OPTIONS, LearnerGroup
from pipeline.bench.replay import with_interval
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.ports import EventLog, Message
from pipeline.json_files import write_json
from pipeline.local_broker import BenchError, LocalBroker
from pipeline.messaging.boards import LogEventSource, LogPolicyBoard
from pipeline.messaging.topics import TopicPlan, create_topics
from schemas.codec import encode
from schemas.equality import first_difference
from schemas.events import PolicyPublished
from schemas.topics import VERIFICATION_EVENTS

LEARNER = LearnerSettings(learner_id="bench", publish_every_events=500, poll_seconds=0.05)
STREAMS_PER_PARTITION = 4
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingBench:
    """How much is measured.

    Attributes:
        num_learners: Learners of the larger group, >= 2; the smaller one is a single learner.
        num_partitions: Of the events, a multiple of ``num_learners``.
        num_events: Backlog of each measurement, spread evenly over the partitions.
        num_windows: Windows per event.
        repetitions: Measurements of each group; >= 2 for an interval.
    """

    num_learners: int = 3
    num_partitions: int = 6
    num_events: int = 6000
    num_windows: int = 64
    repetitions: int = 5


def run_scaling_bench(
    bench: ScalingBench, *, json_file: Path | None, console: Console, servers: str = ""
) -> dict[str, Any]:
    """Measure, print and write; about 15 seconds per repetition on two free cores.

    Args:
        bench: How much.
        json_file: Where to write the numbers.
        console: Where to print them.
        servers: ``host:port`` of a broker that holds nothing of ours; empty = one of its own for
            each measurement.

    Raises:
        BenchError: If learners did not catch up, or know together what one would not.
        NoBrokerError: If there is no broker to start.
    """
    sizes = (1, bench.num_learners)
    size_to_found: dict[int, list[_Measured]] = {size: [] for size in sizes}
    for repetition in range(bench.repetitions):
        for size in sizes if repetition % 2 == 0 else reversed(sizes):
            found = _measured(bench, size, servers)
            size_to_found[size].append(found)
            console.print(
                f"{size} learners: {found.rate:,.0f} events/s, {found.learner_cores:.2f} cores, "
                f"broker {found.broker_cores:.2f}",
                highlight=False,
            )
    one, several = ([found.rate for found in size_to_found[size]] for size in sizes)
    key = f"{_number(bench.num_learners)}_learners_vs_one"
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        "num_events": bench.num_events,
        "num_windows": bench.num_windows,
        "num_partitions": bench.num_partitions,
        "repetitions": bench.repetitions,
        **with_interval("one_learner_events_per_second", one),
        **with_interval(f"{_number(bench.num_learners)}_learners_events_per_second", several),
        **with_interval(key, [m / s for m, s in zip(several, one, strict=True)]),
        "states_equal": True,
        "num_states_compared": sum(
            found.num_streams for each in size_to_found.values() for found in each
        ),
    }
    for size, name in zip(sizes, ("one_learner", f"{key.removesuffix('_vs_one')}"), strict=True):
        for part in ("learner_cores", "broker_cores"):
            values = [getattr(found, part) for found in size_to_found[size]]
            if not np.isnan(values).any():
                result[f"{name}_{part}"] = float(np.mean(values))
    console.print(f"{key} {result[key]:.2f}", highlight=False)
    if json_file is not None:
        write_json(json_file, result)
    return result


def _number(count: int) -> str:
    return {2: "two", 3: "three", 4: "four", 6: "six"}.get(count, str(count))


@contextmanager
def _fresh_broker(servers: str) -> Iterator[tuple[str, int | None]]:
    """Yield ``host:port`` of a broker without topics of ours, and its process if it is our own."""
    if servers:
        with emptied_broker(servers, OPTIONS):
            yield servers, None
        return
    with tempfile.TemporaryDirectory(prefix="draftloop-bench-") as folder:
        broker = LocalBroker(Path(folder))
        try:
            broker.start()
            yield broker.servers, broker.process_id
        finally:
            broker.stop()


@dataclass(frozen=True, slots=True)
class _Measured:
    """One group's catching up.

    Attributes:
        rate: Events per second.
        learner_cores: Processors that the learners kept busy together.
        broker_cores: Those of the broker; NaN if it is not our own.
        num_streams: Streams that were compared.
    """

    rate: float
    learner_cores: float
    broker_cores: float
    num_streams: int


def processor_seconds(process_ids: Sequence[int]) -> float:
    """Return the processor time that running processes have used together."""
    ticks = 0
    for process_id in process_ids:
        # Behind the name, which may hold blanks: user and system time are fields 14 and 15.
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _measured(bench: ScalingBench, num_learners: int, given: str) -> _Measured:
    """Let one group catch up over a fresh broker, and compare what it learned."""
    with ExitStack() as stack:
        servers, broker = stack.enter_context(_fresh_broker(given))
        log = stack.enter_context(closing(KafkaEventLog(servers.split(","), OPTIONS)))
        create_topics(log, TopicPlan(num_partitions=bench.num_partitions))
        streams = balanced_streams(bench.num_partitions)
        messages = backlog_messages(streams, bench)
        group = stack.enter_context(closing(LearnerGroup(servers, num_learners, LEARNER)))
        group.wait(lambda: group.shares() == [bench.num_partitions // num_learners] * num_learners)
        # The first of every stream loads what there is to load.
        log.append(VERIFICATION_EVENTS, messages[: len(streams)])
        group.wait(lambda: group.num_learned() >= len(streams))
        backlog = messages[len(streams) :]
        group.signal(signal.SIGSTOP)
        for first in range(0, len(backlog), 500):
            log.append(VERIFICATION_EVENTS, backlog[first : first + 500])
        brokers = [] if broker is None else [broker]
        used = [processor_seconds(ids) for ids in (group.process_ids, brokers)]
        begun = time.monotonic()
        group.signal(signal.SIGCONT)
        group.wait(lambda: group.num_learned() >= len(messages))
        seconds = time.monotonic() - begun
        used = [
            processor_seconds(ids) - before
            for ids, before in zip((group.process_ids, brokers), used, strict=True)
        ]
        # A learner that leaves amid a rebalance publishes nothing: its successor would learn it.
        group.wait(lambda: _num_published(log) == len(messages))
        group.close()
        return _Measured(
            rate=len(backlog) / seconds,
            learner_cores=used[0] / seconds,
            broker_cores=used[1] / seconds if brokers else math.nan,
            num_streams=refuse_other_states(log),
        )


def balanced_streams(num_partitions: int) -> list[str]:
    """Return as many streams in every partition, in turns."""
    partition_to_streams: dict[int, list[str]] = {p: [] for p in range(num_partitions)}
    for number in range(100 * STREAMS_PER_PARTITION * num_partitions):
        stream = f"bench-{number}"
        found = partition_to_streams[(murmur2(stream.encode()) & 0x7FFFFFFF) % num_partitions]
        if len(found) < STREAMS_PER_PARTITION:
            found.append(stream)
    return [one for found in zip(*partition_to_streams.values(), strict=True) for one in found]


def backlog_messages(streams: Sequence[str], bench: ScalingBench) -> list[Message]:
    """Return the backlog, stream by stream in turns."""
    events = [bench_event(seed, num_windows=bench.num_windows) for seed in range(16)]
    messages = []
    for number in range(bench.num_events // len(streams) * len(streams)):
        stream = streams[number % len(streams)]
        event = replace(
            events[number % len(events)], sequence=number, event_id=f"bench.{number}", stream=stream
        )
        messages.append(Message(key=stream.encode(), value=encode(event)))
    return messages


def _num_published(log: EventLog) -> int:
    """Return how many events the published states contain: each version adds one."""
    return sum(policy.version for policy in LogPolicyBoard(log, source="bench").read_all())


def refuse_other_states(log: EventLog) -> int:
    """Compare what is published with what one learner makes of the log; return the streams.

    Raises:
        BenchError: If a stream is missing or its state differs, naming it and the difference.
    """
    published = LogPolicyBoard(log, source="bench").read_all()
    found = {one.stream: replace(one, produced_at=EPOCH) for one in published}
    partitions = range(log.num_partitions(VERIFICATION_EVENTS))
    source = LogEventSource(log, partitions, group="bench.clean")
    learner = PolicyLearner(source, _NoPolicies(), LEARNER, now=lambda: EPOCH)
    learner.resume()
    while events := source.poll(1.0):
        for received in events:
            learner.learn_one(received)
    for stream, state in learner.stream_to_state.items():
        expected = state.to_policy(
            LEARNER.streams, learner_id=LEARNER.learner_id, produced_at=EPOCH
        )
        difference = first_difference(found.get(stream), expected)
        if difference is not None:
            raise BenchError(f"stream {stream}: {difference}: the group learned something else")
    return len(learner.stream_to_state)


class _NoPolicies:
    """An empty board that stays empty (``learner.ports.PolicyBoard``)."""

    def read_all(self, partitions: object = None) -> Sequence[PolicyPublished]:
        return []

    def publish(self, policies: Sequence[PolicyPublished]) -> None:
        """Pass over."""
