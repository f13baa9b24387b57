"""Events as messages, whole and broken, and a log that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLog, EventLogError, Message, StoredMessage
from schemas import codec
from schemas.codec import encode
from schemas.events import VerificationEvent
from tests.schemas.builders import make_event


def open_log(folder: Path, *, num_partitions: int) -> EmbeddedEventLog:
    log = EmbeddedEventLog(folder / "log.sqlite")
    for spec in declared_topics(num_partitions):
        log.create_topic(spec)
    return log


def event(sequence: int, *, stream: str = "stream-a") -> VerificationEvent:
    return make_event(num_windows=1, sequence=sequence, stream=stream)


def message(sequence: int, *, stream: str = "stream-a") -> Message:
    return Message(key=stream.encode(), value=encode(event(sequence, stream=stream)))


def broken(value: bytes | None) -> Message:
    return Message(key=b"stream-a", value=value, headers={"ce_id": b"x"})


def read_everything(log: EventLog, topic: str) -> list[StoredMessage]:
    return [
        stored
        for partition in range(log.num_partitions(topic))
        for stored in log.read(topic, partition, 0)
    ]


def encoded(messages: Iterable[codec.Message]) -> list[bytes]:
    """Make messages comparable, arrays and all."""
    return [encode(message) for message in messages]


class FailingAppends:
    """The log, whose appends to one topic fail a number of times."""

    def __init__(self, log: EventLog, topic: str, failures: int) -> None:
        self._log = log
        self._topic = topic
        self.failures = failures

    def append(self, topic: str, messages: Sequence[Message]) -> Sequence[tuple[int, int]]:
        if topic == self._topic and self.failures > 0:
            self.failures -= 1
            raise EventLogError("down")
        return self._log.append(topic, messages)

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)
