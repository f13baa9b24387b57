"""The schema registry: its ids are written, its schemas are read, and its absence stops nobody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.configuration.server_settings import SchemaRegistrySettings
from pipeline.configuration.settings import EventLogSettings, Settings, SettingsError
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLog, Message, StoredMessage
from pipeline.messaging.boards import (
    LogEventSender,
    LogEventSource,
    LogPolicyBoard,
    LogReleaseBoard,
)
from pipeline.messaging.event_decoding import decode_events
from pipeline.messaging.event_logs import check_schemas, open_log
from pipeline.messaging.kafka_options import registered_schemas
from pipeline.messaging.schema_registry import (
    NAME_TO_SUBJECT,
    RETRY_SECONDS,
    RegisteredSchemas,
    RegistryAddress,
    RegistryAwayError,
    RegistryClient,
    SchemaRegistryError,
    incompatible_schemas,
)
from schemas.avro import PACKAGED, SchemaTable, newest_text
from schemas.codec import encode
from schemas.equality import first_difference
from schemas.records import from_verification_event
from schemas.topics import DEAD_LETTERS, POLICIES, VERIFICATION_EVENTS
from tests.integration.broker import blank_broker, free_port, kafka_settings
from tests.pipeline.archiving import Clock
from tests.pipeline.messages import event, read_everything
from tests.pipeline.schema_registry_server import Registry, serving
from tests.schemas.builders import PRODUCED_AT, make_event, make_policy, make_release
from tests.schemas.test_evolution import framed, stored_schema

SUBJECT = NAME_TO_SUBJECT["verification_event"]
NEWER = (Path(__file__).parents[2] / "schemas/data/verification_event.v3.avsc").read_text()


@pytest.fixture
def registry() -> Iterator[Registry]:
    with serving(Registry(first_id=41)) as one:
        yield one


def client_of(registry: Registry, timeout_seconds: float = 5.0) -> RegistryClient:
    return RegistryClient(RegistryAddress(url=registry.url, timeout_seconds=timeout_seconds))


class RegisteredLog(EmbeddedEventLog):
    """The embedded log, with the schemas of a registry as on a broker."""

    registered: RegisteredSchemas

    @property
    def schemas(self) -> SchemaTable:
        return self.registered()


@pytest.fixture
def log(tmp_path: Path, registry: Registry) -> Iterator[RegisteredLog]:
    log = RegisteredLog(tmp_path / "log.sqlite")
    log.registered = RegisteredSchemas(client_of(registry))
    for spec in declared_topics(1):
        log.create_topic(spec)
    yield log
    log.close()


def written_ids(log: EventLog, topic: str) -> list[int]:
    values = [stored.message.value or b"" for stored in read_everything(log, topic)]
    return [int.from_bytes(value[1:5], "big") for value in values]


def newer_event(schema_id: int) -> bytes:
    """Return an event as a build of tomorrow writes it, under the registry's id."""
    extra = {"schema_version": 3, "worker_region": "north", "energy_joules": 1.5}
    data = framed(stored_schema(3), from_verification_event(event(1)) | extra)
    return data[:1] + schema_id.to_bytes(4, "big") + data[5:]


def stored(value: bytes) -> StoredMessage:
    message = Message(key=b"stream-a", value=value)
    return StoredMessage(partition=0, offset=0, appended_at=PRODUCED_AT, message=message)


def test_what_is_written_carries_the_ids_of_the_registry_and_is_read_again(
    log: RegisteredLog, registry: Registry
) -> None:
    LogEventSender(lambda: log, source="worker")([event(1), event(2)])
    LogPolicyBoard(log, source="learner").publish([make_policy()])
    LogReleaseBoard(log, source="trainer").publish(make_release())
    assert written_ids(log, VERIFICATION_EVENTS) == [41, 41]
    assert written_ids(log, POLICIES) == [42]
    assert [row.event.sequence for row in LogEventSource(log, [0]).poll(0.0)] == [1, 2]
    assert len(LogPolicyBoard(log, source="learner").read_all()) == 1
    assert len(LogReleaseBoard(log, source="trainer").read_all()) == 1
    assert {s: registry.id_to_text[i[0]] for s, i in registry.subject_to_ids.items()} == {
        subject: newest_text(name) for name, subject in NAME_TO_SUBJECT.items()
    }
    assert len(registry.asked) == len(NAME_TO_SUBJECT)


