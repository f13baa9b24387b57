"""A broker that the user names, for the benchmarks that otherwise start one of their own."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.eventlog.kafka_clients import KafkaClients, KafkaOptions
from pipeline.local_broker import BenchError
from pipeline.messaging.topics import TopicPlan

GONE_SECONDS = 30.0
LOOK_SECONDS = 0.2


class GivenBroker:
    """A broker that is stopped and started by commands of a shell.

    Args:
        servers: ``host:port`` of one or more brokers, running.
        stop_command: Stops it and returns.
        start_command: Starts it again on the same data and returns.
    """

    def __init__(self, servers: str, stop_command: str, start_command: str) -> None:
        self.servers = servers
        self._stop_command = stop_command
        self._start_command = start_command
        self._is_stopped = False

    def start(self) -> None:
        """Start it if it was stopped."""
        if self._is_stopped:
            _run(self._start_command)
            self._is_stopped = False

    def stop(self) -> None:
        """Stop it."""
        _run(self._stop_command)
        self._is_stopped = True

    def close(self) -> None:
        """Leave it running, as it was found."""
        self.start()


def _run(command: str) -> None:
    ended = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    if ended.returncode:
        told = (ended.stderr or ended.stdout).strip()[-300:]
        raise BenchError(f"{command!r} ended with status {ended.returncode}: {told}")


@contextmanager
def emptied_broker(servers: str, options: KafkaOptions) -> Iterator[str]:
    """Yield the servers, and delete the topics that the block has made there.

    Raises:
        BenchError: If topics of ours are there already: they are not the benchmark's to delete.
    """
    names = {topic.name for topic in TopicPlan().declared()}
    admin = KafkaClients(servers.split(","), options).admin()
    try:
        if found := sorted(names & set(admin.list_topics())):
            raise BenchError(
                f"Kafka at {servers} holds {', '.join(found)}; name a broker that holds nothing "
                "of ours, or delete them there"
            )
        yield servers
        admin.delete_topics(sorted(names & set(admin.list_topics())))
        _wait_until_gone(admin, names)
    finally:
        admin.close()


def _wait_until_gone(admin: Any, names: set[str]) -> None:
    deadline = time.monotonic() + GONE_SECONDS
    while found := names & set(admin.list_topics()):
        if time.monotonic() > deadline:
            raise BenchError(f"{', '.join(sorted(found))} not deleted in {GONE_SECONDS:.0f} s")
        time.sleep(LOOK_SECONDS)
