"""Dead letters are kept whole, and once."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLog, Message, StoredMessage
from pipeline.messaging.dead_letters import LONGEST_REASON_CHARACTERS, DeadLetter, DeadLetterTopic
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS

NOON = datetime(2026, 3, 29, 12, tzinfo=UTC)
ORIGINAL = Message(key=b"stream-a", value=b"\xff\x00", headers={"ce_id": b"7"})


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EmbeddedEventLog]:
    log = EmbeddedEventLog(tmp_path / "log.sqlite")
    for spec in declared_topics(1):
        log.create_topic(spec)
    yield log
    log.close()


def letter(
    offset: int, *, message: Message = ORIGINAL, topic: str = VERIFICATION_EVENTS, reason: str = "r"
) -> DeadLetter:
    stored = StoredMessage(partition=2, offset=offset, appended_at=NOON, message=message)
    return DeadLetter(topic=topic, stored=stored, reason=reason)


def kept(log: EventLog) -> list[Message]:
    return [stored.message for stored in log.read(DEAD_LETTERS, 0, 0)]


def test_the_original_is_kept_with_its_place_and_the_reason(log: EmbeddedEventLog) -> None:
    DeadLetterTopic(log).set_aside([letter(41, reason="magic_byte: found 255, expected 0")])
    (message,) = kept(log)
    assert (message.key, message.value) == (ORIGINAL.key, ORIGINAL.value)
    assert message.headers == {
        "ce_id": b"7",
        "reason": b"magic_byte: found 255, expected 0",
        "topic": VERIFICATION_EVENTS.encode(),
        "partition": b"2",
        "offset": b"41",
    }


def test_a_letter_is_kept_once_also_after_a_restart_and_by_two_services(
    log: EmbeddedEventLog,
) -> None:
    first, second = DeadLetterTopic(log), DeadLetterTopic(log)
    first.set_aside([letter(1), letter(2)])
    second.set_aside([letter(2), letter(3)])
    first.set_aside([letter(3), letter(4)])
    DeadLetterTopic(log).set_aside([letter(1), letter(4)])
    assert [m.headers["offset"] for m in kept(log)] == [b"1", b"2", b"3", b"4"]


def test_the_same_offset_of_another_topic_is_another_letter(log: EmbeddedEventLog) -> None:
    letters = DeadLetterTopic(log)
    letters.set_aside([letter(1)])
    letters.set_aside([letter(1, topic="other.topic")])
    assert len(kept(log)) == 2


def test_nothing_to_set_aside_touches_nothing(log: EmbeddedEventLog) -> None:
    DeadLetterTopic(log).set_aside([])
    assert kept(log) == []


def test_what_others_put_into_the_topic_is_passed_over(log: EmbeddedEventLog) -> None:
    headers = {"topic": b"\xff", "partition": b"x", "offset": b"1"}
    log.append(DEAD_LETTERS, [Message(key=None, value=b"v"), Message(key=b"", value=b"v")])
    log.append(DEAD_LETTERS, [Message(key=b"k", value=b"v", headers=headers)])
    DeadLetterTopic(log).set_aside([letter(1)])
    assert len(kept(log)) == 4


def test_a_long_reason_is_cut(log: EmbeddedEventLog) -> None:
    DeadLetterTopic(log).set_aside([letter(1, reason="é" * 10_000)])
    assert kept(log)[0].headers["reason"].decode() == "é" * LONGEST_REASON_CHARACTERS


def test_a_message_with_neither_key_nor_value_is_kept_as_an_empty_one(
    log: EmbeddedEventLog,
) -> None:
    DeadLetterTopic(log).set_aside([letter(1, message=Message(key=None, value=None))])
    assert [(m.key, m.value) for m in kept(log)] == [(None, b"")]
