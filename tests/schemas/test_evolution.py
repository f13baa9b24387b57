"""Old and new builds read each other: on the wire by schema resolution, in Parquet by columns."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.arrow import events_from_table, events_to_table, read_table, write_table
from schemas.avro import PACKAGED, SchemaTable, WireSchema, wire_schema
from schemas.codec import decode_drafter_released, decode_verification_event, encode
from schemas.columns import COLUMNS, SCHEMA_VERSION, VERIFICATION_EVENT_SCHEMA, columns_of
from schemas.equality import first_difference, same_message
from schemas.errors import ContractError
from schemas.events import (
    DrafterReleased,
    GateEvidence,
    StreamComparison,
    VerificationEvent,
)
from schemas.records import from_verification_event
from schemas.state_records import from_drafter_released
from tests.schemas.builders import make_drafters, make_event, make_logged, make_release

DATA = Path(__file__).parent / "data"


def stored_schema(version: int) -> WireSchema:
    text = (DATA / f"verification_event.v{version}.avsc").read_text(encoding="utf-8")
    return wire_schema("verification_event", text)


def framed(schema: WireSchema, record: dict[str, Any]) -> bytes:
    """Write a record as the build of ``schema`` does."""
    body = io.BytesIO()
    fastavro.schemaless_writer(body, schema.parsed, record)
    return b"\x00" + schema.schema_id.to_bytes(4, "big") + body.getvalue()


def plain_event() -> VerificationEvent:
    """Return an event that uses nothing that came after version 0."""
    drafters = tuple(replace(one, draft_vocabulary_hash="") for one in make_drafters(3))
    return make_event(drafters=drafters)


def test_this_build_reads_the_wire_of_an_older_one_and_fills_the_defaults() -> None:
    old, event = stored_schema(0), plain_event()
    record = from_verification_event(event) | {"schema_version": 0}
    table = SchemaTable.of([old, *PACKAGED.by_id.values()])
    assert table.newest == PACKAGED.newest
    decoded = decode_verification_event(framed(old, record), table=table)
    assert first_difference(event, decoded) is None
    assert (decoded.sampling.top_p, decoded.sampling.top_k, decoded.content) == (1.0, 0, None)


def test_an_older_build_reads_the_wire_of_a_newer_one_whose_schema_it_is_given() -> None:
    new, event = stored_schema(3), make_event(with_content=True)
    extra = {"schema_version": 3, "worker_region": "north", "energy_joules": 1.5}
    data = framed(new, from_verification_event(event) | extra)
    decoded = decode_verification_event(data, table=PACKAGED.knowing(new))
    assert first_difference(event, decoded) is None


def test_a_newer_build_reads_what_this_one_writes() -> None:
    event = make_event(with_content=True)
    newer = SchemaTable.of([stored_schema(3), *PACKAGED.by_id.values()])
    assert newer.newest["verification_event"].version == 3
    assert same_message(event, decode_verification_event(encode(event), table=newer))


def test_knowing_a_newer_schema_does_not_change_what_is_written() -> None:
    event = make_event()
    assert encode(event, table=PACKAGED.knowing(stored_schema(3))) == encode(event)


def release_with_streams() -> DrafterReleased:
    """Return a release that uses what version 2 added."""
    one = StreamComparison(
        stream="code",
        num_streams=1,
        num_requests=3,
        num_windows=9,
        new_acceptance_length=2.0,
        old_acceptance_length=1.5,
        difference_low=0.25,
        difference_high=0.75,
    )
    evidence = GateEvidence(
        num_windows=9,
        new_acceptance_length=2.0,
        old_acceptance_length=1.5,
        difference_low=0.25,
        difference_high=0.75,
        streams=(one, replace(one, stream="", num_streams=12)),
    )
    return make_release(evidence=evidence)


def test_releases_of_older_builds_are_read_and_their_evidence_names_no_stream() -> None:
    release = release_with_streams()
    assert release.evidence is not None
    old = PACKAGED.by_id[30_001]
    decoded = decode_drafter_released(framed(old, from_drafter_released(release)))
    assert decoded == replace(release, evidence=replace(release.evidence, streams=()))


def test_an_older_build_that_knows_the_schema_reads_releases_with_evidence_of_streams() -> None:
    release = release_with_streams()
    old = {**PACKAGED.newest, "drafter_released": PACKAGED.by_id[30_001]}
    frame = encode(release)
    assert frame[1:5] == (30_002).to_bytes(4, "big")
    schema = PACKAGED.by_id[30_002].parsed
    record = fastavro.schemaless_reader(
        io.BytesIO(frame[5:]), schema, old["drafter_released"].parsed
    )
    assert isinstance(record, dict)
    assert isinstance(record["evidence"], dict)
    assert "streams" not in record["evidence"]
    assert record["evidence"]["difference_low"] == 0.25
    assert decode_drafter_released(frame) == release


def test_invalid_the_wire_of_a_newer_build_without_its_schema_is_refused() -> None:
    record = from_verification_event(make_event()) | {"schema_version": 3}
    data = framed(stored_schema(3), record)
    with pytest.raises(ContractError, match="schema_id: found 10003, expected one of 10001, 10002"):
        decode_verification_event(data)


def test_invalid_a_schema_that_cannot_be_resolved_is_refused() -> None:
    old, event = stored_schema(0), plain_event()
    alien = wire_schema(
        "verification_event",
        '{"type": "record", "name": "VerificationEvent", "namespace": "draftloop", "fields": [],'
        ' "draftloop.schema_id": 10009, "draftloop.schema_version": 9}',
    )
    record = from_verification_event(event) | {"schema_version": 0}
    data = b"\x00" + (10_009).to_bytes(4, "big") + framed(old, record)[5:]
    with pytest.raises(ContractError, match="body"):
        decode_verification_event(data, table=PACKAGED.knowing(alien))


def test_every_schema_id_is_given_once_and_every_message_has_its_own_thousands() -> None:
    ids = [schema.schema_id for schema in PACKAGED.by_id.values()]
    assert len(set(ids)) == len(ids) == 5
    for schema in PACKAGED.by_id.values():
        assert schema.schema_id % 10_000 == schema.version


def test_files_of_an_older_version_are_read_with_their_defaults() -> None:
    older, current = (read_table(DATA / f"events.v{version}.parquet") for version in (0, 1))
    assert older.schema.equals(VERIFICATION_EVENT_SCHEMA)
    assert older["schema_version"].to_pylist() == [0, 0, 0]
    assert current["schema_version"].to_pylist() == [1, 1, 1]
    assert first_difference(events_from_table(current), events_from_table(older)) is None


def test_lists_that_older_files_lack_are_as_long_as_their_rounds() -> None:
    older, current = (read_table(DATA / f"events.v{version}.parquet") for version in (1, 2))
    for name in ("rounds_batch_size", "rounds_score_probability"):
        sizes = [len(row) for row in current[name].to_pylist()]
        assert sizes == [len(row) for row in older["rounds_first_position"].to_pylist()]
        assert older[name].to_pylist() == [[1] * size for size in sizes]
    for name in ("policy_table", "policy_numbers", "num_awake_rounds"):
        assert older[name].to_pylist() == [[], [], []]
        assert all(current[name].to_pylist())


def test_columns_that_came_later_do_not_change_the_others() -> None:
    older, current = (read_table(DATA / f"events.v{version}.parquet") for version in (1, 2))
    names = [column.name for column in columns_of(1) if column.name != "schema_version"]
    assert older.select(names).equals(current.select(names))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_old_and_new_files_concatenate_in_either_order(order: tuple[int, ...]) -> None:
    tables = [read_table(DATA / f"events.v{version}.parquet") for version in order]
    rows = events_from_table(pa.concat_tables(tables))
    assert [row.event.sequence for row in rows] == [0, 1, 2] * 3


def test_invalid_a_file_of_a_newer_version_is_refused_with_both_versions() -> None:
    with pytest.raises(ContractError) as refusal:
        read_table(DATA / "events.v3.parquet")
    assert refusal.value.path == "schema_version"
    assert refusal.value.found == "3"
    assert refusal.value.expected.startswith(f"<= {SCHEMA_VERSION};")


def test_invalid_newer_rows_are_refused_even_when_the_file_says_nothing(tmp_path: Path) -> None:
    table = pq.read_table(DATA / "events.v3.parquet").replace_schema_metadata(None)
    pq.write_table(table, tmp_path / "mixed.parquet")
    with pytest.raises(ContractError, match="schema_version: found 3"):
        read_table(tmp_path / "mixed.parquet")


def test_invalid_an_empty_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    table = pq.read_table(DATA / "events.v3.parquet").slice(0, 0)
    pq.write_table(table, tmp_path / "empty.parquet")
    with pytest.raises(ContractError, match="schema_version: found 3"):
        read_table(tmp_path / "empty.parquet")


def test_a_file_read_is_written_again_without_loss(tmp_path: Path) -> None:
    table = read_table(DATA / "events.v1.parquet")
    write_table(table, tmp_path / "again.parquet")
    assert read_table(tmp_path / "again.parquet").equals(table)


def test_a_column_that_came_later_can_be_filled_in_older_files() -> None:
    for column in COLUMNS:
        assert column.since <= SCHEMA_VERSION
        assert column.since == 1 or column.nullable or column.default is not None
    assert columns_of(SCHEMA_VERSION) == COLUMNS
    assert columns_of(0) == ()
    assert {column.name for column in set(COLUMNS) - set(columns_of(1))} == {
        *("policy_table", "policy_numbers", "num_awake_rounds"),
        *("rounds_batch_size", "rounds_score_probability"),
    }


def test_defaults_of_columns_are_those_of_the_wire() -> None:
    fields = {field["name"]: field for field in PACKAGED.by_id[10_002].parsed["fields"]}
    for part in ("sampling", "rounds"):
        fields |= {f"{part}_{one['name']}": one for one in fields[part]["type"]["fields"]}
    wire = {name: field["default"] for name, field in fields.items() if "default" in field}
    declared = {column.name: column.default for column in COLUMNS if column.default is not None}
    assert declared.keys() == wire.keys() - {"content"}
    for column in COLUMNS:
        # Empty bytes stand for an empty list, or for the default in every round.
        if column.default is not None and wire[column.name] != "":
            assert column.default == wire[column.name], column.name


def test_the_table_of_events_has_exactly_the_declared_columns() -> None:
    table = events_to_table(make_logged([make_event()]))
    assert table.column_names == [column.name for column in COLUMNS]
