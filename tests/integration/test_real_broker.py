"""What only a real broker can show: writes that survive it, failover, refused credentials.

The emulated broker of the other tests forgets acknowledged writes when it is killed, has one node
and neither TLS nor SASL. So these run against the broker that ``KAFKA_BOOTSTRAP_SERVERS`` names,
and need commands that kill and start it (``docker kill -s KILL kafka``, ``docker start kafka``).
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.configuration.settings import KafkaSettings
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.eventlog.ports import EventLogError, EventLogUnavailableError, Message, TopicSpec
from pipeline.messaging.kafka_options import kafka_options
from tests.integration.broker import BOOTSTRAP_VARIABLE, kafka_log, kafka_settings
from tests.integration.broker_proxy import make_certificate
from tests.integration.kafka_client import forgets_sockets, sockets_freed_here

KILL, START, FAIL_OVER = "KAFKA_KILL_COMMAND", "KAFKA_START_COMMAND", "KAFKA_FAILOVER_COMMAND"
MOST_SECONDS = 180.0
NUM_BEFORE = 200
OPTIONS = KafkaOptions(timeout_seconds=10.0)

pytestmark = [
    pytest.mark.real_broker,
    pytest.mark.external_service,
    pytest.mark.timeout(600),
    forgets_sockets,
]


def needs(*variables: str, what: str) -> pytest.MarkDecorator:
    """Skip with a reason unless a real broker is named, and what else a test needs."""
    missing = [name for name in (BOOTSTRAP_VARIABLE, *variables) if not os.environ.get(name)]
    reason = f"{what}: set {', '.join(missing)} for an Apache Kafka (docs/kafka.md)"
    return pytest.mark.skipif(bool(missing), reason=reason)


@pytest.fixture
def servers() -> Iterator[str]:
    with sockets_freed_here():
        yield os.environ[BOOTSTRAP_VARIABLE]


@pytest.fixture
def topic(servers: str) -> Iterator[str]:
    name = f"real-{uuid.uuid4().hex}"
    with closing(kafka_log(servers, OPTIONS)) as log:
        log.create_topic(TopicSpec(name=name, num_partitions=1))
        yield name


class Writer:
    """Appends one message after another and remembers which were acknowledged, and where."""

    def __init__(self, log: KafkaEventLog, topic: str) -> None:
        self._log = log
        self._topic = topic
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        # Not by offset: a broker that forgets gives an offset away again.
        self.acknowledged: list[tuple[int, bytes]] = []
        self.num_refused = 0

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            value = b"%d" % number
            try:
                ((_, offset),) = self._log.append(self._topic, [Message(key=b"k", value=value)])
            except EventLogError:
                self.num_refused += 1
                time.sleep(0.1)
                continue
            self.acknowledged.append((offset, value))
            number += 1


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {MOST_SECONDS:.0f} s in vain"
        time.sleep(0.05)


def run(variable: str) -> None:
    subprocess.run(os.environ[variable], shell=True, check=True, timeout=MOST_SECONDS)


def everything(servers: str, topic: str) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    with closing(kafka_log(servers, OPTIONS)) as log:
        offset = 0
        while page := log.read(topic, 0, offset, timeout_seconds=5.0):
            found |= {stored.offset: stored.message.value for stored in page}
            offset = page[-1].offset + 1
    return found


def lost(writer: Writer, found: Mapping[int, bytes | None]) -> list[tuple[int, bytes]]:
    return [(offset, value) for offset, value in writer.acknowledged if found.get(offset) != value]


@needs(KILL, START, what="acknowledged writes after kill -9")
def test_writes_that_were_acknowledged_are_there_after_kill_9(servers: str, topic: str) -> None:
    with closing(kafka_log(servers, OPTIONS)) as log, Writer(log, topic) as writer:
        until(lambda: len(writer.acknowledged) >= NUM_BEFORE)
        run(KILL)
        until(lambda: writer.num_refused > 0)
        run(START)
        count = len(writer.acknowledged)
        until(lambda: len(writer.acknowledged) >= count + NUM_BEFORE)
    assert lost(writer, everything(servers, topic)) == []


@needs(FAIL_OVER, what="failover")
def test_another_node_takes_over_and_nothing_acknowledged_is_lost(servers: str, topic: str) -> None:
    with closing(kafka_log(servers, OPTIONS)) as log, Writer(log, topic) as writer:
        until(lambda: len(writer.acknowledged) >= NUM_BEFORE)
        run(FAIL_OVER)
        count = len(writer.acknowledged)
        until(lambda: len(writer.acknowledged) >= count + NUM_BEFORE)
    assert lost(writer, everything(servers, topic)) == []


def refusal(servers: str, settings: KafkaSettings) -> str:
    options = replace(kafka_options(settings), timeout_seconds=20.0)
    log = KafkaEventLog(servers.split(","), options)
    with closing(log), pytest.raises(EventLogError) as caught:
        log.num_partitions("any")
    assert not isinstance(caught.value, EventLogUnavailableError)
    return str(caught.value)


@needs("KAFKA_SASL_PASSWORD", what="wrong credentials")
def test_invalid_password_is_refused_with_its_key(servers: str) -> None:
    wrong = kafka_settings(servers).model_copy(update={"sasl_password": "not-the-password"})
    message = refusal(servers, wrong)
    assert "kafka.sasl_password" in message
    assert "not-the-password" not in message


@needs("KAFKA_SSL_CA_FILE", what="wrong CA")
def test_invalid_authority_is_refused_with_its_key(servers: str, tmp_path: Path) -> None:
    other = make_certificate(tmp_path, "other")
    wrong = kafka_settings(servers).model_copy(update={"ssl_ca_file": other})
    assert "kafka.ssl_ca_file" in refusal(servers, wrong)
