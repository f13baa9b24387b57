"""Segments read as arrays are those read as messages, and refuse what messages refuse."""

from __future__ import annotations

from dataclasses import fields
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.segments import Segment, segment_of_row, segments_of_batch
from schemas.arrow import LoggedEvent, events_from_table, events_to_table
from schemas.columns import COLUMNS
from schemas.errors import ContractError
from tests.replay.logs import rich_events
from tests.replay.synthetic import log, make_request, split
from tests.schemas.strategies import logged_events


def batch_of(table: pa.Table) -> pa.RecordBatch:
    (batch,) = table.combine_chunks().to_batches()
    return batch


@cache
def some_table() -> pa.Table:
    """Return rows with pools of different sizes, a cut request and a request of one position."""
    events = [*rich_events(9), *split(make_request(sequence=90, request_id="cut"), 6)]
    events.append(make_request(num_tokens=1, sequence=99, request_id="short"))
    return events_to_table(log(events))


def assert_equal(one: Segment, other: Segment) -> None:
    for field in fields(Segment):
        values = getattr(one, field.name), getattr(other, field.name)
        if isinstance(values[0], np.ndarray):
            assert values[0].dtype == values[1].dtype, field.name
            is_float = values[0].dtype.kind == "f"
            assert np.array_equal(*values, equal_nan=is_float), field.name
        else:
            assert values[0] == values[1], field.name


def test_segments_of_columns_are_those_of_messages() -> None:
    table = some_table()
    expected = [segment_of_row(logged) for logged in events_from_table(table)]
    found = list(segments_of_batch(batch_of(table)))
    assert len(found) == len(expected) == 12
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


