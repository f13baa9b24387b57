"""What workers send reaches the learner in order, and what is broken is set aside."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.ports import EventSource
from pipeline.eventlog.ports import EventLog, EventLogError
from pipeline.messaging.boards import LogEventSource, LogRefusedEvents
from schemas.codec import encode
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.pipeline.messages import (
    FailingAppends,
    broken,
    encoded,
    event,
    message,
    open_log,
    read_everything,
)
from tests.schemas.builders import make_event, make_policy


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = open_log(tmp_path, num_partitions=1)
    yield opened
    opened.close()


def test_events_are_read_in_order_with_their_place(log: EventLog) -> None:
    log.append(VERIFICATION_EVENTS, [message(i) for i in range(5)])
    source: EventSource = LogEventSource(log, [0])
    received = source.poll(0.0)
    assert [(r.partition, r.offset) for r in received] == [(0, i) for i in range(5)]
    assert encoded(r.event for r in received) == encoded(event(i) for i in range(5))
    assert source.poll(0.0) == []
    log.append(VERIFICATION_EVENTS, [message(5)])
    assert [r.offset for r in source.poll(0.0)] == [5]


def test_seeking_reads_again_from_there(log: EventLog) -> None:
    log.append(VERIFICATION_EVENTS, [message(i) for i in range(5)])
    source = LogEventSource(log, [0])
    source.poll(0.0)
    source.seek(0, 3)
    assert [r.offset for r in source.poll(0.0)] == [3, 4]
    source.seek(0, 5)
    assert source.poll(0.0) == []


def test_polling_waits_no_longer_than_asked_and_no_longer_than_needed(log: EventLog) -> None:
    source = LogEventSource(log, [0])
    before = time.monotonic()
    assert source.poll(0.05) == []
    assert time.monotonic() - before > 0.04
    timer = threading.Timer(0.1, log.append, (VERIFICATION_EVENTS, [message(0)]))
    timer.start()
    # No test may take this long: the poll must end when the message arrives.
    assert [r.offset for r in source.poll(1000.0)] == [0]
    timer.join()


def test_a_learner_reads_its_own_partitions_only_and_each_in_order(tmp_path: Path) -> None:
    log = open_log(tmp_path, num_partitions=4)
    log.append(VERIFICATION_EVENTS, [message(i, stream=f"stream-{i % 9}") for i in range(90)])
    sources = [LogEventSource(log, [0, 2], max_messages=7), LogEventSource(log, [1, 3])]
    assert sources[0].partitions == (0, 2)
    seen: list[tuple[int, int, int]] = []
    for source in sources:
        while received := source.poll(0.0):
            assert {r.partition for r in received} <= set(source.partitions)
            seen += [(r.partition, r.offset, r.event.sequence) for r in received]
    assert sorted(sequence for _, _, sequence in seen) == list(range(90))
    for partition in range(4):
        offsets = [offset for p, offset, _ in seen if p == partition]
        assert offsets == list(range(len(offsets)))
    log.close()


def test_waiting_on_several_partitions_notices_a_message_in_any(tmp_path: Path) -> None:
    log = open_log(tmp_path, num_partitions=3)
    source = LogEventSource(log, [0, 1, 2])
    for index in range(4):
        args = (VERIFICATION_EVENTS, [message(index, stream=f"stream-{index}")])
        timer = threading.Timer(0.05, log.append, args)
        timer.start()
        assert [r.event.sequence for r in source.poll(1000.0)] == [index]
        timer.join()
    log.close()


BROKEN = [b"\xff", b"", None, encode(event(1))[:-3], encode(make_policy()), b"\0\0\0\0\x63abc"]


@pytest.mark.parametrize("value", BROKEN)
def test_what_cannot_be_decoded_becomes_a_dead_letter_and_reading_goes_on(
    log: EventLog, value: bytes | None
) -> None:
    log.append(VERIFICATION_EVENTS, [message(0), broken(value), message(2)])
    source = LogEventSource(log, [0])
    assert [r.event.sequence for r in source.poll(0.0)] == [0, 2]
    assert source.poll(0.0) == []
    assert source.num_dead_letters == 1
    (letter,) = read_everything(log, DEAD_LETTERS)
    assert (letter.message.key, letter.message.value) == (b"stream-a", value)
    headers = dict(letter.message.headers)
    reason = headers.pop("reason").decode()
    assert "found" in reason
    assert "expected" in reason
    assert headers == {
        "ce_id": b"x",
        "topic": VERIFICATION_EVENTS.encode(),
        "partition": b"0",
        "offset": b"1",
    }


def test_content_shows_in_a_dead_letter_only_where_it_is_content(
    log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    canary = 1_234_567_891
    with_content = make_event(num_windows=1, with_content=True)
    assert with_content.content is not None
    token_ids = np.full_like(with_content.content.token_ids, canary)
    secret = replace(with_content, content=replace(with_content.content, token_ids=token_ids))
    data = encode(secret)
    for cut in range(1, len(data), 7):
        log.append(VERIFICATION_EVENTS, [broken(data[:cut])])
    assert LogEventSource(log, [0]).poll(0.0) == []
    letters = read_everything(log, DEAD_LETTERS)
    assert len(letters) == len(range(1, len(data), 7))
    assert str(canary) not in caplog.text
    for letter in letters:
        assert str(canary).encode() not in b"".join(letter.message.headers.values())


def test_a_dead_letter_is_kept_once_however_often_it_is_read(log: EventLog) -> None:
    log.append(VERIFICATION_EVENTS, [broken(b"\xff"), message(1)])
    for _ in range(3):
        assert [r.offset for r in LogEventSource(log, [0]).poll(0.0)] == [1]
    assert len(read_everything(log, DEAD_LETTERS)) == 1


def test_broken_messages_alone_do_not_hold_up_the_reader(log: EventLog) -> None:
    log.append(VERIFICATION_EVENTS, [broken(b"\xff")] * 7)
    source = LogEventSource(log, [0], max_messages=5)
    assert source.poll(0.0) == []
    log.append(VERIFICATION_EVENTS, [message(7)])
    assert [r.offset for r in source.poll(0.0)] == [7]
    assert source.num_dead_letters == 7


def test_while_dead_letters_cannot_be_stored_nothing_is_passed_over(log: EventLog) -> None:
    log.append(VERIFICATION_EVENTS, [message(0), broken(b"\xff"), message(2)])
    failing = FailingAppends(log, DEAD_LETTERS, failures=1)
    source = LogEventSource(failing, [0])  # type: ignore[arg-type]
    with pytest.raises(EventLogError):
        source.poll(0.0)
    assert [r.offset for r in source.poll(0.0)] == [0, 2]
    assert source.num_dead_letters == 1
    assert len(read_everything(log, DEAD_LETTERS)) == 1


def test_invalid_seeks_are_refused_with_both_offsets(log: EventLog) -> None:
    log.append(VERIFICATION_EVENTS, [message(0)])
    source = LogEventSource(log, [0])
    with pytest.raises(EventLogError, match="below 5, the log ends at 1"):
        source.seek(0, 5)
    with pytest.raises(KeyError):
        source.seek(1, 0)


def test_offsets_deleted_before_they_were_read_are_reported(
    log: EventLog, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log.append(VERIFICATION_EVENTS, [message(i) for i in range(5)])
    source = LogEventSource(log, [0])
    monkeypatch.setattr(log, "begin_offset", lambda topic, partition: 3)
    source.seek(0, 1)
    assert "offsets 1..2 were deleted before they were read" in caplog.text
    assert [r.offset for r in source.poll(0.0)] == [3, 4]


def test_a_refused_event_is_kept_with_its_original_bytes_and_its_place(log: EventLog) -> None:
    original = message(0)
    ((partition, offset),) = log.append(VERIFICATION_EVENTS, [original])
    (received,) = LogEventSource(log, range(log.num_partitions(VERIFICATION_EVENTS))).poll(1.0)
    refused = LogRefusedEvents(log)
    refused.set_aside(received, "drafters[0]: found a, expected b")
    refused.set_aside(received, "drafters[0]: found a, expected b")
    (letter,) = log.read(DEAD_LETTERS, 0, 0)
    assert letter.message.value == original.value
    assert letter.message.headers["reason"] == b"drafters[0]: found a, expected b"
    assert letter.message.headers["offset"] == str(offset).encode()
    assert letter.message.headers["partition"] == str(partition).encode()
