"""The Avro schemas of the wire: one newest file per message, older versions beside it by id.

A file carries its fixed ``draftloop.schema_id`` and ``draftloop.schema_version``. Version ``v`` of
``name.avsc`` that is no longer the newest is kept as ``name.v<v>.avsc``, so that what it wrote
stays readable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import fastavro

from schemas.errors import ContractError


@dataclass(frozen=True, kw_only=True)
class WireSchema:
    """One version of one message's Avro schema, parsed."""

    message_name: str
    schema_id: int
    version: int
    parsed: Any


def _found_nowhere(schema_id: int) -> WireSchema | None:
    return None


@dataclass(frozen=True, kw_only=True)
class SchemaTable:
    """The schemas a process works with.

    Attributes:
        newest: Per message name, the schema it writes with and reads into.
        by_id: Every schema it can read from, by id.
        find: Looks elsewhere (a registry) for the schema of an id that the table lacks; returns
            None, or raises ``ContractError`` with more to say.
    """

    newest: Mapping[str, WireSchema]
    by_id: Mapping[int, WireSchema]
    find: Callable[[int], WireSchema | None] = _found_nowhere

    @classmethod
    def of(cls, schemas: Iterable[WireSchema]) -> SchemaTable:
        """Return the table in which the highest version of every message is the newest."""
        ordered = sorted(schemas, key=lambda schema: schema.version)
        return cls(
            newest={schema.message_name: schema for schema in ordered},
            by_id={schema.schema_id: schema for schema in ordered},
        )

    def knowing(self, schema: WireSchema) -> SchemaTable:
        """Return a table that can also read what ``schema`` wrote, and is otherwise the same.

        So an older build reads a newer writer whose schema came from elsewhere (a registry).
        """
        return replace(self, by_id={**self.by_id, schema.schema_id: schema})

    def writer(self, schema_id: int, message_name: str) -> WireSchema:
        """Return the schema that wrote a message of the expected name.

        Raises:
            ContractError: If the id is unknown or belongs to another message.
        """
        schema = self.by_id.get(schema_id) or self.find(schema_id)
        if schema is None:
            known = ", ".join(map(str, sorted(self.by_id)))
            expected = f"one of {known}; if it is newer, upgrade Draftloop"
            raise ContractError("schema_id", found=schema_id, expected=expected)
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


def newest_text(message_name: str) -> str:
    """Return the text of the schema that a message of this name is written with."""
    return (resources.files("schemas") / f"{message_name}.avsc").read_text(encoding="utf-8")


def _packaged_schemas() -> Iterable[WireSchema]:
    for file in sorted(resources.files("schemas").iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".avsc"):
            yield wire_schema(file.name.split(".")[0], file.read_text(encoding="utf-8"))


PACKAGED = SchemaTable.of(_packaged_schemas())
"""The schemas of this build."""
