"""The Kafka event log: the same contract on a broker, through kafka-python.

Clients are made at first use, so importing this module or building the adapter opens nothing and
may happen before a fork.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kafka import TopicPartition
from kafka.admin import ConfigResource
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    OffsetOutOfRangeError,
    TopicAlreadyExistsError,
    UnknownTopicOrPartitionError,
)
from kafka.structs import OffsetAndMetadata

from pipeline.eventlog.kafka_clients import KafkaClients, KafkaOptions
from pipeline.eventlog.kafka_errors import translated
from pipeline.eventlog.kafka_membership import KafkaMembership
from pipeline.eventlog.kafka_reader import KafkaReader
from pipeline.eventlog.kafka_records import stored_message
from pipeline.eventlog.ports import (
    EventLogError,
    Message,
    StoredMessage,
    TopicSpec,
    UnknownTopicError,
)
from pipeline.eventlog.refusals import refuse_messages, refuse_mismatch, refuse_partition
from pipeline.messaging.topics import MAX_MESSAGE_BYTES
from schemas.avro import PACKAGED, SchemaTable


@dataclass(slots=True)
class _GuardedConsumer:
    """A consumer, which is not thread safe, with the lock that every use must hold."""

    consumer: Any
    lock: threading.Lock = field(default_factory=threading.Lock)


class KafkaEventLog:
    """Event log on a Kafka broker.

    A message with a key goes to the partition that every Kafka client would choose (murmur2);
    one without key to any. If an append fails, some of its messages may be stored: repeat it,
    readers drop repeats by their idempotence key. Threads may share one instance; processes use
    one each.

    Args:
        bootstrap_servers: ``host:port`` of one or more brokers.
        options: How the broker is talked to.
        schemas: Gives what messages are written and read with; asked at every use.
    """

    def __init__(
        self,
        bootstrap_servers: Sequence[str],
        options: KafkaOptions | None = None,
        *,
        schemas: Callable[[], SchemaTable] = lambda: PACKAGED,
    ) -> None:
        self._servers = list(bootstrap_servers)
        self._options = options or KafkaOptions()
        self._timeout_seconds = self._options.timeout_seconds
        self._schemas = schemas
        self._clients = KafkaClients(self._servers, self._options)
        self._name_to_spec: dict[str, TopicSpec] = {}
        self._purpose_to_consumer: dict[tuple[str, ...], _GuardedConsumer] = {}
        self._admin: Any = None
        self._producer: Any = None
        self._lock = threading.RLock()
        self._process_id: int | None = None
        self._is_closed = False

    @property
    def schemas(self) -> SchemaTable:
        """What messages of this log are written and read with."""
        return self._schemas()

    def create_topic(self, spec: TopicSpec) -> None:
        """Create the topic; a no-op if it exists as declared.

        Raises:
            TopicMismatchError: If it exists with other partitions or another cleanup policy.
        """
        declared = {
            "num_partitions": spec.num_partitions,
            "replication_factor": self._options.replication_factor,
            "configs": {
                "max.message.bytes": str(MAX_MESSAGE_BYTES),
                **spec.configs,
                "cleanup.policy": "compact" if spec.is_compacted else "delete",
            },
        }
        with self._translated(spec.name), self._lock:
            admin = self._admin_client()
            try:
                admin.create_topics({spec.name: declared}, wait_for_metadata=True)
            except TopicAlreadyExistsError:
                admin.wait_for_topics([spec.name])
        found = self._spec(spec.name)
        refuse_mismatch(found=found, declared=spec)

    def num_partitions(self, topic: str) -> int:
        """Return the number of partitions.

        Raises:
            UnknownTopicError: If the topic does not exist.
        """
        return self._spec(topic).num_partitions

    def describe_topic(self, topic: str) -> TopicSpec:
        """Return the topic as it is now, with the settings that the broker tells.

        Raises:
            UnknownTopicError: If the topic does not exist.
        """
        self._name_to_spec.pop(topic, None)
        return self._spec(topic)

    def append(self, topic: str, messages: Sequence[Message]) -> Sequence[tuple[int, int]]:
        """Append in order and return (partition, offset) of each, once all are durable."""
        spec = self._spec(topic)
        refuse_messages(spec, messages)
        with self._translated(topic), self._lent_producer() as producer:
            futures = [
                producer.send(topic, key=m.key, value=m.value, headers=list(m.headers.items()))
                for m in messages
            ]
            producer.flush(timeout=2 * self._timeout_seconds)
            stored = [future.get(timeout=2 * self._timeout_seconds) for future in futures]
        return [(int(record.partition), int(record.offset)) for record in stored]

    def read(
        self,
        topic: str,
        partition: int,
        offset: int,
        *,
        max_messages: int = 500,
        timeout_seconds: float = 0.0,
    ) -> Sequence[StoredMessage]:
        """Return messages from ``offset`` on, waiting at most ``timeout_seconds`` for the first.

        What the broker already holds is fetched even if ``timeout_seconds`` is 0, so an empty
        answer means that there is nothing from ``offset`` on.
        """
        place = self._checked(topic, partition)
        with self._translated(topic), self._consumer("read", topic, str(partition)) as consumer:
            if not consumer.assignment():
                consumer.assign([place])
                consumer.seek(place, offset)
            try:
                records = self._poll(consumer, place, offset, max_messages, timeout_seconds)
            except OffsetOutOfRangeError:
                begin = int(consumer.beginning_offsets([place])[place])
                if offset >= begin:
                    # Beyond the end: what other readers experience as a quiet topic.
                    time.sleep(timeout_seconds)
                    return []
                records = self._poll(consumer, place, begin, max_messages, timeout_seconds)
        return [stored_message(record) for record in records]

    def begin_offset(self, topic: str, partition: int) -> int:
        """Return the first offset that may still be read."""
        place = self._checked(topic, partition)
        with self._translated(topic), self._consumer("offsets") as consumer:
            return int(consumer.beginning_offsets([place])[place])

    def end_offset(self, topic: str, partition: int) -> int:
        """Return the offset that the next message will get."""
        place = self._checked(topic, partition)
        with self._translated(topic), self._consumer("offsets") as consumer:
            return int(consumer.end_offsets([place])[place])

    def commit(self, group: str, topic: str, partition: int, offset: int) -> None:
        """Store a consumer position: the first offset not consumed."""
        place = self._checked(topic, partition)
        with self._translated(topic), self._consumer("group", group) as consumer:
            position = {place: OffsetAndMetadata(offset, "", -1)}
            consumer.commit(position, timeout_ms=self._timeout_ms)

    def committed(self, group: str, topic: str, partition: int) -> int | None:
        """Return the stored position, or None."""
        place = self._checked(topic, partition)
        with self._translated(topic), self._consumer("group", group) as consumer:
            offset = consumer.committed(place, timeout_ms=self._timeout_ms)
        return None if offset is None else int(offset)

    def member(self, topic: str, group: str) -> KafkaMembership:
        """Return a membership in a group on ``topic``, not yet started; its user closes it."""
        self._spec(topic)
        return KafkaMembership(
            lambda assignor: self._clients.member(group, assignor),
            topic,
            session_timeout_seconds=self._options.session_timeout_seconds,
        )

    def reader(self, topic: str) -> KafkaReader:
        """Return a reader of some partitions of ``topic``; its user closes it."""
        self._spec(topic)
        return KafkaReader(
            lambda: self._clients.consumer(None), topic, f"{self._where}: topic {topic}"
        )

    def close(self) -> None:
        """Release everything; idempotent. Calls that run in other threads end first."""
        with self._lock:
            self._is_closed = True
            consumers = list(self._purpose_to_consumer.values())
            self._purpose_to_consumer.clear()
            producer, self._producer = self._producer, None
            admin, self._admin = self._admin, None
        if self._process_id != os.getpid():
            return
        for guarded in consumers:
            with guarded.lock:
                guarded.consumer.close(autocommit=False, timeout_ms=self._timeout_ms)
        if producer is not None:
            producer.close(timeout=self._timeout_seconds)
        if admin is not None:
            admin.close()

    @property
    def _timeout_ms(self) -> int:
        return round(1000 * self._timeout_seconds)

    def _poll(
        self,
        consumer: Any,
        place: TopicPartition,
        offset: int,
        max_messages: int,
        timeout_seconds: float,
    ) -> Sequence[Any]:
        # Without a seek the consumer goes on from what it has prefetched.
        if consumer.position(place, timeout_ms=self._timeout_ms) != offset:
            consumer.seek(place, offset)
        wait_ms = round(1000 * timeout_seconds)
        records = consumer.poll(timeout_ms=wait_ms, max_records=max_messages).get(place, [])
        if records:
            return list(records)
        # Asking for the end also notices a broker that has gone, which poll would not report.
        end = int(consumer.end_offsets([place])[place])
        deadline = time.monotonic() + self._timeout_seconds
        while consumer.position(place, timeout_ms=self._timeout_ms) < end:
            records = consumer.poll(timeout_ms=100, max_records=max_messages).get(place, [])
            if records:
                return list(records)
            if time.monotonic() > deadline:
                raise KafkaTimeoutError(f"offset {offset} of {place} exists but did not arrive")
        return []

    def _spec(self, topic: str) -> TopicSpec:
        spec = self._name_to_spec.get(topic)
        if spec is not None:
            return spec
        with self._translated(topic), self._lock:
            admin = self._admin_client()
            (found,) = admin.describe_topics([topic])
            if found["error_code"] == UnknownTopicOrPartitionError.errno:
                raise UnknownTopicError(f"topic {topic}: does not exist; create it first")
            resource = ConfigResource("topic", topic)
            configs = admin.describe_configs([resource], config_filter="all")["topic"][topic]
        spec = TopicSpec(
            name=topic,
            num_partitions=len(found["partitions"]),
            is_compacted="compact" in configs["cleanup.policy"]["value"],
            configs={name: str(one["value"]) for name, one in configs.items()},
        )
        self._name_to_spec[topic] = spec
        return spec

    def _checked(self, topic: str, partition: int) -> TopicPartition:
        refuse_partition(self._spec(topic), partition)
        return TopicPartition(topic, partition)

    @contextmanager
    def _consumer(self, *purpose: str) -> Iterator[Any]:
        """Lend the consumer of this purpose; one per partition read, one per group."""
        with self._lock:
            self._check_usable()
            guarded = self._purpose_to_consumer.get(purpose)
            if guarded is None:
                group = purpose[1] if purpose[0] == "group" else None
                guarded = _GuardedConsumer(self._clients.consumer(group))
                self._purpose_to_consumer[purpose] = guarded
        with guarded.lock:
            yield guarded.consumer

    @contextmanager
    def _lent_producer(self) -> Iterator[Any]:
        """Lend the producer, and replace it once a batch has failed.

        An idempotent producer numbers its batches; after a lost one it may refuse all others.
        """
        with self._lock:
            self._check_usable()
            if self._producer is None:
                self._producer = self._clients.producer()
            producer = self._producer
        try:
            yield producer
        except MessageSizeTooLargeError:
            # Refused before it was sent; the batches of other threads are on their way.
            raise
        except KafkaError:
            with self._lock:
                if self._producer is producer:
                    self._producer = None
            producer.close(timeout=0)
            raise

    def _admin_client(self) -> Any:
        self._check_usable()
        if self._admin is None:
            self._admin = self._clients.admin()
        return self._admin

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EventLogError(f"{self._where}: the event log is closed; open it again")
        if self._process_id is None:
            self._process_id = os.getpid()
        if self._process_id != os.getpid():
            raise EventLogError(
                f"{self._where}: opened in process {self._process_id}, used in {os.getpid()}; "
                "open the event log after the fork"
            )

    @property
    def _where(self) -> str:
        return f"Kafka at {','.join(self._servers)}"

    @contextmanager
    def _translated(self, topic: str) -> Iterator[None]:
        try:
            yield
        except KafkaError as error:
            raise translated(error, f"{self._where}: topic {topic}") from error