def test_events_written_before_there_was_a_registry_are_read_with_it(registry: Registry) -> None:
    table = RegisteredSchemas(client_of(registry))()
    rows, letters = decode_events("t", [stored(encode(event(1)))], table=table)
    assert (len(rows), letters) == (1, [])


def test_an_event_of_a_future_schema_is_read_and_its_schema_asked_for_once(
    log: RegisteredLog, registry: Registry
) -> None:
    future = registry.register(SUBJECT, NEWER)
    messages = [Message(key=b"stream-a", value=newer_event(future))] * 3
    log.append(VERIFICATION_EVENTS, messages)
    source = LogEventSource(log, [0])
    rows = source.poll(0.0)
    assert [first_difference(event(1), row.event) for row in rows] == [None] * 3
    assert source.num_dead_letters == 0
    assert registry.asked.count(f"/schemas/ids/{future}") == 1


def test_invalid_future_schemas_that_cannot_be_read_go_to_the_dead_letters_whole(
    log: RegisteredLog, registry: Registry
) -> None:
    definition = json.loads(NEWER)
    definition["fields"] = [one for one in definition["fields"] if one["name"] == "schema_version"]
    texts = [json.dumps(definition), '{"type": "record", "name": "Order", "fields": []}', '"int"']
    values = [newer_event(registry.register(SUBJECT, text)) for text in texts]
    log.append(VERIFICATION_EVENTS, [Message(key=b"stream-a", value=value) for value in values])
    LogEventSender(lambda: log, source="worker")([event(2)])
    source = LogEventSource(log, [0])
    assert [row.event.sequence for row in source.poll(0.0)] == [2]
    assert source.num_dead_letters == len(texts)
    letters = [one.message for one in read_everything(log, DEAD_LETTERS)]
    assert [one.value for one in letters] == values
    reasons = [one.headers["reason"].decode() for one in letters]
    assert reasons[0].startswith("body")
    assert all("expected the id of a schema of Draftloop" in one for one in reasons[1:])


def test_an_unknown_id_is_asked_for_once_in_a_while(registry: Registry) -> None:
    clock = Clock()
    schemas = RegisteredSchemas(client_of(registry), clock.monotonic)
    poison = [stored(newer_event(9999))] * 5
    for _ in range(2):
        _, letters = decode_events("t", poison, table=schemas())
        assert len(letters) == 5
        assert "schema_id: found 9999" in letters[0].reason
    assert registry.asked.count("/schemas/ids/9999") == 1
    clock.seconds += RETRY_SECONDS
    decode_events("t", poison, table=schemas())
    assert registry.asked.count("/schemas/ids/9999") == 2


def test_without_the_registry_at_the_start_the_ids_of_the_build_serve_until_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, absent = Clock(), Registry(port=free_port())
    schemas = RegisteredSchemas(client_of(absent), clock.monotonic)
    for _ in range(3):
        assert encode(event(1), table=schemas()) == encode(event(1))
    assert schemas.is_degraded
    assert schemas.num_failures == 1, "it is left alone for a while"
    clock.seconds += RETRY_SECONDS
    schemas()
    assert schemas.num_failures == 2
    assert caplog.text.count("degraded") == 1, "one outage is said once"
    clock.seconds += RETRY_SECONDS
    with serving(absent):
        assert schemas().newest["verification_event"].schema_id == 1
    assert not schemas.is_degraded
    assert "is back" in caplog.text


