"""Open the event log that a URL names, and declare the topics that the services share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import EventLog, EventLogError
from pipeline.messaging.topics import declared_topics
from schemas.avro import PACKAGED, SchemaTable

if TYPE_CHECKING:
    from pipeline.eventlog.kafka_clients import KafkaOptions

__all__ = ["FILE_NAME", "declared_topics", "open_event_log"]

FILE_NAME = "eventlog.sqlite"
"""Name of the embedded log inside a folder."""

_SQLITE = "sqlite:///"
_KAFKA = "kafka://"


def open_event_log(
    url: str,
    kafka: KafkaOptions | None = None,
    *,
    schemas: Callable[[], SchemaTable] = lambda: PACKAGED,
) -> EventLog:
    """Open the embedded log or the one on a Kafka broker.

    Args:
        url: ``kafka://host:port,host:port``; or ``sqlite:///`` and the path of a file, as in
            ``sqlite:///data/log.sqlite`` (relative) and ``sqlite:////srv/log.sqlite``
            (absolute); or the plain path of a folder, which then holds ``eventlog.sqlite``.
        kafka: How a broker is talked to.
        schemas: Gives what messages on a broker are written and read with.

    Raises:
        EventLogError: If the URL is of another kind, or the embedded log cannot be opened. A
            broker is contacted at first use.
    """
    if url.startswith(_KAFKA):
        servers = [server for server in url.removeprefix(_KAFKA).rstrip("/").split(",") if server]
        if not servers or not all(_has_port(server) for server in servers):
            raise EventLogError(f"event log {url}: name brokers as kafka://host:port,host:port")
        # Imported here: the embedded log must not pay for the Kafka client's start-up.
        from pipeline.eventlog.kafka import KafkaEventLog

        return KafkaEventLog(servers, kafka, schemas=schemas)
    if url.startswith(_SQLITE) and len(url) > len(_SQLITE):
        return EmbeddedEventLog(Path(url.removeprefix(_SQLITE)))
    if "://" in url or not url:
        raise EventLogError(f"event log {url!r}: use a folder, sqlite:///FILE or kafka://host:port")
    return EmbeddedEventLog(Path(url) / FILE_NAME)


def _has_port(server: str) -> bool:
    host, _, port = server.rpartition(":")
    return bool(host) and port.isdecimal()
