"""Messages that no contract admits, kept byte for byte beside the log they came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.eventlog.ports import EventLog, Message, StoredMessage
from schemas.errors import ContractError
from schemas.topics import DEAD_LETTERS

LONGEST_REASON_CHARACTERS = 500

OF_THE_FRAME = frozenset({"key", "value", "magic_byte", "schema_id", "schema_version", "body"})
FIELD, UNFORESEEN, UNLEARNABLE = "field", "unforeseen", "unlearnable"
KINDS = (*sorted(OF_THE_FRAME), FIELD, UNFORESEEN, UNLEARNABLE)
"""What a message was refused for, in few words: metrics have a label of these."""

_Place = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadLetter:
    """A message that could not be decoded or learned, where it came from, and why.

    Attributes:
        kind: One of ``KINDS``.
    """

    topic: str
    stored: StoredMessage
    reason: str
    kind: str = UNLEARNABLE

    @property
    def place(self) -> _Place:
        """Topic, partition and offset: the letter's identity."""
        return self.topic, self.stored.partition, self.stored.offset


def kind_of(error: Exception) -> str:
    """Return what a message was refused for when decoding it raised ``error``."""
    if not isinstance(error, ContractError):
        return UNFORESEEN
    return error.path if error.path in OF_THE_FRAME else FIELD


class DeadLetters(Protocol):
    """Where dead letters go."""

    def set_aside(self, letters: Sequence[DeadLetter]) -> None:
        """Keep the letters durably; those kept before are not kept twice."""


class DeadLetterTopic:
    """The dead letters in their topic.

    Key, value and headers are the original's; the headers ``reason``, ``topic``, ``partition``
    and ``offset`` are added. Before it adds letters it reads what is there, so a letter is kept
    once however often its reader is restarted, and whichever service found it first.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._kept: set[_Place] = set()
        self._partition_to_offset: dict[int, int] = {}

    def set_aside(self, letters: Sequence[DeadLetter]) -> None:
        """Keep the letters durably; those kept before are not kept twice."""
        if not letters:
            return
        self._read_kept()
        new = [letter for letter in letters if letter.place not in self._kept]
        self._log.append(DEAD_LETTERS, [_message(letter) for letter in new])

    def _read_kept(self) -> None:
        for partition in range(self._log.num_partitions(DEAD_LETTERS)):
            offset = self._partition_to_offset.get(partition, 0)
            while page := self._log.read(DEAD_LETTERS, partition, offset):
                self._kept.update(place for stored in page if (place := _place(stored)) is not None)
                offset = page[-1].offset + 1
            self._partition_to_offset[partition] = offset


def _message(letter: DeadLetter) -> Message:
    original = letter.stored.message
    added = {
        "reason": letter.reason[:LONGEST_REASON_CHARACTERS],
        "topic": letter.topic,
        "partition": str(letter.stored.partition),
        "offset": str(letter.stored.offset),
    }
    headers = {**original.headers, **{name: text.encode() for name, text in added.items()}}
    # No log stores a message with neither key nor value.
    value = b"" if original.key is None and original.value is None else original.value
    return Message(key=original.key, value=value, headers=headers)


def _place(stored: StoredMessage) -> _Place | None:
    headers = stored.message.headers
    try:
        topic = headers["topic"].decode()
        return topic, int(headers["partition"]), int(headers["offset"])
    except (KeyError, ValueError):
        # Put there by somebody else; it stands for no message that we know.
        return None
