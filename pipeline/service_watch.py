"""What can be seen of learner and archiver from outside: lag, delay, and when they last moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import UTC, datetime

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from learner.ports import EventSource, PartitionOwner, ReceivedEvent
from learner.service import LearnerCounts
from pipeline.archiver import Archiver
from pipeline.settings import SettingsError

PREFIX = "draftloop_"
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
    def seconds_since_poll(self) -> float:
        """Seconds since the reader last asked."""
        return self._monotonic() - self._polled_at

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
    """What Prometheus reads of a learner."""

    def __init__(self, watched: WatchedSource, counts: LearnerCounts) -> None:
        self._watched = watched
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        watched = self._watched
        for field in fields(self._counts):
            name = "learner_events_" + field.name.removeprefix("num_")
            yield _counter(name, f"Counted: {field.name}.", getattr(self._counts, field.name))
        yield _counter("learning_delay_seconds_count", "Events read.", watched.num_events)
        yield _counter(
            "learning_delay_seconds_sum",
            "Seconds from production to learning, over all events read.",
            watched.delay_seconds_sum,
        )
        yield _counter("learning_clock_skew_events", "Events from the future.", watched.num_skewed)
        yield _gauge(
            "seconds_since_last_poll", "Since events were asked for.", watched.seconds_since_poll
        )
        lag = GaugeMetricFamily(
            PREFIX + "learner_lag_events", "Events not read yet.", labels=("partition",)
        )
        for partition, events in sorted(watched.partition_to_lag.items()):
            lag.add_metric((str(partition),), events)
        yield lag

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: the names need no value to be known."""
        return ()


class ArchiverMetrics(Collector):
    """What Prometheus reads of an archiver."""

    def __init__(self, archiver: Archiver) -> None:
        self._archiver = archiver

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        for name, text in (
            ("num_events", "Events in files."),
            ("num_files", "Files written."),
            ("num_dead_letters", "Messages set aside."),
            ("num_failures", "Steps that failed and are repeated."),
            ("num_lost_offsets", "Offsets deleted before they were archived."),
        ):
            yield _counter(
                "archiver_" + name.removeprefix("num_"), text, getattr(self._archiver, name)
            )

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: the names need no value to be known."""
        return ()


@contextmanager
def metrics_page(collector: Collector, host: str, port: int, setting: str) -> Iterator[None]:
    """Answer ``/metrics`` on a port for the length of the block; port 0 = not at all.

    Raises:
        SettingsError: If the port cannot be listened on.
    """
    if not port:
        yield
        return
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise SettingsError(
            f"{setting} = {port}: cannot be listened on: {error.strerror}; name another port"
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)
