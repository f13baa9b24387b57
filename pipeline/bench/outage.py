"""The outage benchmark: what serving notices while the broker is away, and how learning resumes.

A worker serves a small target on a thread of its own, with the emitter and the inbox of production,
over a broker that is stopped by its process and started again on the same port and data. A learner
learns in another process. Requests come at a steady pace that keeps the worker busy half of the
time. All parts are watched: every round's wall time, the process's memory, the emitter's counters,
what the learner has learned, and the policies that reach the worker.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.emission import Emitter
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.sampling import SamplingParams
from inference.worker import Request, Worker, WorkerOptions
from learner.service import LearnerSettings
from pipeline.bench.given_broker import GivenBroker, emptied_broker
from pipeline.bench.group import OPTIONS, LearnerGroup
from pipeline.bench.target import small_target
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.json_files import write_json
from pipeline.local_broker import BenchError, LocalBroker
from pipeline.messaging.boards import LogEventSender
from pipeline.messaging.inbox import LogInbox
from pipeline.messaging.topics import TopicPlan, create_topics
from pipeline.releases.registry import ArtifactError
from schemas.events import DrafterReleased, PolicyPublished

STREAM = "bench"
PROMPT = "the quick brown fox jumps over the lazy dog and the quick brown fox rests."
BUSY_SHARE = 0.5
LOOK_SECONDS = 0.01
MEMORY_SECONDS = 0.5
NUM_RESAMPLES = 500
BLOCK_SECONDS = 1.0
CLOSE_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OutageBench:
    """How long, and how much.

    Attributes:
        outage_seconds: How long the broker is away.
        steady_seconds: How long is served before it goes; as long is taken for the comparison.
        warm_seconds: Served before anything is measured: caches fill, kernels load.
        capacity: Most events that wait to be sent; older ones are dropped and counted.
        most_seconds: Longest wait for learning to resume.
        max_tokens: Per request.
        seed: Of the target and the bootstrap.
    """

    outage_seconds: float = 60.0
    steady_seconds: float = 60.0
    warm_seconds: float = 10.0
    capacity: int = 200
    most_seconds: float = 60.0
    max_tokens: int = 64
    seed: int = 0


def run_outage_bench(
    bench: OutageBench,
    *,
    json_file: Path | None,
    console: Console,
    given: GivenBroker | None = None,
) -> dict[str, Any]:
    """Measure, print and write; about ``warm + steady + outage`` seconds and half a minute.

    Args:
        bench: How long, and how much.
        json_file: Where to write the numbers.
        console: Where to print them.
        given: The broker to stop and start, which holds nothing of ours; None = one of its own.

    Raises:
        BenchError: If serving stopped, events are not accounted for, or learning did not resume.
        NoBrokerError: If there is no broker to start.
    """
    with ExitStack() as stack:
        broker = stack.enter_context(_running(given))
        with closing(KafkaEventLog(broker.servers.split(","), OPTIONS)) as log:
            create_topics(log, TopicPlan(num_partitions=1))
        settings = LearnerSettings(publish_every_events=20, poll_seconds=0.1)
        learner = stack.enter_context(closing(LearnerGroup(broker.servers, 1, settings)))
        served = stack.enter_context(_serving(broker.servers, bench))
        result = _result(bench, _disturbed(bench, broker, learner, served, console), served)
    for name, value in result.items():
        console.print(f"{name:34} {value:14,.4f}", highlight=False)
    if json_file is not None:
        write_json(json_file, result)
    return result


@contextmanager
def _running(given: GivenBroker | None) -> Iterator[LocalBroker | GivenBroker]:
    """Yield a broker that runs; one of its own ends with the block, a given one goes on."""
    if given is not None:
        with emptied_broker(given.servers, OPTIONS), closing(given):
            yield given
        return
    with tempfile.TemporaryDirectory(prefix="draftloop-bench-") as folder:
        broker = LocalBroker(Path(folder))
        try:
            broker.start()
            yield broker
        finally:
            broker.stop()


@dataclass(frozen=True, slots=True)
class _Times:
    """Monotonic seconds of what happened."""

    steady: float
    stopped: float
    started: float
    learned: float
    policy: float


def _disturbed(
    bench: OutageBench,
    broker: LocalBroker | GivenBroker,
    learner: LearnerGroup,
    served: _Serving,
    console: Console,
) -> _Times:
    """Stop the broker and start it again; return when what happened."""
    console.print("serving before the outage")
    learner.wait(lambda: learner.num_learned() > 0 and served.inbox.newest_version > 0)
    time.sleep(bench.warm_seconds)
    steady = time.monotonic()
    time.sleep(bench.steady_seconds)
    stopped = time.monotonic()
    broker.stop()
    console.print("the broker is away")
    time.sleep(bench.outage_seconds)
    learned_before, version_before = learner.num_learned(), served.inbox.newest_version
    started = time.monotonic()
    broker.start()
    console.print("the broker is back")
    learned = _await(lambda: learner.num_learned() > learned_before, bench, served, "learning")
    policy = _await(
        lambda: served.inbox.newest_version > version_before, bench, served, "a newer policy"
    )
    return _Times(steady, stopped, started, learned, policy)


def _await(condition: Callable[[], bool], bench: OutageBench, served: _Serving, what: str) -> float:
    deadline = time.monotonic() + bench.most_seconds
    while not condition():
        if not served.thread.is_alive() or time.monotonic() > deadline:
            raise BenchError(
                f"{what} did not resume within {bench.most_seconds:.0f} s of the broker's return"
            )
        time.sleep(LOOK_SECONDS)
    return time.monotonic()


class _WatchedInbox:
    """Tells the newest version of the policy that reached the worker (``worker.Inbox``)."""

    def __init__(self, inbox: LogInbox) -> None:
        self._inbox = inbox
        self.newest_version = 0

    def take_policies(self) -> Sequence[PolicyPublished]:
        policies = self._inbox.take_policies()
        self.newest_version = max([self.newest_version, *(one.version for one in policies)])
        return policies

    def take_drafters(self) -> Sequence[Drafter]:
        return self._inbox.take_drafters()


class _Serving:
    """A worker at a steady pace in a thread of its own.

    Attributes:
        rounds: End of every round (monotonic seconds) and its wall seconds.
        memory: Time (monotonic seconds) and resident bytes of the process.
    """

    def __init__(self, worker: Worker, emitter: Emitter, inbox: _WatchedInbox, max_tokens: int):
        self._worker = worker
        self._params = SamplingParams(max_tokens=max_tokens)
        self._prompt = worker.target.encode(PROMPT)
        self._stop = threading.Event()
        self.emitter = emitter
        self.inbox = inbox
        self.rounds: list[tuple[float, float]] = []
        self.memory: list[tuple[float, int]] = []
        self.thread = threading.Thread(target=self._run, name="serving", daemon=True)
        self._watching = threading.Thread(target=self._watch, name="memory", daemon=True)
        self.thread.start()
        self._watching.start()

    def close(self) -> None:
        """Finish the request at work."""
        self._stop.set()
        self.thread.join(CLOSE_SECONDS)
        self._watching.join(CLOSE_SECONDS)

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            began = time.monotonic()
            self._serve(number)
            number += 1
            busy_seconds = time.monotonic() - began
            self._stop.wait(busy_seconds / BUSY_SHARE - busy_seconds)

    def _serve(self, number: int) -> None:
        request = Request(
            request_id=f"bench-{number}",
            stream=STREAM,
            prompt_token_ids=self._prompt,
            params=self._params,
        )
        work = self._worker.begin(request)
        while not work.is_finished:
            began = time.monotonic()
            work.step()
            ended = time.monotonic()
            self.rounds.append((ended, ended - began))
        work.close()

    def _watch(self) -> None:
        while not self._stop.wait(MEMORY_SECONDS):
            self.memory.append((time.monotonic(), _resident_bytes()))


@contextmanager
def _serving(servers: str, bench: OutageBench) -> Iterator[_Serving]:
    """Yield a worker that serves, with all that connects it; its events are flushed at the end."""
    torch.set_num_threads(1)

    opened: list[KafkaEventLog] = []

    def open_log() -> KafkaEventLog:
        opened.append(KafkaEventLog(servers.split(","), OPTIONS))
        return opened[-1]

    drafters = [PromptLookupDrafter(f"lookup-{n}", longest=n) for n in (2, 3, 5)]
    emitter = Emitter(LogEventSender(open_log, source="bench"), capacity=bench.capacity)
    inbox = LogInbox(open_log, _no_weights, [], poll_seconds=0.2)
    watched = _WatchedInbox(inbox)
    worker = Worker(
        small_target(bench.seed),
        DrafterPool(drafters),
        WorkerOptions(worker_id="bench", worker_epoch=1, segment_tokens=16),
        sink=emitter,
        inbox=watched,
    )
    inbox.start()
    try:
        with closing(_Serving(worker, emitter, watched, bench.max_tokens)) as serving:
            yield serving
    finally:
        inbox.close()
        emitter.close(CLOSE_SECONDS)
        for log in opened:
            log.close()


def _no_weights(release: DrafterReleased) -> Drafter:
    raise ArtifactError(release.artifact_uri, found="a release", expected="none in a benchmark")


def _result(bench: OutageBench, times: _Times, served: _Serving) -> dict[str, Any]:
    served.close()
    before = _between(served.rounds, times.steady, times.stopped)
    during = _between(served.rounds, times.stopped, times.started)
    if not len(before) or not len(during):
        raise BenchError(f"{len(before)} rounds before and {len(during)} during the outage")
    low, high = _ratio_interval(before, during, bench.seed)
    emitter = served.emitter
    unsent = emitter.close(CLOSE_SECONDS)
    lost = emitter.num_emitted - emitter.num_sent - emitter.num_dropped - unsent
    if lost:
        raise BenchError(f"{lost} of {emitter.num_emitted} events are not accounted for")
    memory = np.array(served.memory)
    is_before = memory[:, 0] < times.stopped
    is_during = ~is_before & (memory[:, 0] < times.started)
    held = float(np.median(memory[is_before][-20:, 1]))
    growth = float(np.median(memory[is_during][-20:, 1])) - held
    return {
        "p99_ratio": _p99(during) / _p99(before),
        "p99_ratio_low": low,
        "p99_ratio_high": high,
        "p99_before_seconds": _p99(before),
        "p99_outage_seconds": _p99(during),
        "median_before_seconds": float(np.median(before[:, 1])),
        "median_outage_seconds": float(np.median(during[:, 1])),
        "num_rounds_before": len(before),
        "num_rounds_outage": len(during),
        "memory_growth_bytes": growth,
        "memory_growth_share": growth / held,
        "num_emitted_events": emitter.num_emitted,
        "num_sent_events": emitter.num_sent,
        "num_dropped_events": emitter.num_dropped,
        "num_send_errors": emitter.num_send_errors,
        "learning_resumed_seconds": times.learned - times.started,
        "policy_arrived_seconds": times.policy - times.started,
        "outage_seconds": times.started - times.stopped,
    }


def _between(rounds: Sequence[tuple[float, float]], first: float, last: float) -> NDArray[Any]:
    """Return (end, seconds) of the rounds that ended between two times, (R, 2)."""
    table = np.array(rounds).reshape(-1, 2)
    return table[(table[:, 0] >= first) & (table[:, 0] < last)]


def _p99(rounds: NDArray[Any]) -> float:
    return float(np.quantile(rounds[:, 1], 0.99))


def _ratio_interval(before: NDArray[Any], during: NDArray[Any], seed: int) -> tuple[float, float]:
    """Return the 95 % interval of the ratio of p99s, by a bootstrap over seconds of serving."""
    rng = np.random.default_rng(seed)
    blocks = [_blocks(rounds) for rounds in (before, during)]
    ratios = []
    for _ in range(NUM_RESAMPLES):
        p99_before, p99_during = (
            np.quantile(np.concatenate([one[i] for i in rng.integers(0, len(one), len(one))]), 0.99)
            for one in blocks
        )
        ratios.append(p99_during / p99_before)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def _blocks(rounds: NDArray[Any]) -> list[NDArray[np.float64]]:
    """Return the seconds of the rounds, second by second: neighbours are alike."""
    block = ((rounds[:, 0] - rounds[0, 0]) / BLOCK_SECONDS).astype(int)
    return [rounds[block == one, 1] for one in np.unique(block)]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