@given(st.lists(logged_events(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_any_valid_rows_are_read_alike(rows: list[LoggedEvent]) -> None:
    found = list(segments_of_batch(batch_of(events_to_table(rows))))
    for one, logged in zip(found, rows, strict=True):
        assert_equal(one, segment_of_row(logged))


def test_a_part_of_a_batch_is_read_as_itself() -> None:
    table = some_table()
    expected = [segment_of_row(logged) for logged in events_from_table(table.slice(3, 5))]
    found = list(segments_of_batch(batch_of(table).slice(3, 5)))
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)


def test_a_segment_does_not_hold_its_batch_in_memory() -> None:
    segment = next(segments_of_batch(batch_of(some_table())))
    for field in fields(Segment):
        value = getattr(segment, field.name)
        if isinstance(value, np.ndarray):
            held = value if value.base is None else value.base
            assert isinstance(held, np.ndarray), field.name
            assert held.nbytes <= value.nbytes, field.name


def changed(table: pa.Table, name: str, row: int, value: Any) -> pa.Table:
    """Return the table with one value replaced."""
    values = table[name].to_pylist()
    values[row] = value(values[row]) if callable(value) else value
    at = table.schema.get_field_index(name)
    field = table.schema.field(name)
    return table.set_column(at, field, pa.array(values, field.type))


def with_item(index: int, value: Any) -> Any:
    def change(values: list[Any]) -> list[Any]:
        return [*values[:index], value, *values[index:][1:]]

    return change


def half(value: float) -> np.float16:
    return np.float16(value)


CHANGES: list[tuple[str, Any]] = [
    ("topic", "a/b"),
    ("partition", -1),
    ("offset", -1),
    ("event_id", ""),
    ("worker_id", "a b"),
    ("stream", "\N{SNOWMAN}"),
    ("stream", "x" * 201),
    ("request_id", "line\n"),
    ("target_id", "."),
    ("policy_name", "hedge?"),
    ("policy_name", "hedge:learning_rate=0.5,scope=stream"),
    ("worker_epoch", -1),
    ("sequence", -7),
    ("segment_index", -1),
    ("policy_version", -1),
    ("is_final", False),
    ("finish_reason", "unfinished"),
    ("finish_reason", "bored"),
    ("sampling_acceptance_rule", "none"),
    ("sampling_temperature", 0.7),
    ("sampling_temperature", float("nan")),
    ("sampling_top_p", 0.0),
    ("sampling_top_k", -1),
    ("num_speculative_tokens", 3),
    ("num_speculative_tokens", 2**15),
    ("num_prompt_tokens", 10),
    ("num_prompt_tokens", -1),
    ("first_position", 8),
    ("num_positions", 99),
    ("prior_probabilities", with_item(0, 1.5)),
    ("prior_probabilities", with_item(0, 0.3334)),
    ("prior_probabilities", [0.5, 0.5]),
    ("policy_table", [1.0, 2.0, 3.0]),
    ("policy_table", [1.0, 2.0]),
    ("policy_table", [1.0, 2.0, float("inf")]),
    ("policy_numbers", [1.0]),
    ("num_awake_rounds", [1, 1, 1]),
    ("num_awake_rounds", [1, 1, 1000]),
    ("num_awake_rounds", [1]),
    ("drafter_ids", ["a", "a", "b"]),
    ("drafter_ids", ["a", "b", "c/d"]),
    ("drafter_weights_versions", with_item(1, -1)),
    ("rounds_first_position", with_item(2, 1)),
    ("rounds_drafter_index", with_item(2, 3)),
    ("rounds_drafter_index", with_item(2, -2)),
    ("rounds_drafter_index", with_item(1, -1)),
    ("rounds_num_draft_tokens", with_item(1, 5)),
    ("rounds_num_accepted_tokens", with_item(1, 5)),
    ("rounds_num_accepted_tokens", with_item(1, -1)),
    ("rounds_num_emitted_tokens", with_item(1, 9)),
    ("rounds_num_emitted_tokens", with_item(0, 0)),
    ("rounds_num_scored_windows", with_item(0, -1)),
    ("rounds_selection_probability", with_item(0, 0.0)),
    ("rounds_selection_probability", with_item(0, 1.1)),
    ("rounds_selection_probability", with_item(0, float("nan"))),
    ("rounds_draft_seconds", with_item(0, -1.0)),
    ("rounds_verify_seconds", with_item(0, float("inf"))),
    ("rounds_batch_size", with_item(0, 0)),
    ("rounds_score_probability", with_item(0, 0.0)),
    ("windows_start", with_item(3, 0)),
    ("windows_start", with_item(3, 10_000)),
    ("windows_num_levels", with_item(3, 3)),
    ("windows_num_levels", with_item(-1, 4)),
    ("windows_acceptance_probability", with_item(7, half(1.001))),
    ("windows_acceptance_probability", with_item(7, half(-0.5))),
    ("windows_acceptance_probability", with_item(7, half(-0.0))),
    ("windows_acceptance_probability", with_item(7, half(np.inf))),
    ("windows_acceptance_probability", with_item(7, half(np.nan))),
    ("windows_realised_acceptance", with_item(7, half(2.0))),
    ("windows_realised_acceptance", with_item(-1, half(0.5))),
]


def refusal(read: Any) -> str | None:
    try:
        list(read())
    except ContractError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_row_is_refused_exactly_where_a_message_is(name: str, value: Any) -> None:
    table = changed(some_table(), name, 1, value)
    expected = refusal(lambda: events_from_table(table))
    assert refusal(lambda: segments_of_batch(batch_of(table))) == expected


def test_most_of_these_changes_break_the_contract() -> None:
    tables = [changed(some_table(), name, 1, value) for name, value in CHANGES]
    refusals = [refusal(partial(events_from_table, table)) for table in tables]
    assert sum(one is not None for one in refusals) > len(CHANGES) - 8


def test_rows_before_a_broken_one_are_read() -> None:
    table = changed(some_table(), "num_positions", 4, 99)
    found = []
    with pytest.raises(ContractError, match="num_positions: found 99"):
        for segment in segments_of_batch(batch_of(table)):
            found.append(segment)
    assert len(found) == 4


@pytest.mark.parametrize("name", ["windows_num_levels", "rounds_draft_seconds", "drafter_ids"])
def test_lists_of_unequal_length_are_refused(name: str) -> None:
    table = changed(some_table(), name, 1, lambda values: values[:-1])
    with pytest.raises(ValueError):
        list(segments_of_batch(batch_of(table)))


def test_a_missing_column_and_a_null_are_refused_by_name() -> None:
    table = some_table()
    with pytest.raises(ContractError, match="stream: found no such column"):
        list(segments_of_batch(batch_of(table.drop_columns(["stream"]))))
    nulls = pa.array([None] * table.num_rows, pa.string())
    at = table.schema.get_field_index("stream")
    with pytest.raises(ContractError, match="stream: found 12 nulls"):
        list(segments_of_batch(batch_of(table.set_column(at, "stream", nulls))))


def test_columns_of_a_later_version_are_filled_for_older_rows() -> None:
    table = some_table()
    old = table.drop_columns([column.name for column in COLUMNS if column.since > 1])
    old = old.set_column(0, "schema_version", pa.array([1] * old.num_rows, pa.int32()))
    old = old.replace_schema_metadata({b"draftloop.schema_version": b"1"})
    for one, other in zip(
        segments_of_batch(batch_of(old)), segments_of_batch(batch_of(table)), strict=True
    ):
        assert_equal(one, other)
