"""What every event log promises, asked of both adapters."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import (
    EventLog,
    EventLogError,
    Message,
    StoredMessage,
    TopicMismatchError,
    TopicSpec,
    UnknownTopicError,
)
from tests.integration.broker import kafka_log

OpenLog = Callable[[], EventLog]


@pytest.fixture(
    params=["embedded", pytest.param("kafka", marks=pytest.mark.external_service)],
)
def open_log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenLog]:
    """Open the same log again and again; everything is closed at the end."""
    opened: list[EventLog] = []
    if request.param == "kafka":
        servers: str = request.getfixturevalue("bootstrap_servers")

    def open_one() -> EventLog:
        log: EventLog = (
            EmbeddedEventLog(tmp_path / "log.sqlite")
            if request.param == "embedded"
            else kafka_log(servers)
        )
        opened.append(log)
        return log

    yield open_one
    for log in opened:
        log.close()


@pytest.fixture
def log(open_log: OpenLog) -> EventLog:
    return open_log()


@pytest.fixture
def topic(log: EventLog) -> str:
    """A new topic with three partitions."""
    return _new_topic(log, num_partitions=3)


def _new_topic(log: EventLog, *, num_partitions: int, is_compacted: bool = False) -> str:
    name = f"contract-{uuid.uuid4().hex}"
    spec = TopicSpec(name=name, num_partitions=num_partitions, is_compacted=is_compacted)
    log.create_topic(spec)
    return name


def _read_to_end(log: EventLog, topic: str, partition: int) -> list[StoredMessage]:
    offset, found = log.begin_offset(topic, partition), list[StoredMessage]()
    while page := log.read(topic, partition, offset, max_messages=7):
        found += page
        offset = page[-1].offset + 1
    return found


def _numbered(count: int, *, key: bytes = b"key") -> list[Message]:
    return [Message(key=key, value=b"%d" % number) for number in range(count)]


def _values(stored: Sequence[StoredMessage]) -> list[bytes | None]:
    return [message.message.value for message in stored]


def test_messages_of_one_key_share_a_partition_and_keep_their_order(
    log: EventLog, topic: str
) -> None:
    keys = [b"key-%d" % (number % 5) for number in range(60)]
    messages = [Message(key=key, value=b"%d" % n) for n, key in enumerate(keys)]
    for start in range(0, 60, 11):
        log.append(topic, messages[start : start + 11])
    stored = [m for partition in range(3) for m in _read_to_end(log, topic, partition)]
    assert len(stored) == 60
    for key in set(keys):
        of_key = [m for m in stored if m.message.key == key]
        assert len({m.partition for m in of_key}) == 1
        assert _values(of_key) == [m.value for m in messages if m.key == key]


def test_append_returns_where_each_message_can_be_read(log: EventLog, topic: str) -> None:
    messages = [Message(key=b"k%d" % n, value=b"%d" % n) for n in range(20)]
    for (partition, offset), message in zip(log.append(topic, messages), messages, strict=True):
        (stored,) = log.read(topic, partition, offset, max_messages=1)
        assert (stored.partition, stored.offset, stored.message) == (partition, offset, message)


def test_offsets_start_at_zero_and_grow_by_one(log: EventLog, topic: str) -> None:
    places = log.append(topic, _numbered(5)) + log.append(topic, _numbered(3))  # type: ignore[operator]
    partition = places[0][0]
    assert places == [(partition, offset) for offset in range(8)]
    assert log.begin_offset(topic, partition) == 0
    assert log.end_offset(topic, partition) == 8


def test_an_empty_topic_begins_and_ends_at_zero_and_reads_empty(log: EventLog, topic: str) -> None:
    assert log.append(topic, []) == []
    assert (log.begin_offset(topic, 1), log.end_offset(topic, 1)) == (0, 0)
    assert list(log.read(topic, 1, 0)) == []


def test_headers_survive_byte_for_byte(log: EventLog, topic: str) -> None:
    headers = {"ce_id": b"\x00\xff\xfe", "ce_type": "é".encode(), "empty": b""}
    ((partition, offset),) = log.append(topic, [Message(key=b"k", value=b"v", headers=headers)])
    (stored,) = log.read(topic, partition, offset)
    assert stored.message.headers == headers


@pytest.mark.parametrize(
    ("key", "value"),
    [(None, b""), (None, b"v"), (b"", None), (b"", b""), (b"\x00\xff", None), (b"k", b"\x00\xff")],
)
def test_missing_and_empty_keys_and_values_stay_different(
    log: EventLog, topic: str, key: bytes | None, value: bytes | None
) -> None:
    message = Message(key=key, value=value)
    ((partition, offset),) = log.append(topic, [message])
    (stored,) = log.read(topic, partition, offset)
    assert stored.message == message


@pytest.mark.parametrize("num_bytes", [2**20, 5 * 2**20])
def test_large_messages_pass(log: EventLog, topic: str, num_bytes: int) -> None:
    value = bytes(range(256)) * (num_bytes // 256)
    ((partition, offset),) = log.append(topic, [Message(key=b"k", value=value)])
    (stored,) = log.read(topic, partition, offset, timeout_seconds=5)
    assert stored.message.value == value


def test_the_time_of_appending_is_the_clock_in_utc(log: EventLog, topic: str) -> None:
    before = datetime.now(UTC)
    ((partition, offset),) = log.append(topic, _numbered(1))
    (stored,) = log.read(topic, partition, offset)
    assert stored.appended_at.utcoffset() == timedelta(0)
    assert abs(stored.appended_at - before) < timedelta(seconds=10)


def test_read_starts_at_the_offset_and_stops_at_max_messages(log: EventLog, topic: str) -> None:
    partition = log.append(topic, _numbered(10))[0][0]
    assert _values(log.read(topic, partition, 4, max_messages=3)) == [b"4", b"5", b"6"]
    assert _values(log.read(topic, partition, 9, max_messages=3)) == [b"9"]
    assert _values(log.read(topic, partition, 2, max_messages=1)) == [b"2"]


def test_a_waiting_read_wakes_when_a_message_arrives(log: EventLog, topic: str) -> None:
    partition = log.append(topic, _numbered(1))[0][0]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(log.read, topic, partition, 1, timeout_seconds=200)
        time.sleep(0.3)
        assert not waiting.done()
        log.append(topic, _numbered(1))
        assert len(waiting.result(timeout=60)) == 1


def test_a_waiting_read_gives_up_after_its_timeout(log: EventLog, topic: str) -> None:
    start = time.monotonic()
    assert list(log.read(topic, 0, 0, timeout_seconds=0.3)) == []
    assert time.monotonic() - start > 0.25


def test_read_without_timeout_returns_what_is_stored(open_log: OpenLog, topic: str) -> None:
    open_log().append(topic, _numbered(3, key=b"k"))
    stored = [m for partition in range(3) for m in open_log().read(topic, partition, 0)]
    assert _values(stored) == [b"0", b"1", b"2"]


def test_read_beyond_the_end_is_empty(log: EventLog, topic: str) -> None:
    partition = log.append(topic, _numbered(2))[0][0]
    assert list(log.read(topic, partition, 50)) == []
    assert _values(log.read(topic, partition, 1)) == [b"1"]


def test_a_compacted_topic_keeps_the_newest_message_of_every_key(log: EventLog) -> None:
    topic = _new_topic(log, num_partitions=1, is_compacted=True)
    for number in range(30):
        log.append(topic, [Message(key=b"k%d" % (number % 3), value=b"%d" % number)])
    log.append(topic, [Message(key=b"k1", value=None)])
    stored = _read_to_end(log, topic, 0)
    newest = {m.message.key: (m.offset, m.message.value) for m in stored}
    assert newest == {b"k0": (27, b"27"), b"k1": (30, None), b"k2": (29, b"29")}
    assert log.begin_offset(topic, 0) <= stored[0].offset
    assert log.end_offset(topic, 0) == 31


def test_positions_survive_reopening_and_belong_to_their_group(
    open_log: OpenLog, log: EventLog, topic: str
) -> None:
    group, other = f"g-{uuid.uuid4().hex}", f"g-{uuid.uuid4().hex}"
    log.append(topic, _numbered(9))
    assert log.committed(group, topic, 0) is None
    log.commit(group, topic, 0, 4)
    log.commit(group, topic, 0, 7)
    log.commit(other, topic, 0, 2)
    log.close()
    reopened = open_log()
    assert reopened.committed(group, topic, 0) == 7
    assert reopened.committed(other, topic, 0) == 2
    assert reopened.committed(group, topic, 1) is None


def test_messages_survive_reopening_and_offsets_go_on(
    open_log: OpenLog, log: EventLog, topic: str
) -> None:
    partition = log.append(topic, _numbered(4))[0][0]
    log.close()
    reopened = open_log()
    assert reopened.append(topic, _numbered(1)) == [(partition, 4)]
    assert _values(_read_to_end(reopened, topic, partition)) == [b"0", b"1", b"2", b"3", b"0"]


def test_creating_a_topic_again_as_declared_changes_nothing(log: EventLog) -> None:
    topic = _new_topic(log, num_partitions=2)
    log.append(topic, _numbered(1))
    log.create_topic(TopicSpec(name=topic, num_partitions=2))
    assert log.num_partitions(topic) == 2
    assert log.end_offset(topic, 0) + log.end_offset(topic, 1) == 1


@pytest.mark.parametrize(("num_partitions", "is_compacted"), [(3, False), (2, True)])
def test_invalid_topic_of_another_shape_is_refused_with_both_shapes(
    open_log: OpenLog, num_partitions: int, is_compacted: bool
) -> None:
    topic = _new_topic(open_log(), num_partitions=2)
    other = TopicSpec(name=topic, num_partitions=num_partitions, is_compacted=is_compacted)
    with pytest.raises(TopicMismatchError, match=topic) as refusal:
        open_log().create_topic(other)
    assert "num_partitions=2" in str(refusal.value)
    assert f"num_partitions={num_partitions}, is_compacted={is_compacted}" in str(refusal.value)


def test_invalid_topic_name_is_refused_by_every_call_and_not_created(log: EventLog) -> None:
    name = f"absent-{uuid.uuid4().hex}"
    calls: list[Callable[[], object]] = [
        lambda: log.num_partitions(name),
        lambda: log.append(name, _numbered(1)),
        lambda: log.read(name, 0, 0),
        lambda: log.begin_offset(name, 0),
        lambda: log.end_offset(name, 0),
        lambda: log.commit("group", name, 0, 1),
        lambda: log.committed("group", name, 0),
    ]
    for call in calls:
        with pytest.raises(UnknownTopicError, match=name):
            call()


@pytest.mark.parametrize("partition", [-1, 3])
def test_invalid_partition_is_refused_with_the_range(
    log: EventLog, topic: str, partition: int
) -> None:
    with pytest.raises(EventLogError, match=rf"{topic}: partition {partition} .* 0\.\.2"):
        log.read(topic, partition, 0)


def test_invalid_message_with_neither_key_nor_value_is_refused_and_nothing_stored(
    log: EventLog, topic: str
) -> None:
    with pytest.raises(EventLogError, match=f"{topic}: message 1 has neither"):
        log.append(topic, [*_numbered(1), Message(key=None, value=None)])
    assert sum(log.end_offset(topic, partition) for partition in range(3)) == 0


def test_invalid_message_without_key_on_a_compacted_topic_is_refused(log: EventLog) -> None:
    topic = _new_topic(log, num_partitions=1, is_compacted=True)
    with pytest.raises(EventLogError, match=f"{topic}: message 0 has key None"):
        log.append(topic, [Message(key=None, value=b"v")])
    assert log.end_offset(topic, 0) == 0


def test_closing_twice_is_allowed_and_using_it_afterwards_is_not(log: EventLog, topic: str) -> None:
    log.close()
    log.close()
    with pytest.raises(EventLogError, match="closed"):
        log.append(topic, _numbered(1))


def test_concurrent_appenders_lose_nothing_and_keep_their_own_order(
    open_log: OpenLog, topic: str
) -> None:
    logs = [open_log(), open_log()]

    def append_many(writer: int) -> None:
        for number in range(25):
            value = b"%d/%d" % (writer, number)
            logs[writer % 2].append(topic, [Message(key=b"shared", value=value)])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append_many, range(4)))
    stored = [m for partition in range(3) for m in _read_to_end(logs[0], topic, partition)]
    assert [m.offset for m in stored] == list(range(100))
    for writer in range(4):
        mine = [v for v in _values(stored) if v is not None and v.startswith(b"%d/" % writer)]
        assert mine == [b"%d/%d" % (writer, number) for number in range(25)]


def test_a_reader_sees_every_message_once_while_others_write(open_log: OpenLog, topic: str) -> None:
    reader, writer = open_log(), open_log()
    partition = writer.append(topic, _numbered(1))[0][0]
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for start in range(1, 201, 10):
                batch = [Message(key=b"key", value=b"%d" % (start + n)) for n in range(10)]
                writer.append(topic, batch)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    seen: list[StoredMessage] = []
    while len(seen) < 201 and not failures:
        seen += reader.read(topic, partition, len(seen), max_messages=17, timeout_seconds=5)
    thread.join()
    assert not failures
    assert _values(seen) == [b"%d" % number for number in range(201)]
