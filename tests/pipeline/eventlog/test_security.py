"""TLS and passwords of a broker: what is right works, what is wrong says so in one line, soon."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.configuration.settings import KafkaSettings
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.eventlog.ports import EventLogError, EventLogUnavailableError, Message, TopicSpec
from pipeline.messaging.boards import LogEventSender
from pipeline.messaging.group_source import GroupEventSource
from pipeline.messaging.kafka_options import kafka_options
from pipeline.messaging.topics import TopicPlan, create_topics
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.broker import free_port, own_broker
from tests.integration.broker_proxy import make_certificate, tls_proxy
from tests.integration.kafka_client import forgets_sockets, sockets_freed_here
from tests.integration.sasl_refusal import refusing_listener
from tests.pipeline.messages import event

MOST_SECONDS = 20.0
"""Far less than the client's patience, which is set to the default of 30 s."""

pytestmark = forgets_sockets


@pytest.fixture(autouse=True, scope="module")
def _refused_sockets_are_freed_here() -> Iterator[None]:
    with sockets_freed_here():
        yield


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("certificate"), "broker")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_broker(tmp_path_factory.mktemp("plain"), free_port()) as servers:
        yield servers


@pytest.fixture
def secured(plain: str, certificate: Path) -> Iterator[str]:
    with tls_proxy(plain, certificate) as servers:
        yield servers


def options(settings: KafkaSettings) -> KafkaOptions:
    return kafka_options(settings)


def refusal(servers: str, settings: KafkaSettings) -> str:
    """Return the error of the first use, which must come soon and in one line."""
    began = time.monotonic()
    with closing(KafkaEventLog([servers], options(settings))) as log:
        with pytest.raises(EventLogError) as caught:
            log.num_partitions("topic")
        assert not isinstance(caught.value, EventLogUnavailableError), "to be tried for ever"
    assert time.monotonic() - began < MOST_SECONDS
    message = str(caught.value)
    assert "\n" not in message
    assert servers in message
    return message


@pytest.mark.external_service
def test_everything_goes_over_tls(secured: str, certificate: Path) -> None:
    settings = KafkaSettings(
        security_protocol="SSL", ssl_ca_file=certificate, session_timeout_seconds=6.0
    )
    with closing(KafkaEventLog([secured], options(settings))) as log:
        create_topics(log, TopicPlan(num_partitions=2))
        LogEventSender(lambda: log, source="worker")([event(n) for n in range(50)])
        with closing(GroupEventSource(log)) as source:
            found: list[int] = []
            deadline = time.monotonic() + 60
            while len(found) < 50:
                assert time.monotonic() < deadline
                positions = dict.fromkeys(source.partitions, 0)
                found += [received.event.sequence for received in source.poll(0.05)]
                for partition in set(source.partitions) - set(positions):
                    source.seek(partition, 0)
        assert sorted(found) == list(range(50))
        log.commit("group", VERIFICATION_EVENTS, 0, 7)
        assert log.committed("group", VERIFICATION_EVENTS, 0) == 7


@pytest.mark.external_service
def test_invalid_certificate_of_the_broker_is_refused_with_the_key_to_correct(
    secured: str, tmp_path: Path
) -> None:
    another = make_certificate(tmp_path, "another")
    message = refusal(secured, KafkaSettings(security_protocol="SSL", ssl_ca_file=another))
    assert "CERTIFICATE_VERIFY_FAILED" in message
    assert "correct kafka.ssl_ca_file" in message


@pytest.mark.external_service
def test_invalid_host_of_the_certificate_is_refused_unless_told_otherwise(
    plain: str, tmp_path: Path
) -> None:
    elsewhere = make_certificate(tmp_path, "elsewhere", address="192.0.2.1")
    with tls_proxy(plain, elsewhere) as servers:
        trusting = KafkaSettings(security_protocol="SSL", ssl_ca_file=elsewhere)
        assert "correct kafka.ssl_ca_file, or the broker's" in refusal(servers, trusting)
        careless = trusting.model_copy(update={"ssl_checks_hostname": False})
        with closing(KafkaEventLog([servers], options(careless))) as log:
            log.create_topic(TopicSpec(name="careless", num_partitions=1))
            log.append("careless", [Message(key=b"k", value=b"v")])
            assert len(log.read("careless", 0, 0)) == 1


@pytest.mark.external_service
@pytest.mark.parametrize("protocol", ["SSL", "PLAINTEXT"])
def test_invalid_protocol_for_the_listener_is_named(
    plain: str, secured: str, certificate: Path, protocol: str
) -> None:
    one = KafkaSettings.model_validate(
        {"security_protocol": protocol, "ssl_ca_file": certificate, "timeout_seconds": 2.0}
    )
    servers = plain if protocol == "SSL" else secured
    log = KafkaEventLog([servers], options(one))
    with closing(log), pytest.raises(EventLogUnavailableError) as caught:
        log.num_partitions("topic")
    assert "kafka.security_protocol" in str(caught.value)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-512"])
def test_invalid_password_is_refused_at_once_and_never_shown(mechanism: str) -> None:
    settings = KafkaSettings.model_validate(
        {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": mechanism,
            "sasl_username": "learner",
            "sasl_password": "wrong-canary",
        }
    )
    with refusing_listener(mechanism) as servers:
        message = refusal(servers, settings)
    assert "Invalid username or password" in message
    assert "correct kafka.sasl_username, kafka.sasl_password" in message
    assert "canary" not in message


def test_invalid_mechanism_is_refused_with_its_key() -> None:
    settings = KafkaSettings(
        security_protocol="SASL_PLAINTEXT", sasl_username="learner", sasl_password="any"
    )
    with refusing_listener("PLAIN") as servers:
        assert "correct kafka.sasl_mechanism" in refusal(servers, settings)


def test_invalid_password_ends_a_member_instead_of_being_tried_for_ever() -> None:
    settings = KafkaSettings(
        security_protocol="SASL_PLAINTEXT",
        sasl_mechanism="PLAIN",
        sasl_username="learner",
        sasl_password="wrong",
    )
    with refusing_listener("PLAIN") as servers:
        log = KafkaEventLog([servers], options(settings))
        log._name_to_spec[VERIFICATION_EVENTS] = TopicSpec(name="t", num_partitions=1)
        with closing(log), closing(log.member(VERIFICATION_EVENTS, "group")) as member:
            member.start()
            deadline = time.monotonic() + MOST_SECONDS
            with pytest.raises(EventLogError, match=r"kafka\.sasl_password"):
                while time.monotonic() < deadline:
                    member.take_changes()
                    time.sleep(0.02)
