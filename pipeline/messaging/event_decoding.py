"""From messages to events: what no contract admits is set apart and never stops a loop."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from pipeline.eventlog.ports import StoredMessage
from pipeline.messaging.dead_letters import DeadLetter, kind_of
from pipeline.messaging.quick_events import read_ordinary_events
from schemas.arrow import LoggedEvent
from schemas.avro import PACKAGED, SchemaTable
from schemas.codec import decode_verification_event
from schemas.errors import ContractError
from schemas.events import VerificationEvent

logger = logging.getLogger(__name__)


def decode_events(
    topic: str, messages: Sequence[StoredMessage], *, table: SchemaTable = PACKAGED
) -> tuple[list[LoggedEvent], list[DeadLetter]]:
    """Return the events of the messages, and the messages that are none with the reason.

    Ordinary events are read all at once; what is not found ordinary is looked at one by one.
    """
    rows, letters = [], []
    ordinary = read_ordinary_events([stored.message.value for stored in messages], table)
    for stored, event in zip(messages, ordinary, strict=True):
        try:
            event = _decoded(stored, event, table)
        except Exception as error:
            # A decoder that raises anything else has met bytes that nobody foresaw. They would
            # stop the loop at every restart, so they go the way of the others.
            reason = str(error) if isinstance(error, ContractError) else f"{error!r}"
            letters.append(
                DeadLetter(topic=topic, stored=stored, reason=reason, kind=kind_of(error))
            )
            place = f"{topic}/{stored.partition} offset {stored.offset}"
            logger.warning("%s, set aside: %s", place, reason)
            continue
        rows.append(
            LoggedEvent(
                topic=topic,
                partition=stored.partition,
                offset=stored.offset,
                appended_at=stored.appended_at,
                event=event,
            )
        )
    return rows, letters


def _decoded(
    stored: StoredMessage, event: VerificationEvent | None, table: SchemaTable
) -> VerificationEvent:
    if event is None:
        event = decode_verification_event(stored.message.value, table=table)
    # The key decides the partition, and so whose events these are.
    key = stored.message.key
    if key != event.stream.encode():
        raise ContractError("key", found=repr(key)[:100], expected=repr(event.stream.encode()))
    return event
