"""The Parquet log: exact round trips, explicit types, nothing guessed."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import arrow
from schemas.arrow import (
    VERIFICATION_EVENT_SCHEMA,
    LoggedEvent,
    events_from_table,
    events_to_table,
    read_table,
    write_table,
)
from schemas.codec import encode
from schemas.columns import PARTITION_SCHEMA, conform
from schemas.equality import first_difference
from schemas.errors import ContractError
from tests.schemas.builders import make_drafters, make_event, make_logged
from tests.schemas.strategies import logged_events


@pytest.fixture
def new_york_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a time zone that is not UTC and has daylight saving."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def written_and_read(table: pa.Table) -> pa.Table:
    file = io.BytesIO()
    write_table(table, file)
    return read_table(io.BytesIO(file.getvalue()))


def with_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, values)


@given(st.lists(logged_events(), max_size=4))
def test_events_survive_parquet_bit_for_bit(rows: list[LoggedEvent]) -> None:
    read = events_from_table(written_and_read(events_to_table(rows)))
    assert first_difference(rows, read) is None
    assert [encode(row.event) for row in rows] == [encode(row.event) for row in read]


def test_a_table_without_rows_keeps_the_whole_schema() -> None:
    table = written_and_read(events_to_table([]))
    assert table.schema.equals(VERIFICATION_EVENT_SCHEMA)
    assert events_from_table(table) == []


def test_slices_and_concatenations_keep_every_row_in_its_place() -> None:
    rows = make_logged([make_event(sequence=i, with_content=i % 2 == 0) for i in range(7)])
    table = events_to_table(rows)
    pieces = pa.concat_tables([table.slice(4, 3), table.slice(1, 2)])
    assert first_difference(rows[4:] + rows[1:3], events_from_table(pieces)) is None


def test_content_that_no_event_has_keeps_its_type(tmp_path: Path) -> None:
    without = events_to_table(make_logged([make_event()]))
    content = events_to_table(make_logged([make_event(sequence=1, with_content=True)]))
    write_table(without, tmp_path / "a.parquet")
    write_table(content, tmp_path / "b.parquet")
    dataset = ds.dataset(tmp_path, format="parquet", schema=VERIFICATION_EVENT_SCHEMA)
    assert len(events_from_table(dataset.to_table())) == 2
    assert without["content_token_ids"].type == content["content_token_ids"].type


def test_the_scores_of_a_file_are_one_flat_array() -> None:
    events = [make_event(sequence=i, num_windows=3 + i) for i in range(3)]
    table = written_and_read(events_to_table(make_logged(events)))
    column = table["windows_acceptance_probability"].combine_chunks()
    expected = np.concatenate([one.windows.acceptance_probability.ravel() for one in events])
    np.testing.assert_array_equal(column.flatten().to_numpy(), expected)


def test_arrays_that_are_read_cannot_be_written() -> None:
    event = events_from_table(events_to_table(make_logged([make_event()])))[0].event
    with pytest.raises(ValueError, match="read-only"):
        event.windows.acceptance_probability[0] = 1


def test_versions_are_columns_and_survive_the_concatenation_of_files() -> None:
    table = pa.concat_tables(
        [
            written_and_read(
                events_to_table(make_logged([make_event(policy_version=v, weights_version=v)]))
            )
            for v in (1, 2)
        ]
    )
    events = [row.event for row in events_from_table(table)]
    assert [event.policy_version for event in events] == [1, 2]
    assert [event.drafters[0].weights_version for event in events] == [1, 2]
    assert table["schema_version"].to_pylist() == [2, 2]


@pytest.mark.parametrize("name", ["007", "3000000000", "7753285016841556620", "2024-01"])
def test_ids_that_look_like_numbers_stay_strings(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "date=2026-03-29" / "hour=01"
    folder.mkdir(parents=True)
    drafters = tuple(replace(one, drafter_id=name) for one in make_drafters(1))
    rows = make_logged([make_event(stream=name, request_id=name, drafters=drafters)])
    write_table(events_to_table(rows), folder / "part.parquet")
    table = read_table(folder / "part.parquet")
    assert table["stream"].to_pylist() == [name]
    assert table["drafter_ids"].to_pylist() == [[name]]
    assert table.schema.equals(VERIFICATION_EVENT_SCHEMA)


def test_declared_partitions_keep_the_leading_zero_of_the_hour(tmp_path: Path) -> None:
    folder = tmp_path / "date=2026-03-29" / "hour=01"
    folder.mkdir(parents=True)
    write_table(events_to_table(make_logged([make_event()])), folder / "part.parquet")
    partitioning = ds.partitioning(PARTITION_SCHEMA, flavor="hive")
    dataset = ds.dataset(tmp_path, format="parquet", partitioning=partitioning)
    found = dataset.to_table(filter=ds.field("hour") == "01")
    assert found["hour"].to_pylist() == ["01"]
    assert first_difference(events_from_table(found), make_logged([make_event()])) is None


@pytest.mark.usefixtures("new_york_time")
def test_times_are_utc_microseconds_on_a_machine_in_new_york() -> None:
    moment = datetime(2026, 11, 1, 5, 30, 0, 1, tzinfo=UTC)
    rows = make_logged([make_event(produced_at=moment)], appended_at=moment)
    table = written_and_read(events_to_table(rows))
    assert table.schema.field("produced_at").type == pa.timestamp("us", "UTC")
    row = events_from_table(table)[0]
    assert (row.appended_at, row.event.produced_at) == (moment, moment)
    assert row.event.produced_at.utcoffset() == timedelta(0)


def test_the_largest_counts_survive_beside_nulls() -> None:
    huge = 7_753_285_016_841_556_620
    events = [
        make_event(sequence=huge, worker_epoch=2**63 - 1),
        make_event(sequence=1, with_content=True),
    ]
    table = written_and_read(events_to_table(make_logged(events, first_offset=huge)))
    rows = events_from_table(table)
    assert (rows[0].event.sequence, rows[0].event.worker_epoch) == (huge, 2**63 - 1)
    assert rows[0].offset == huge


def test_row_groups_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    table = events_to_table(make_logged([make_event(sequence=i) for i in range(8)]))
    monkeypatch.setattr(arrow, "ROW_GROUP_BYTES", table.nbytes // 4)
    file = io.BytesIO()
    write_table(table, file)
    assert pq.ParquetFile(file).num_row_groups == 4


def test_unknown_columns_are_left_out_on_purpose() -> None:
    table = events_to_table(make_logged([make_event()]))
    assert conform(table.append_column("extra", pa.array([1]))).equals(table)


def test_other_encodings_of_the_same_values_are_cast() -> None:
    table = events_to_table(make_logged([make_event()]))
    encoded = with_column(table, "stream", table["stream"].dictionary_encode())
    encoded = with_column(encoded, "sequence", table["sequence"].cast(pa.int32()))
    narrow = table["windows_start"].cast(pa.list_(pa.int32()))
    encoded = with_column(encoded, "windows_start", narrow)
    assert conform(encoded).equals(table)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("stream", pa.array([7])),
        ("sequence", pa.array([1.5])),
        ("partition", pa.array([2**40])),
        ("windows_acceptance_probability", pa.array([[0.1]], pa.list_(pa.float64()))),
        ("produced_at", pa.array([datetime(2026, 1, 1)], pa.timestamp("us"))),
        ("produced_at", pa.array([1], pa.timestamp("ns", "UTC"))),
    ],
)
def test_invalid_types_that_lost_or_would_lose_something_are_refused(
    name: str, values: pa.Array
) -> None:
    table = with_column(events_to_table(make_logged([make_event()])), name, values)
    with pytest.raises(ContractError) as refusal:
        events_from_table(table)
    assert refusal.value.path == name
    assert refusal.value.found == str(values.type)
    assert refusal.value.expected == str(VERIFICATION_EVENT_SCHEMA.field(name).type)


def test_invalid_nulls_in_a_required_column_are_refused() -> None:
    table = events_to_table(make_logged([make_event(), make_event(sequence=1)]))
    table = with_column(table, "sequence", pa.array([None, 1], pa.int64()))
    with pytest.raises(ContractError, match="sequence: found 1 nulls, expected no null"):
        conform(table)


def test_invalid_null_elements_are_refused() -> None:
    table = events_to_table(make_logged([make_event()]))
    table = with_column(table, "windows_start", pa.array([[None]], pa.list_(pa.int32())))
    with pytest.raises(ContractError, match="windows_start"):
        conform(table)


def test_invalid_a_required_column_that_is_missing_is_refused() -> None:
    table = events_to_table(make_logged([make_event()])).drop_columns(["windows_start"])
    with pytest.raises(ContractError, match="windows_start: found no such column"):
        conform(table)


def test_invalid_another_schema_is_never_written() -> None:
    table = events_to_table(make_logged([make_event()]))
    with pytest.raises(ContractError, match="schema"):
        write_table(table.append_column("extra", pa.array([1])), io.BytesIO())


def test_invalid_a_row_that_breaks_the_contract_is_named_by_its_offset() -> None:
    table = events_to_table(make_logged([make_event(), make_event(sequence=1)], first_offset=40))
    policy_versions = pa.array([0, -3], pa.int64())
    with pytest.raises(ContractError) as refusal:
        events_from_table(with_column(table, "policy_version", policy_versions))
    assert refusal.value.path == "draftloop.verification-events/0/41.policy_version"
    assert refusal.value.found == "-3"


def test_invalid_scores_that_do_not_fit_the_pool_are_refused() -> None:
    table = events_to_table(make_logged([make_event(num_windows=1)]))
    table = with_column(table, "num_speculative_tokens", pa.array([3], pa.int64()))
    with pytest.raises(ContractError, match=r"found 12 values, expected shape \(1, 3, 3\)"):
        events_from_table(table)


@pytest.mark.parametrize("data", [b"", b"PAR1", b"not parquet at all"])
def test_invalid_files_that_are_no_parquet_are_refused_by_name(data: bytes, tmp_path: Path) -> None:
    file = tmp_path / "broken.parquet"
    file.write_bytes(data)
    with pytest.raises(ContractError, match=r"broken\.parquet"):
        read_table(file)


def test_invalid_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cut.parquet"
    write_table(events_to_table(make_logged([make_event()])), file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ContractError, match=r"cut\.parquet"):
        read_table(file)


def test_invalid_a_flipped_bit_in_a_page_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "flipped.parquet"
    write_table(events_to_table(make_logged([make_event()])), file)
    with pq.ParquetFile(file) as parquet:
        chunk = parquet.metadata.row_group(0).column(5)
    data = bytearray(file.read_bytes())
    data[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(ContractError, match=r"flipped\.parquet"):
        read_table(file)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_table(tmp_path / "absent.parquet")
