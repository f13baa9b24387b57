"""The columns of the Parquet log, declared one by one, and how older files are brought to them.

Layout: every numeric array of an event is one list column with flat, row-major, non-null values.
A columnar reader gets all values of a file as one array (``column.chunk(i).flatten()``) and one
offset per event, with no Python per row, and other engines can still see numbers, which opaque
binary columns would hide. The scores have the shape (W, K, N): the lengths of ``windows_start``,
``num_speculative_tokens`` and the length of ``drafter_ids``. Lists are large (64-bit offsets),
because the scores of many events pass 2^31 values. Ids are plain strings: "007" stays "007".
Versions are columns, since file metadata is lost when tables are concatenated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.errors import ContractError

SCHEMA_VERSION = 2
"""Version of the columns below; it grows when a column is added."""

UTC_MICROSECONDS = pa.timestamp("us", "UTC")

PARTITION_SCHEMA = pa.schema([("date", pa.string()), ("hour", pa.string())])
"""Types of the folder names ``date=.../hour=...``; never let a reader guess them."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    A column added later needs ``since`` and must be nullable or have a ``default``, which rows
    of older files get; a list column with ``like`` gets one for each element of that column.
    """

    name: str
    type: pa.DataType
    nullable: bool = False
    default: Any = None
    since: int = 1
    like: str | None = None

    @property
    def field(self) -> pa.Field:
        """Return the Arrow field."""
        return pa.field(self.name, self.type, nullable=self.nullable)


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.large_list(pa.field("element", kind, nullable=False))


_ROUNDS = "rounds_first_position"

COLUMNS: tuple[Column, ...] = (
    Column("schema_version", pa.int32(), default=1),
    Column("topic", pa.string()),
    Column("partition", pa.int32()),
    Column("offset", pa.int64()),
    Column("appended_at", UTC_MICROSECONDS),
    Column("event_id", pa.string()),
    Column("worker_id", pa.string()),
    Column("worker_epoch", pa.int64()),
    Column("sequence", pa.int64()),
    Column("produced_at", UTC_MICROSECONDS),
    Column("stream", pa.string()),
    Column("request_id", pa.string()),
    Column("segment_index", pa.int64()),
    Column("is_final", pa.bool_()),
    Column("finish_reason", pa.string()),
    Column("target_id", pa.string()),
    Column("target_fingerprint", pa.string()),
    Column("tokenizer_hash", pa.string()),
    Column("policy_name", pa.string()),
    Column("policy_version", pa.int64()),
    Column("prior_probabilities", _list_of(pa.float64())),
    Column("policy_table", _list_of(pa.float64()), default=(), since=2),
    Column("policy_numbers", _list_of(pa.float64()), default=(), since=2),
    Column("drafter_ids", _list_of(pa.string())),
    Column("drafter_weights_versions", _list_of(pa.int64())),
    Column("drafter_vocabulary_hashes", _list_of(pa.string())),
    Column("sampling_acceptance_rule", pa.string()),
    Column("sampling_temperature", pa.float64()),
    Column("sampling_top_p", pa.float64(), default=1.0),
    Column("sampling_top_k", pa.int64(), default=0),
    Column("num_speculative_tokens", pa.int64()),
    Column("num_prompt_tokens", pa.int64()),
    Column("first_position", pa.int64()),
    Column("num_positions", pa.int64()),
    Column("num_awake_rounds", _list_of(pa.int32()), default=(), since=2),
    Column("rounds_first_position", _list_of(pa.int32())),
    Column("rounds_drafter_index", _list_of(pa.int16())),
    Column("rounds_num_draft_tokens", _list_of(pa.int16())),
    Column("rounds_num_accepted_tokens", _list_of(pa.int16())),
    Column("rounds_num_emitted_tokens", _list_of(pa.int16())),
    Column("rounds_num_scored_windows", _list_of(pa.int16())),
    Column("rounds_selection_probability", _list_of(pa.float32())),
    Column("rounds_draft_seconds", _list_of(pa.float32())),
    Column("rounds_verify_seconds", _list_of(pa.float32())),
    Column("rounds_score_seconds", _list_of(pa.float32())),
    Column("rounds_batch_size", _list_of(pa.int16()), default=1, since=2, like=_ROUNDS),
    Column("rounds_score_probability", _list_of(pa.float32()), default=1.0, since=2, like=_ROUNDS),
    Column("windows_start", _list_of(pa.int32())),
    Column("windows_num_levels", _list_of(pa.int16())),
    Column("windows_acceptance_probability", _list_of(pa.float16())),
    Column("windows_realised_acceptance", _list_of(pa.float16())),
    Column("content_num_top_tokens", pa.int32(), nullable=True),
    Column("content_prompt_token_ids", _list_of(pa.int32()), nullable=True),
    Column("content_token_ids", _list_of(pa.int32()), nullable=True),
    Column("content_target_top_token_ids", _list_of(pa.int32()), nullable=True),
    Column("content_target_top_log_probabilities", _list_of(pa.float16()), nullable=True),
    Column("content_target_tail_mass", _list_of(pa.float16()), nullable=True),
    Column("content_features_uri", pa.string(), nullable=True),
    Column("content_features_first_row", pa.int64(), nullable=True),
    Column("content_features_num_rows", pa.int64(), nullable=True),
    Column("content_features_sha256", pa.string(), nullable=True),
)

VERIFICATION_EVENT_SCHEMA = pa.schema(
    [column.field for column in COLUMNS],
    metadata={b"draftloop.schema_version": str(SCHEMA_VERSION).encode()},
)


def columns_of(version: int) -> tuple[Column, ...]:
    """Return the columns that files of schema ``version`` have."""
    return tuple(column for column in COLUMNS if column.since <= version)


def conform(table: pa.Table) -> pa.Table:
    """Bring a table written by this or an older schema version to the declared columns.

    Missing columns get their declared default; unknown columns are left out; other widths of
    integers and encodings of text and lists are cast, other types are not.

    Raises:
        ContractError: If a row has a newer schema version, a column without default is missing,
            a value does not fit, or a null stands where none may.
    """
    refuse_newer(table)
    columns = [_conformed(table, column) for column in COLUMNS]
    return pa.Table.from_arrays(columns, schema=VERIFICATION_EVENT_SCHEMA)


def refuse_newer(table: pa.Table) -> None:
    """Refuse rows, or an empty file, of a schema version that this build does not know."""
    written = (table.schema.metadata or {}).get(b"draftloop.schema_version", b"1")
    versions = {int(written)} if written.isdigit() else set()
    if "schema_version" in table.column_names:
        versions |= {version for version in table["schema_version"].unique().to_pylist() if version}
    newest = max(versions, default=SCHEMA_VERSION)
    if newest > SCHEMA_VERSION:
        raise ContractError(
            "schema_version",
            found=newest,
            expected=f"<= {SCHEMA_VERSION}; upgrade draftloop to read this file",
        )


def _conformed(table: pa.Table, column: Column) -> pa.ChunkedArray:
    if column.name not in table.column_names:
        return _filled(table, column)
    values = table[column.name]
    if values.type != column.type:
        values = _cast(values, column)
    if not column.nullable and values.null_count:
        raise ContractError(column.name, found=f"{values.null_count} nulls", expected="no null")
    if pa.types.is_large_list(column.type) and any(c.values.null_count for c in values.chunks):
        raise ContractError(column.name, found="null elements", expected="no null")
    return values


def _cast(values: pa.ChunkedArray, column: Column) -> pa.ChunkedArray:
    """Cast within one kind of type only: a reader that guessed 7 has already lost "007"."""
    refusal = ContractError(column.name, found=values.type, expected=column.type)
    if not pa.types.is_null(values.type) and _kind(values.type) != _kind(column.type):
        raise refusal
    try:
        return values.cast(column.type)
    except pa.ArrowException as error:
        raise refusal from error


def _kind(kind: pa.DataType) -> str:
    """Name what may be cast into each other: widths of integers, encodings of text and lists."""
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if pa.types.is_timestamp(kind):
        return "naive time" if kind.tz is None else "time"
    if pa.types.is_integer(kind):
        return "integer"
    return "text" if pa.types.is_large_string(kind) or pa.types.is_string(kind) else str(kind)


def _filled(table: pa.Table, column: Column) -> pa.ChunkedArray:
    if column.default is None and not column.nullable:
        raise ContractError(column.name, found="no such column", expected=column.type)
    if column.like is None:
        values = pa.repeat(pa.scalar(column.default, column.type), table.num_rows)
    else:
        values = _filled_like(table, column)
    return pa.chunked_array([values], column.type)


def _filled_like(table: pa.Table, column: Column) -> pa.Array:
    """Return lists as long as those of another column, of the default alone."""
    if column.like not in table.column_names:
        raise ContractError(str(column.like), found="no such column", expected="a list")
    lengths = pc.fill_null(pc.list_value_length(table[column.like]), 0).to_numpy()
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    values = pa.repeat(pa.scalar(column.default, column.type.value_type), int(offsets[-1]))
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values, type=column.type)
