"""The settings of our Kafka clients, and building one without leaving anything behind."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.errors import KafkaTimeoutError
from kafka.net.compat import KafkaNetClient
from kafka.net.selector import NetworkSelector

from pipeline.eventlog.kafka_connections import TellingManager
from pipeline.messaging.topics import MAX_MESSAGE_BYTES

_LONGEST_RECONNECT_MILLISECONDS = 1000
_SESSIONS_PER_REBALANCE = 2
_HEARTBEATS_PER_SESSION = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class KafkaOptions:
    """How a broker is talked to.

    Attributes:
        timeout_seconds: How long a call waits for the broker before it gives up, > 0.
        compression: Codec of the batches, ``lz4`` or ``zstd``.
        batch_bytes: Bytes of a partition that are sent together.
        linger_milliseconds: How long a batch waits to be filled.
        replication_factor: Copies of the topics made here; -1 for the broker's default.
        session_timeout_seconds: A member of a group that was silent for so long has left it.
        security: TLS and SASL settings by the client's own names, passed through.
    """

    timeout_seconds: float = 30.0
    compression: str = "lz4"
    batch_bytes: int = 256 * 2**10
    linger_milliseconds: int = 5
    replication_factor: int = -1
    session_timeout_seconds: float = 15.0
    security: Mapping[str, Any] = field(default_factory=dict, repr=False)


class KafkaClients:
    """Builds clients of one cluster; building one waits for a broker.

    Args:
        bootstrap_servers: ``host:port`` of one or more brokers.
        options: How it is talked to.
    """

    def __init__(self, bootstrap_servers: Sequence[str], options: KafkaOptions) -> None:
        self._servers = list(bootstrap_servers)
        self._options = options
        self._timeout_milliseconds = round(1000 * options.timeout_seconds)

    def admin(self) -> Any:
        """Build a client that makes and describes topics."""
        return self._build(KafkaAdminClient, {})

    def consumer(self, group: str | None) -> Any:
        """Build a consumer that commits by hand, if at all, and never guesses a position."""
        settings = {
            "group_id": group,
            "enable_auto_commit": False,
            "auto_offset_reset": "none",
            "allow_auto_create_topics": False,
            "max_partition_fetch_bytes": MAX_MESSAGE_BYTES,
            "metrics_enabled": False,
        }
        return self._build(KafkaConsumer, settings)

    def member(self, group: str, assignor: AbstractPartitionAssignor) -> Any:
        """Build a consumer that joins a group, which gives and takes partitions by ``assignor``."""
        session_milliseconds = round(1000 * self._options.session_timeout_seconds)
        settings = {
            "group_id": group,
            "enable_auto_commit": False,
            "auto_offset_reset": "latest",
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
            "partition_assignment_strategy": [assignor],
            "session_timeout_ms": session_milliseconds,
            "heartbeat_interval_ms": session_milliseconds // _HEARTBEATS_PER_SESSION,
            # The membership's thread polls at least once a session. It is also how long the group
            # waits for a member that does not join again, and how long a member waits for an answer
            # to its joining before it asks again: five minutes by default.
            "max_poll_interval_ms": _SESSIONS_PER_REBALANCE * session_milliseconds,
        }
        return self._build(KafkaConsumer, settings)

    def producer(self) -> Any:
        """Build a producer that calls a message sent once all replicas have it."""
        settings = {
            "max_block_ms": self._timeout_milliseconds,
            # The client asks for more than one request and its linger.
            "delivery_timeout_ms": 2 * self._timeout_milliseconds,
            "enable_idempotence": True,
            "acks": "all",
            "compression_type": self._options.compression,
            "batch_size": self._options.batch_bytes,
            "linger_ms": self._options.linger_milliseconds,
            "max_request_size": MAX_MESSAGE_BYTES,
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
        }
        return self._build(KafkaProducer, settings)

    def _build(self, client_type: Any, settings: Mapping[str, Any]) -> Any:
        connections: list[Any] = []
        managers: list[TellingManager] = []

        # The signature is the client's: it hands over all of its settings.
        def remembered_connection(**everything: Any) -> Any:
            network = NetworkSelector(**everything)
            managers.append(TellingManager(network, **everything))
            connections.append(KafkaNetClient(net=network, manager=managers[-1], **everything))
            return connections[-1]

        try:
            return client_type(
                bootstrap_servers=self._servers,
                # Names the process in the broker's log and in the description of a group.
                client_id=f"draftloop-{os.getpid()}",
                bootstrap_timeout_ms=self._timeout_milliseconds,
                request_timeout_ms=self._timeout_milliseconds,
                reconnect_backoff_max_ms=_LONGEST_RECONNECT_MILLISECONDS,
                kafka_client=remembered_connection,
                **{**settings, **self._options.security},
            )
        except BaseException as error:
            # A client that found no broker would leave its thread and sockets to us for ever.
            for connection in connections:
                connection.close()
            failures = [one.failure for one in managers if one.failure is not None]
            if isinstance(error, KafkaTimeoutError) and failures:
                # The client's own words name neither a refused connection nor a wrong protocol.
                raise KafkaTimeoutError(str(failures[-1])) from error
            raise
