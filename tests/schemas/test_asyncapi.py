"""The AsyncAPI document, the Avro files, the dataclasses and the Arrow columns tell one story."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import resources
from typing import Any

import numpy as np
import pytest
import yaml

from schemas import events, topics
from schemas.avro import PACKAGED
from schemas.codec import Message, cloud_event_headers
from schemas.columns import COLUMNS
from tests.schemas.builders import make_event, make_policy, make_release

DOCUMENT: dict[str, Any] = yaml.safe_load(
    resources.files("schemas").joinpath("asyncapi.yaml").read_text(encoding="utf-8")
)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
MESSAGES: dict[str, Message] = {
    "verification_event": make_event(with_content=True),
    "policy_published": make_policy(),
    "drafter_released": make_release(),
}
PROPERTY_OF_AVRO = {
    "string": {"type": "string"},
    "boolean": {"type": "boolean"},
    "double": {"type": "number"},
    "int": {"type": "integer", "format": "int32"},
    "long": {"type": "integer", "format": "int64"},
    "bytes": {"type": "string", "format": "binary"},
}
WIRE_ONLY = {"schema_version", "num_top_tokens"}
AXES = {"W": 6, "N": 3, "C": 4, "K": 4, "K+1": 5, "prompt": 5, "table": 0, "numbers": 0, "awake": 0}


def avro_file(name: str) -> dict[str, Any]:
    """Return the definition of the newest schema as its file gives it."""
    return dict(PACKAGED.newest[name].parsed)


def not_null(kind: Any) -> Any:
    """Return the one branch of an optional type that is not null, or the type itself."""
    return next(one for one in kind if one != "null") if isinstance(kind, list) else kind


def records(kind: Any) -> Iterator[dict[str, Any]]:
    """Walk over all records inside an Avro type."""
    kind = not_null(kind)
    if not isinstance(kind, dict):
        return
    if kind["type"] == "record":
        yield kind
        for field in kind["fields"]:
            yield from records(field["type"])
    yield from records(kind.get("items", kind.get("values")))


def described(kind: Any) -> dict[str, Any]:
    """Return the property that describes a field of this Avro type."""
    kind = not_null(kind)
    if isinstance(kind, str):
        name = kind.removeprefix("draftloop.")
        return PROPERTY_OF_AVRO.get(name) or {"$ref": f"#/components/schemas/{name}"}
    if kind["type"] == "record":
        return {"$ref": f"#/components/schemas/{kind['name'].removeprefix('draftloop.')}"}
    if kind["type"] == "array":
        return {"type": "array", "items": bare(kind["items"])}
    if kind["type"] == "map":
        return {"type": "object", "additionalProperties": bare(kind["values"])}
    return {"type": "integer", "format": kind["logicalType"]}


def bare(kind: Any) -> dict[str, Any]:
    """Return the property of an element, which has no format of its own."""
    return {name: value for name, value in described(kind).items() if name != "format"}


RECORDS = {
    record["name"].removeprefix("draftloop."): record
    for name in MESSAGES
    for record in records(avro_file(name))
}


def test_the_channels_are_the_topics() -> None:
    addresses = {channel["address"] for channel in DOCUMENT["channels"].values()}
    constants = {value for name, value in vars(topics).items() if name.isupper()}
    assert addresses == constants
    assert DOCUMENT["channels"]["verificationEvents"]["address"] == topics.VERIFICATION_EVENTS
    assert DOCUMENT["channels"]["policies"]["address"] == topics.POLICIES
    assert DOCUMENT["channels"]["drafterReleases"]["address"] == topics.DRAFTER_RELEASES
    assert DOCUMENT["channels"]["deadLetters"]["address"] == topics.DEAD_LETTERS


def test_policies_and_releases_are_compacted_and_events_are_not() -> None:
    compacted = {
        channel["address"]
        for channel in DOCUMENT["channels"].values()
        if channel["bindings"]["kafka"]["topicConfiguration"]["cleanup.policy"] == ["compact"]
    }
    assert compacted == {topics.POLICIES, topics.DRAFTER_RELEASES}


def test_every_reference_leads_somewhere() -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            yield from (value for name, value in node.items() if name == "$ref")
            node = list(node.values())
        if isinstance(node, list):
            for child in node:
                yield from references(child)

    for reference in references(DOCUMENT):
        target: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            assert step in target, reference
            target = target[step]


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_every_record_has_the_fields_types_and_defaults_of_its_avro_schema(name: str) -> None:
    record, schema = RECORDS[name], SCHEMAS[name]
    assert list(schema["properties"]) == [field["name"] for field in record["fields"]]
    assert schema["required"] == [one["name"] for one in record["fields"] if "default" not in one]
    for field in record["fields"]:
        entry = schema["properties"][field["name"]]
        entry = entry["allOf"][0] if "allOf" in entry else entry
        found = {key: value for key, value in entry.items() if key != "description"}
        assert found == described(field["type"]), field["name"]


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_the_description_of_an_array_starts_with_its_type_and_axes(name: str) -> None:
    for field in RECORDS[name]["fields"]:
        if "draftloop.dtype" in field:
            axes = ", ".join(field["draftloop.shape"].split(","))
            expected = f"{field['draftloop.dtype']} ({axes})"
            assert SCHEMAS[name]["properties"][field["name"]]["description"].startswith(expected)


@pytest.mark.parametrize("name", sorted(set(RECORDS) - {"PartitionOffset", "Accumulator"}))
def test_every_record_has_the_fields_of_its_dataclass_in_their_order(name: str) -> None:
    on_wire = [field["name"] for field in RECORDS[name]["fields"]]
    declared = [field.name for field in fields(getattr(events, name))]
    assert [field for field in on_wire if field not in WIRE_ONLY] == declared


def array_fields(message: object, record: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Walk over the array fields of a message with their Avro fields."""
    for field in record["fields"]:
        value = getattr(message, field["name"], None)
        if "draftloop.dtype" in field:
            yield field, value
        elif is_dataclass(value):
            yield from array_fields(value, not_null(field["type"]))