def test_without_the_registry_later_what_is_known_serves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    with serving(Registry()) as registry:
        future = registry.register(SUBJECT, NEWER)
        schemas = RegisteredSchemas(client_of(registry), clock.monotonic)
        decode_events("t", [stored(newer_event(future))], table=schemas())
    known = [stored(newer_event(future)), stored(encode(event(1), table=schemas()))]
    rows, _ = decode_events("t", known, table=schemas())
    assert len(rows) == 2
    assert not schemas.is_degraded, "nothing had to be asked"
    for _ in range(2):
        _, letters = decode_events("t", [stored(newer_event(7777))], table=schemas())
        assert "the schema registry cannot be asked" in letters[0].reason
    assert schemas.num_failures == caplog.text.count("degraded") == 1
    clock.seconds += RETRY_SECONDS
    registry.id_to_text[7777] = NEWER
    with serving(registry):
        rows, _ = decode_events("t", [stored(newer_event(7777))], table=schemas())
    assert len(rows) == 1


def test_a_registry_that_answers_slowly_is_one_that_is_away(registry: Registry) -> None:
    registry.answer_seconds = 0.5
    schemas = RegisteredSchemas(client_of(registry, timeout_seconds=0.05))
    assert schemas().newest == PACKAGED.newest
    assert schemas.is_degraded


def test_invalid_ids_that_the_build_has_given_otherwise_are_not_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    taken = PACKAGED.newest["drafter_released"].schema_id
    with serving(Registry(first_id=taken)) as registry:
        schemas = RegisteredSchemas(client_of(registry))
        assert schemas().newest == PACKAGED.newest
    assert f"gives ids [{taken}" in caplog.text


def test_invalid_schema_for_the_subject_is_an_error_in_one_line_and_no_event_is_lost(
    log: RegisteredLog, registry: Registry
) -> None:
    registry.refuses.add(SUBJECT)
    send = LogEventSender(lambda: log, source="worker")
    with pytest.raises(SchemaRegistryError, match=r"status 409: .*incompatible.*upgrade") as error:
        send([event(1)])
    assert "\n" not in str(error.value)
    assert send.num_unsendable == 0
    registry.refuses.clear()
    send([event(1)])
    assert written_ids(log, VERIFICATION_EVENTS) == [41]


def test_the_check_names_subjects_that_would_refuse(registry: Registry) -> None:
    assert incompatible_schemas(client_of(registry)) == [], "without any schema all are welcome"
    RegisteredSchemas(client_of(registry))()
    registry.refuses.add(SUBJECT)
    (line,) = incompatible_schemas(client_of(registry))
    assert SUBJECT in line


def test_invalid_password_is_named_with_its_keys(registry: Registry) -> None:
    registry.password = "right-and-long"
    for password in ("right-and-long", "wrong"):
        address = RegistryAddress(url=registry.url, username="draftloop", password=password)
        client = RegistryClient(address)
        if password == "wrong":
            with pytest.raises(RegistryAwayError, match=r"401.*correct schema_registry.username"):
                client.schema(1)
        else:
            assert client.schema(1) is None
        assert password not in repr(address)


def test_invalid_certificates_file_is_named() -> None:
    one = SchemaRegistrySettings(url="https://127.0.0.1:1", ca_file=Path("/none"))
    with pytest.raises(SettingsError, match=r"schema_registry\.ca_file"):
        registered_schemas(Settings(schema_registry=one))


@pytest.mark.external_service
def test_on_a_broker_the_settings_name_the_registry(tmp_path: Path, registry: Registry) -> None:
    with blank_broker(tmp_path) as servers:
        settings = Settings(
            data=tmp_path,
            event_log=EventLogSettings(url=f"kafka://{servers}"),
            kafka=kafka_settings(servers),
            schema_registry=SchemaRegistrySettings(url=registry.url),
        )
        with closing(open_log(settings)) as log:
            assert isinstance(log, KafkaEventLog)
            LogEventSender(lambda: log, source="worker")([make_event(stream="stream-a")])
            assert written_ids(log, VERIFICATION_EVENTS) == [41]
        assert check_schemas(settings) == []
