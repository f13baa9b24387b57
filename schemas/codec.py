"""Messages to bytes and back: Avro bodies in Confluent framing, with CloudEvents headers.

A frame is one zero byte, the writer's schema id (4 bytes, big-endian) and the Avro body. Bytes
from outside either become a checked message or raise ``ContractError``; nothing else escapes.
"""

from __future__ import annotations

import io
import struct
from datetime import datetime
from typing import Any, TypeAlias

import fastavro

from schemas import records, state_records
from schemas.avro import PACKAGED, SchemaTable
from schemas.errors import ContractError
from schemas.events import DrafterReleased, PolicyPublished, VerificationEvent

Message: TypeAlias = VerificationEvent | PolicyPublished | DrafterReleased

MAGIC = 0
_FRAME = struct.Struct(">bI")


def frame(schema_id: int) -> bytes:
    """Return what stands before the body of a message written with this schema."""
    return _FRAME.pack(MAGIC, schema_id)


def encode(message: Message, *, table: SchemaTable = PACKAGED) -> bytes:
    """Return the framed bytes of a message, written with its newest schema."""
    if isinstance(message, VerificationEvent):
        return _write("verification_event", records.from_verification_event(message), table)
    if isinstance(message, PolicyPublished):
        return _write("policy_published", state_records.from_policy_published(message), table)
    return _write("drafter_released", state_records.from_drafter_released(message), table)


def decode_verification_event(
    data: bytes | None, *, table: SchemaTable = PACKAGED
) -> VerificationEvent:
    """Read a verification event.

    Raises:
        ContractError: If ``data`` is anything else than one whole, valid verification event.
    """
    return records.to_verification_event(_read("verification_event", data, table))


def decode_policy_published(
    data: bytes | None, *, table: SchemaTable = PACKAGED
) -> PolicyPublished:
    """Read a published policy.

    Raises:
        ContractError: If ``data`` is anything else than one whole, valid policy.
    """
    return state_records.to_policy_published(_read("policy_published", data, table))


def decode_drafter_released(
    data: bytes | None, *, table: SchemaTable = PACKAGED
) -> DrafterReleased:
    """Read a release.

    Raises:
        ContractError: If ``data`` is anything else than one whole, valid release.
    """
    return state_records.to_drafter_released(_read("drafter_released", data, table))


def cloud_event_headers(message: Message, *, source: str) -> dict[str, bytes]:
    """Return the CloudEvents 1.0 headers; ``source`` names the process that speaks."""
    if isinstance(message, VerificationEvent):
        kind, identity = "verification_event", message.event_id
    elif isinstance(message, PolicyPublished):
        kind, identity = "policy_published", f"{message.stream}/{message.version}"
    else:
        identity = f"{message.drafter_id}/{message.version}/{message.state.value}"
        kind = "drafter_released"
    headers = {
        "ce_specversion": "1.0",
        "ce_id": identity,
        "ce_source": source,
        "ce_type": f"draftloop.{kind}",
        "ce_time": _rfc3339(message.produced_at),
    }
    return {name: value.encode() for name, value in headers.items()}


def _rfc3339(moment: datetime) -> str:
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def _write(message_name: str, record: dict[str, Any], table: SchemaTable) -> bytes:
    schema = table.newest[message_name]
    record["schema_version"] = schema.version
    stream = io.BytesIO()
    stream.write(frame(schema.schema_id))
    fastavro.schemaless_writer(stream, schema.parsed, record)
    return stream.getvalue()


def _read(message_name: str, data: bytes | None, table: SchemaTable) -> dict[str, Any]:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ContractError("value", found=type(data).__name__, expected="bytes")
    if len(data) < _FRAME.size:
        raise ContractError(
            "value", found=f"{len(data)} bytes", expected=f"at least {_FRAME.size} bytes"
        )
    magic, schema_id = _FRAME.unpack_from(data)
    if magic != MAGIC:
        raise ContractError("magic_byte", found=magic, expected=MAGIC)
    writer = table.writer(schema_id, message_name)
    reader = table.newest[message_name]
    stream = io.BytesIO(data)
    stream.seek(_FRAME.size)
    try:
        record: Any = fastavro.schemaless_reader(
            stream, writer.parsed, None if reader is writer else reader.parsed
        )
    except Exception as error:
        # The parser raises whatever the bytes lead it into: EOFError, IndexError, UnicodeError,
        # OverflowError, MemoryError and others, none of which a caller could tell apart.
        raise ContractError(
            "body",
            found=f"{len(data)} bytes that end in {type(error).__name__}: {error}",
            expected=f"{message_name} of schema version {writer.version}",
        ) from error
    if stream.tell() != len(data):
        raise ContractError(
            "body", found=f"{len(data) - stream.tell()} bytes too many", expected="none"
        )
    if record["schema_version"] != writer.version:
        raise ContractError(
            "schema_version", found=record["schema_version"], expected=writer.version
        )
    fields: dict[str, Any] = record
    return fields
