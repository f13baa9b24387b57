"""The Avro schemas of the wire: one newest file per message, older versions beside it by id.

A file carries its fixed ``draftloop.schema_id`` and ``draftloop.schema_version``. Version ``v`` of
``name.avsc`` that is no longer the newest is kept as ``name.v<v>.avsc``, so that what it wrote
stays readable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Any

import fastavro

from schemas.errors import ContractError

MESSAGE_NAMES = ("verification_event", "policy_published", "drafter_released")


@dataclass(frozen=True, kw_only=True)
class WireSchema:
    """One version of one message's Avro schema, parsed."""

    message_name: str
    schema_id: int
    version: int
    parsed: Any


@dataclass(frozen=True)
class SchemaTable:
    """All schemas this build can read, by id; it writes with the newest of each message."""

    schemas: tuple[WireSchema, ...]

    @cached_property
    def by_id(self) -> Mapping[int, WireSchema]:
        """Return every schema by its id."""
        return {schema.schema_id: schema for schema in self.schemas}

    @cached_property
    def newest(self) -> Mapping[str, WireSchema]:
        """Return the newest schema of every message."""
        ordered = sorted(self.schemas, key=lambda schema: schema.version)
        return {schema.message_name: schema for schema in ordered}

    def writer(self, schema_id: int, message_name: str) -> WireSchema:
        """Return the schema that wrote a message of the expected name.

        Raises:
            ContractError: If the id is unknown or belongs to another message.
        """
        schema = self.by_id.get(schema_id)
        if schema is None:
            raise ContractError("schema_id", found=schema_id, expected=f"one of {[*self.by_id]}")
        if schema.message_name != message_name:
            raise ContractError(
                "schema_id",
                found=f"{schema_id} ({schema.message_name})",
                expected=f"{self.newest[message_name].schema_id} ({message_name})",
            )
        return schema


def wire_schema(message_name: str, text: str) -> WireSchema:
    """Parse the text of one ``.avsc`` file."""
    definition = json.loads(text)
    return WireSchema(
        message_name=message_name,
        schema_id=definition["draftloop.schema_id"],
        version=definition["draftloop.schema_version"],
        parsed=fastavro.parse_schema(definition),
    )


def _packaged_schemas() -> Iterable[WireSchema]:
    for file in sorted(resources.files("schemas").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".avsc"):
            yield wire_schema(file.name.split(".")[0], file.read_text(encoding="utf-8"))


PACKAGED = SchemaTable(tuple(_packaged_schemas()))
