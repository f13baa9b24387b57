"""Reading several partitions of a topic through one Kafka client."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaError, OffsetOutOfRangeError

from pipeline.eventlog.kafka_errors import translated
from pipeline.eventlog.kafka_records import stored_message
from pipeline.eventlog.ports import StoredMessage

LAG_SECONDS = 5.0
"""Time between two questions for the ends; they also notice a broker that has gone."""

logger = logging.getLogger(__name__)


class KafkaReader:
    """The messages of some partitions, each in the order of its offsets.

    Args:
        build: Builds the client at first use; used from one thread, not thread safe.
        topic: The topic.
        where: Names broker and topic in errors.

    Every method that needs the broker raises ``EventLogError`` if it cannot serve.

    Attributes:
        lag_messages: Messages that were still to be read when last looked; None = not yet looked.
        num_lost_offsets: Offsets that were deleted before they were read.
    """

    def __init__(self, build: Callable[[], Any], topic: str, where: str) -> None:
        self._build = build
        self._where = where
        self._topic = topic
        self._consumer: Any = None
        self._partition_to_offset: dict[int, int] = {}
        self._looked_seconds = float("-inf")
        self.lag_messages: int | None = None
        self.num_lost_offsets = 0

    def seek(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on, among others."""
        self._partition_to_offset[partition] = offset
        with self._translated():
            self._assign()
            self._consumer.seek(self._place(partition), offset)

    def let_go(self, partitions: Collection[int]) -> None:
        """Read these no longer."""
        for partition in partitions:
            self._partition_to_offset.pop(partition, None)
        if self._consumer is not None:
            self._assign()

    def poll(self, timeout_seconds: float, max_messages: int) -> list[StoredMessage]:
        """Return what has arrived, waiting at most ``timeout_seconds`` for the first."""
        if not self._partition_to_offset:
            time.sleep(timeout_seconds)
            return []
        with self._translated():
            self._look()
            try:
                found = self._consumer.poll(
                    timeout_ms=round(1000 * timeout_seconds), max_records=max_messages
                )
            except OffsetOutOfRangeError:
                self._skip_deleted()
                return []
        messages = [stored_message(record) for records in found.values() for record in records]
        for stored in messages:
            self._partition_to_offset[stored.partition] = stored.offset + 1
        return messages

    def _ends(self) -> dict[int, int]:
        places = [self._place(partition) for partition in self._partition_to_offset]
        ends = self._consumer.end_offsets(places) if places else {}
        return {place.partition: int(end) for place, end in ends.items()}

    def close(self) -> None:
        """Release the client; idempotent."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close(autocommit=False)

    def _look(self) -> None:
        now_seconds = time.monotonic()
        if now_seconds - self._looked_seconds < LAG_SECONDS:
            return
        ends = self._ends()
        self.lag_messages = sum(ends[p] - o for p, o in self._partition_to_offset.items())
        self._looked_seconds = now_seconds

    def _skip_deleted(self) -> None:
        places = [self._place(partition) for partition in self._partition_to_offset]
        for place, begin in self._consumer.beginning_offsets(places).items():
            offset = self._partition_to_offset[place.partition]
            if offset < begin:
                self.num_lost_offsets += begin - offset
                logger.error(
                    "%s/%d: offsets %d..%d were deleted before they were read",
                    *(self._topic, place.partition, offset, begin - 1),
                )
                self._partition_to_offset[place.partition] = int(begin)
                self._consumer.seek(place, begin)

    def _assign(self) -> None:
        if self._consumer is None:
            self._consumer = self._build()
        self._consumer.assign([self._place(partition) for partition in self._partition_to_offset])

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except KafkaError as error:
            raise translated(error, self._where) from error

    def _place(self, partition: int) -> TopicPartition:
        return TopicPartition(self._topic, partition)
