"""What can be seen of learner and archiver from outside: lag, delay, what they set aside."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from learner.ports import EventSource, PartitionOwner, ReceivedEvent
from learner.service import LearnerCounts
from pipeline.archive.archiver import Archiver
from pipeline.messaging.dead_letters import KINDS, UNLEARNABLE
from pipeline.operations.loops import PREFIX
from schemas.topics import VERIFICATION_EVENTS

if TYPE_CHECKING:
    from pipeline.elected_training import ElectedTraining

LAG_SECONDS = 5.0
"""Time between two looks at where the log ends."""


class WatchedSource:
    """An event source that notes how far behind its reader is.

    Args:
        source: What is watched (``learner.ports.EventSource``).
        end_offset: Offset of a partition that the next event will get.
        monotonic: The clock inside this process.
        now: The clock that events are compared with, in UTC.

    Attributes:
        num_events: Events handed out.
        delay_seconds_sum: Seconds from an event's production to its reading, over all events.
        num_skewed: Events from the future, by this machine's clock; their delay counts as 0.
        partition_to_lag: Events not handed out yet.
    """

    def __init__(
        self,
        source: EventSource,
        end_offset: Callable[[int], int],
        *,
        monotonic: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._source = source
        self._end_offset = end_offset
        self._monotonic = monotonic
        self._now = now
        self._polled_at = monotonic()
        self._lag_at: float | None = None
        self._position: dict[int, int] = {}
        self.num_events = 0
        self.delay_seconds_sum = 0.0
        self.num_skewed = 0
        self.partition_to_lag: Mapping[int, int] = {}

    @property
    def partitions(self) -> Sequence[int]:
        """Partitions that are owned."""
        return self._source.partitions

    @property
    def kind_to_dead_letters(self) -> Mapping[str, int]:
        """Messages that the source has set aside, by kind; none if it does not count them."""
        return getattr(self._source, "kind_to_dead_letters", {})

    def listen(self, owner: PartitionOwner) -> None:
        """Tell ``owner`` of partitions that come and go."""
        self._source.listen(owner)

    def is_owner(self) -> bool:
        """Tell whether the owned partitions are still owned."""
        return self._source.is_owner()

    def seek(self, partition: int, offset: int) -> None:
        """Read from ``offset`` on."""
        self._position[partition] = offset
        self._source.seek(partition, offset)

    def poll(self, timeout_seconds: float) -> Sequence[ReceivedEvent]:
        """Return what has arrived."""
        self._polled_at = self._monotonic()
        found = self._source.poll(timeout_seconds)
        self._note(found)
        if self._lag_at is None or self._polled_at - self._lag_at >= LAG_SECONDS:
            self._lag_at = self._polled_at
            self.partition_to_lag = {
                one: max(self._end_offset(one) - self._position.get(one, 0), 0)
                for one in self._source.partitions
            }
        return found

    def committed(self, partition: int) -> int | None:
        """Return the committed position."""
        return self._source.committed(partition)

    def commit(self, partition: int, offset: int) -> None:
        """Commit a position."""
        self._source.commit(partition, offset)

    def _note(self, found: Sequence[ReceivedEvent]) -> None:
        if not found:
            return
        now = self._now()
        for received in found:
            self._position[received.partition] = received.offset + 1
            seconds = (now - received.event.produced_at).total_seconds()
            self.num_skewed += seconds < 0
            self.delay_seconds_sum += max(seconds, 0.0)
        self.num_events += len(found)


class LearnerMetrics(Collector):
    """What Prometheus reads of a learner.

    Args:
        watched: Its source.
        counts: What it has done.
        is_shared: Whether several learners share the partitions, so that one may be idle.
        training: Of the trainer beside it, if this process may train.
    """

    def __init__(
        self,
        watched: WatchedSource,
        counts: LearnerCounts,
        *,
        is_shared: bool = False,
        training: ElectedTraining | None = None,
    ) -> None:
        self._watched = watched
        self._counts = counts
        self._is_shared = is_shared
        self._training = training

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        watched, counts = self._watched, self._counts
        for field in fields(counts):
            if field.name.startswith("num_"):
                name = "learner_events_" + field.name.removeprefix("num_")
                yield _counter(name, f"Counted: {field.name}.", getattr(counts, field.name))
        yield from self._delays()
        yield from _lag(sum(watched.partition_to_lag.values()))
        lag = GaugeMetricFamily(
            PREFIX + "learner_lag_events", "Events not read yet.", labels=("partition",)
        )
        for partition, events in sorted(watched.partition_to_lag.items()):
            lag.add_metric((str(partition),), events)
        yield lag
        num_unlearnable = counts.num_refused + counts.num_untrainable
        yield _dead_letters({**watched.kind_to_dead_letters, UNLEARNABLE: num_unlearnable})
        num_owned = len(watched.partitions)
        yield _gauge("learner_partitions", "Partitions that it owns.", num_owned)
        is_idle = self._is_shared and not num_owned
        yield _gauge("learner_idle", "1 if it shares partitions and has none.", float(is_idle))
        if self._training is not None:
            yield from _training(self._training)

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: the names need no value to be known."""
        return ()

    def _delays(self) -> Iterable[Metric]:
        watched, counts = self._watched, self._counts
        yield _counter("learning_delay_seconds_count", "Events read.", watched.num_events)
        yield _counter(
            "learning_delay_seconds_sum",
            "Seconds from production to learning, over all events read.",
            watched.delay_seconds_sum,
        )
        yield _counter("learning_clock_skew_events", "Events from the future.", watched.num_skewed)
        yield _counter("learning_delay_events_count", "Events learned.", counts.num_learned)
        yield _counter(
            "learning_delay_events_sum",
            "Events of the stream learned between an event's policy and it, over events learned.",
            counts.delay_events,
        )


class ArchiverMetrics(Collector):
    """What Prometheus reads of an archiver."""

    def __init__(self, archiver: Archiver) -> None:
        self._archiver = archiver

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        for name, text in (
            ("num_events", "Events in files."),
            ("num_files", "Files written."),
            ("num_failures", "Steps that failed and are repeated."),
            ("num_lost_offsets", "Offsets deleted before they were archived."),
            ("num_merged_files", "Short files merged into long ones."),
        ):
            yield _counter(
                "archiver_" + name.removeprefix("num_"), text, getattr(self._archiver, name)
            )
        yield _dead_letters(self._archiver.kind_to_dead_letters)
        yield from _lag(self._archiver.lag_messages)

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: the names need no value to be known."""
        return ()


def _training(training: ElectedTraining) -> Iterable[Metric]:
    yield _gauge("trainer_active", "1 if it trains, 0 if it stands by.", float(training.is_active))
    yield _counter("trainer_elections", "Times it became the active one.", training.num_elections)
    yield _counter("trainer_fenced", "Times another had released meanwhile.", training.num_fenced)
    yield _counter(
        "trainer_events_untrainable", "Events set aside by the trainer.", training.num_untrainable
    )


def _lag(num_messages: int) -> Iterable[Metric]:
    family = GaugeMetricFamily(
        PREFIX + "consumer_lag_messages", "Messages of a topic not read yet.", labels=("topic",)
    )
    family.add_metric((VERIFICATION_EVENTS,), num_messages)
    yield family


def _dead_letters(kind_to_count: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(
        PREFIX + "dead_letters", "Messages set aside, by what was wrong.", labels=("reason",)
    )
    for kind in KINDS:
        family.add_metric((kind,), kind_to_count.get(kind, 0))
    return family


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