@pytest.mark.parametrize("name", ["verification_event", "policy_published"])
def test_arrays_have_the_declared_type_and_axes(name: str) -> None:
    message = MESSAGES[name]
    axes = dict(AXES)
    if isinstance(message, events.VerificationEvent):
        axes |= {"R": message.rounds.first_position.size, "P": message.num_positions}
    found = list(array_fields(message, avro_file(name)))
    assert len(found) == {"verification_event": 25, "policy_published": 6}[name]
    for field, values in found:
        assert values.dtype == np.dtype(field["draftloop.dtype"]), field["name"]
        assert values.shape == tuple(axes[axis] for axis in field["draftloop.shape"].split(","))


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_a_message_names_its_avro_file_its_key_and_its_headers(name: str) -> None:
    message = MESSAGES[name]
    entry = DOCUMENT["components"]["messages"][type(message).__name__]
    assert resources.files("schemas").joinpath(entry["x-avro-schema"]).is_file()
    assert entry["x-avro-schema"] == f"{name}.avsc"
    assert isinstance(getattr(message, entry["x-key-field"]), str)
    headers = cloud_event_headers(message, source="test")
    described_headers = SCHEMAS["CloudEventHeaders"]
    assert list(headers) == described_headers["required"] == list(described_headers["properties"])
    assert headers["ce_type"].decode() in described_headers["properties"]["ce_type"]["enum"]


def test_the_columns_of_the_log_cover_every_field_of_an_event() -> None:
    columns = {column.name for column in COLUMNS}
    position = {"schema_version", "topic", "partition", "offset", "appended_at"}
    renamed = {
        "drafter_ids": "drafter_id",
        "drafter_weights_versions": "weights_version",
        "drafter_vocabulary_hashes": "draft_vocabulary_hash",
    }
    assert [field.name for field in fields(events.DrafterVersion)] == [*renamed.values()]
    nested = {
        "sampling": events.SamplingRule,
        "rounds": events.Rounds,
        "windows": events.ScoredWindows,
        "content": events.Content,
        "content_features": events.FeatureReference,
    }
    expected = {f"{prefix}_{one.name}" for prefix, kind in nested.items() for one in fields(kind)}
    expected |= {field.name for field in fields(events.VerificationEvent)}
    expected -= {"drafters", "content_features", *nested}
    assert columns == position | set(renamed) | {"content_num_top_tokens"} | expected
