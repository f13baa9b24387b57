"""From the client's records to our messages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from pipeline.eventlog.ports import Message, StoredMessage

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def stored_message(record: Any) -> StoredMessage:
    """Return what a record of the client says."""
    return StoredMessage(
        partition=record.partition,
        offset=record.offset,
        appended_at=_EPOCH + timedelta(milliseconds=record.timestamp),
        message=Message(key=record.key, value=record.value, headers=dict(record.headers)),
    )
