"""Learners of a consumer group, each in a process of its own, for the benchmarks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from learner.service import LearnerSettings, PolicyLearner
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.local_broker import BenchError
from pipeline.messaging.boards import LogPolicyBoard
from pipeline.messaging.group_source import GroupEventSource
from pipeline.messaging.outages import run_through_outages
from pipeline.messaging.topics import TopicPlan, create_topics
from pipeline.tied import tie_to_parent
from schemas.topics import VERIFICATION_EVENTS

OPTIONS = KafkaOptions(compression="zstd")
MOST_SECONDS = 120.0
LOOK_SECONDS = 0.005


class LearnerGroup:
    """Learners in processes, which tell their shares and what they have learned.

    Args:
        servers: ``host:port`` of the broker, or of several with commas between them.
        num_learners: Processes; they are started at once.
        settings: Of every learner.
    """

    def __init__(self, servers: str, num_learners: int, settings: LearnerSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._learned = context.RawArray("q", num_learners)
        self._shares = context.RawArray("q", num_learners)
        self._must_end = context.RawValue("b", 0)
        told = (self._learned, self._shares, self._must_end)
        self._processes = [
            context.Process(target=_learn, args=(servers, number, settings, *told), daemon=True)
            for number in range(num_learners)
        ]
        for process in self._processes:
            process.start()

    @property
    def process_ids(self) -> list[int]:
        """Processes of the learners."""
        return [process.pid or 0 for process in self._processes]

    def shares(self) -> list[int]:
        """Return how many partitions each learner owns."""
        return list(self._shares)

    def num_learned(self) -> int:
        """Return how many events they have learned together."""
        return sum(self._learned)

    def signal(self, number: int) -> None:
        """Send a signal to all."""
        for process in self._processes:
            os.kill(process.pid or 0, number)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition.

        Raises:
            BenchError: If it takes too long, or a learner has ended.
        """
        deadline = time.monotonic() + MOST_SECONDS
        while not condition():
            ended = [one.exitcode for one in self._processes if not one.is_alive()]
            if ended or time.monotonic() > deadline:
                raise BenchError(
                    f"shares {self.shares()}, {self.num_learned()} events learned after "
                    f"{MOST_SECONDS:.0f} s; exit statuses {ended}"
                )
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """End all well: what they learned is published; idempotent."""
        self._must_end.value = 1
        for process in self._processes:
            process.join(MOST_SECONDS)
            if process.is_alive():
                process.kill()


def _learn(
    servers: str, number: int, settings: LearnerSettings, learned: Any, shares: Any, must_end: Any
) -> None:
    """Be a learner of the group, and no longer than who asked for it."""
    tie_to_parent()
    # The terminal's interrupt is the benchmark's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with closing(KafkaEventLog(servers.split(","), OPTIONS)) as log:
        create_topics(log, TopicPlan(num_partitions=log.num_partitions(VERIFICATION_EVENTS)))
        source = GroupEventSource(log)
        board = LogPolicyBoard(log, source=f"bench-{number}")
        learner = PolicyLearner(source, board, settings, now=lambda: datetime.now(UTC))

        def stop() -> bool:
            learned[number] = learner.counts.num_learned
            shares[number] = len(source.partitions)
            return bool(must_end.value)

        try:
            run_through_outages("learner", lambda _: learner.run(stop), threading.Event())
        finally:
            source.close()
