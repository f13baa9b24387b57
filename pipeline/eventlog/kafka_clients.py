"""The settings of our Kafka clients, and building one without leaving anything behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.net.compat import KafkaNetClient

MAX_MESSAGE_BYTES = 8 * 2**20
"""Largest message that our topics and our producer accept."""

_BATCH_BYTES = 256 * 2**10
_LINGER_MILLISECONDS = 5
_LONGEST_RECONNECT_MILLISECONDS = 1000


class KafkaClients:
    """Builds clients of one cluster; building one waits for a broker.

    Args:
        bootstrap_servers: ``host:port`` of one or more brokers.
        timeout_seconds: How long building a client, or a request of it, may take, > 0.
        compression: Codec of the producer's batches.
    """

    def __init__(
        self, bootstrap_servers: Sequence[str], *, timeout_seconds: float, compression: str
    ) -> None:
        self._servers = list(bootstrap_servers)
        self._timeout_milliseconds = round(1000 * timeout_seconds)
        self._compression = compression

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

    def producer(self) -> Any:
        """Build a producer that calls a message sent once all replicas have it."""
        settings = {
            "max_block_ms": self._timeout_milliseconds,
            # The client asks for more than one request and its linger.
            "delivery_timeout_ms": 2 * self._timeout_milliseconds,
            "enable_idempotence": True,
            "acks": "all",
            "compression_type": self._compression,
            "batch_size": _BATCH_BYTES,
            "linger_ms": _LINGER_MILLISECONDS,
            "max_request_size": MAX_MESSAGE_BYTES,
            "allow_auto_create_topics": False,
            "metrics_enabled": False,
        }
        return self._build(KafkaProducer, settings)

    def _build(self, client_type: Any, settings: Mapping[str, Any]) -> Any:
        connections: list[Any] = []

        # The signature is the client's: it hands over all of its settings.
        def remembered_connection(**everything: Any) -> Any:
            connections.append(KafkaNetClient(**everything))
            return connections[-1]

        try:
            return client_type(
                bootstrap_servers=self._servers,
                bootstrap_timeout_ms=self._timeout_milliseconds,
                request_timeout_ms=self._timeout_milliseconds,
                reconnect_backoff_max_ms=_LONGEST_RECONNECT_MILLISECONDS,
                kafka_client=remembered_connection,
                **settings,
            )
        except BaseException:
            # A client that found no broker would leave its thread and sockets to us for ever.
            for connection in connections:
                connection.close()
            raise
