"""The pipeline benchmark: how fast events are encoded, decoded, learned and moved over a broker.

Every share compares two things of the same run on the same machine, so that a slow minute slows
both. A window is one scored start position of N drafters and K levels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from inference.emission import Emitter
from learner.service import LearnerSettings, PolicyLearner
from pipeline.bench.broker import (
    BARE_TOPIC,
    OPTIONS,
    Passage,
    bare_passages,
    forget,
    forgetting,
    learning_process,
    publish_delays,
    whole_passage,
)
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.ports import Message, StoredMessage
from pipeline.json_files import write_json
from pipeline.messaging.event_decoding import decode_events
from pipeline.messaging.topics import TopicPlan, create_topics
from schemas.codec import decode_verification_event, encode
from schemas.events import PolicyPublished, VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

IDLE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineBench:
    """How much is measured.

    Attributes:
        num_events: Events per measurement, >= 1.
        num_repeats: Passages over the broker, bare and whole in turns, >= 1.
        delay_seconds: How long events flow while the delay to their policy is measured.
        round_seconds: A round of decoding, against which emission is compared: all that an event
            costs its worker, spread over the rounds that it tells of.
    """

    num_events: int = 4000
    num_repeats: int = 3
    delay_seconds: float = 10.0
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
    may_delete: bool = False,
) -> dict[str, float]:
    """Measure and print; the events give the payload.

    Args:
        events: Different events of one size, used in turns.
        servers: ``host:port`` of a broker that holds nothing else.
        bench: How much.
        json_file: Where to write the numbers.
        console: Where to print them.
        may_delete: Delete what a passage has left in the broker before the next one begins, and
            while delays are measured what policies contain; for a broker started for this.
    """
    windows = len(events[0].windows.start)
    values = [encode(event) for event in events]
    console.print("encoding, decoding, learning ...")
    results = {
        "encode_windows_per_second": windows * _rate(lambda i: encode(_nth_of(events, i)), bench),
        "decode_windows_per_second": windows
        * _rate(lambda i: decode_verification_event(values[i % len(values)]), bench),
        "apply_windows_per_second": windows * _apply_rate(events, bench),
    }
    passages = _over_broker(events, servers, bench, console, may_delete=may_delete)
    results |= _figures(passages, windows)
    seconds = _emission_seconds(events, bench) + _median(passages.whole, "sender_seconds")
    num_rounds = max(1, len(events[0].rounds.num_draft_tokens))
    results["emission_share"] = seconds / num_rounds / bench.round_seconds
    for name, value in results.items():
        console.print(f"{name:44} {_shown(value):>12}", highlight=False)
    if json_file is not None:
        write_json(json_file, results)
    return results


def _nth_of(events: Sequence[VerificationEvent], index: int) -> VerificationEvent:
    return events[index % len(events)]


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.3g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Passages:
    """What went over the broker, repeat by repeat; ``one_process`` in events per second."""

    bare: Sequence[Passage]
    one_process: Sequence[float]
    whole: Sequence[Passage]
    delays_seconds: Sequence[float]


def _over_broker(
    events: Sequence[VerificationEvent],
    servers: str,
    bench: PipelineBench,
    console: Console,
    *,
    may_delete: bool,
) -> _Passages:
    """Measure the passages in turns, so that a slow minute slows all of them."""
    bare, one_process, whole = [], [], []
    with closing(KafkaEventLog(servers.split(","), OPTIONS)) as log:
        create_topics(log, TopicPlan(num_partitions=1))
        with learning_process(servers) as learning:
            for repeat in range(bench.num_repeats):
                console.print(f"over the broker, {repeat + 1} of {bench.num_repeats} ...")
                sent = _events(events, repeat * bench.num_events, bench.num_events)
                two, one = bare_passages(servers, sent, log)
                bare.append(two)
                one_process.append(one)
                if may_delete:
                    forget(servers, log, BARE_TOPIC)
                whole.append(whole_passage(log, learning, sent))
                if may_delete:
                    forget(servers, log, VERIFICATION_EVENTS)
            console.print(f"delay to the policy, {bench.delay_seconds:.0f} s ...")
            rate = _median(whole, "events_per_second") / 2
            count = max(10, round(rate * bench.delay_seconds))
            sent = _events(events, bench.num_repeats * bench.num_events, count)
            with forgetting(servers, log) if may_delete else nullcontext():
                delays = publish_delays(log, sent, num_streams=len(events), rate=rate)
    return _Passages(bare=bare, one_process=one_process, whole=whole, delays_seconds=delays)


def _figures(passages: _Passages, windows: int) -> dict[str, float]:
    """Return rates and processor time per window; shares are medians over the repeats."""
    rates = np.array([one.events_per_second for one in passages.whole])
    bare = np.array([one.events_per_second for one in passages.bare])
    results = {
        "bare_windows_per_second": windows * float(np.median(bare)),
        "bare_one_process_windows_per_second": windows * float(np.median(passages.one_process)),
        "end_to_end_windows_per_second": windows * float(np.median(rates)),
        "end_to_end_share_of_bare": float(np.median(rates / bare)),
        "end_to_end_share_of_bare_in_one_process": float(
            np.median(rates / np.array(passages.one_process))
        ),
        "publish_delay_p50_seconds": float(np.quantile(passages.delays_seconds, 0.5)),
        "publish_delay_p99_seconds": float(np.quantile(passages.delays_seconds, 0.99)),
    }
    for name, each in (("bare", passages.bare), ("end_to_end", passages.whole)):
        for side in ("sender", "receiver"):
            seconds = _median(each, f"{side}_seconds")
            results[f"{name}_{side}_microseconds_per_window"] = 1e6 * seconds / windows
    return results


def _median(passages: Sequence[Passage], name: str) -> float:
    return float(np.median([getattr(one, name) for one in passages]))


def _events(events: Sequence[VerificationEvent], first: int, count: int) -> list[VerificationEvent]:
    return [_nth(events, index) for index in range(first, first + count)]


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
    # A learner loads its compiled kernels with its first event, once.
    _apply(_stored(events, 2))
    messages = _stored(events, bench.num_events)
    begun = time.process_time()
    _apply(messages)
    return len(messages) / (time.process_time() - begun)


def _apply(messages: Sequence[StoredMessage]) -> None:
    source: Any = _NoSource()
    learner = PolicyLearner(source, _Policies(), LearnerSettings(), now=lambda: datetime.now(UTC))
    for start in range(0, len(messages), 100):
        rows, _ = decode_events(VERIFICATION_EVENTS, messages[start : start + 100])
        for row in rows:
            learner.learn_one(row)
        learner.publish()


class _NoSource:
    """A source that is only committed to."""

    partitions = (0,)

    def is_owner(self) -> bool:
        return True

    def commit(self, partition: int, offset: int) -> None:
        """Pass over."""


def _emission_seconds(events: Sequence[VerificationEvent], bench: PipelineBench) -> float:
    """Return the serving thread's seconds per event: to build it, with its checks, and queue it.

    Processor time of the thread. What the sender does beside it, encoding and the client, is
    measured on the way over the broker.
    """
    emitter = Emitter(lambda _: None, capacity=bench.num_events + 1)
    begun = time.thread_time()
    for index in range(bench.num_events):
        emitter.emit(_nth(events, index))
    seconds = time.thread_time() - begun
    emitter.close(IDLE_SECONDS)
    return seconds / bench.num_events
