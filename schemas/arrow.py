"""Verification events as Arrow tables and Parquet files, exactly and both ways.

The columns are declared, with the reasons for their layout, in ``columns``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from schemas import checks
from schemas.columns import SCHEMA_VERSION, VERIFICATION_EVENT_SCHEMA, conform
from schemas.errors import ContractError
from schemas.events import (
    AcceptanceRule,
    Content,
    DrafterVersion,
    FeatureReference,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)
from schemas.packing import EPOCH, choice, microseconds

__all__ = [
    "VERIFICATION_EVENT_SCHEMA",
    "LoggedEvent",
    "events_from_table",
    "events_to_table",
    "read_table",
    "write_table",
]

ROW_GROUP_BYTES = 32 * 2**20
"""Most uncompressed bytes of a row group, so that a reader's memory is bounded."""

ROW_GROUP_ROWS = 16_384

_DICTIONARY_COLUMNS = [
    f"{field.name}.list.element" if pa.types.is_large_list(field.type) else field.name
    for field in VERIFICATION_EVENT_SCHEMA
    if not pa.types.is_floating(getattr(field.type, "value_type", field.type))
]
"""Floats are written plainly: as dictionaries they are twice as slow to write and to read, and
byte-stream splitting, which is as fast and smaller, is unknown to many readers for 16 bits."""

_PLAIN = (
    *("event_id", "worker_id", "worker_epoch", "sequence", "stream", "request_id"),
    *("segment_index", "is_final", "target_id", "target_fingerprint", "tokenizer_hash"),
    *("policy_name", "policy_version", "num_speculative_tokens", "num_prompt_tokens"),
    *("first_position", "num_positions"),
)
_VECTORS = ("prior_probabilities", "policy_table", "policy_numbers", "num_awake_rounds")
_FEATURES = tuple(FeatureReference.__dataclass_fields__)
_ARRAYS = {
    "rounds": tuple(Rounds.__dataclass_fields__),
    "windows": tuple(ScoredWindows.__dataclass_fields__),
    "content": tuple(name for name in Content.__dataclass_fields__ if name != "features"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedEvent:
    """A verification event with the place in the log it was read from.

    ``appended_at`` is the log's time (UTC); ``event.produced_at`` is the worker's.
    """

    topic: str
    partition: int
    offset: int
    appended_at: datetime
    event: VerificationEvent

    def __post_init__(self) -> None:
        checks.identifier("topic", self.topic)
        checks.count("partition", self.partition)
        checks.count("offset", self.offset)
        checks.utc("appended_at", self.appended_at)


def events_to_table(rows: Sequence[LoggedEvent]) -> pa.Table:
    """Return one row per event, with exactly ``VERIFICATION_EVENT_SCHEMA``."""
    events = [row.event for row in rows]
    name_to_values = {
        **_position_values(rows),
        **{name: [getattr(event, name) for event in events] for name in _PLAIN},
        **_nested_values(events),
        **_feature_values(events),
    }
    columns = {
        name: pa.array(values, VERIFICATION_EVENT_SCHEMA.field(name).type)
        for name, values in name_to_values.items()
    }
    for name in _VECTORS:
        columns[name] = _list_column(name, [getattr(event, name) for event in events])
    for prefix, names in _ARRAYS.items():
        parts = [getattr(event, prefix) for event in events]
        for name in names:
            arrays = [None if part is None else getattr(part, name) for part in parts]
            columns[f"{prefix}_{name}"] = _list_column(f"{prefix}_{name}", arrays)
    return pa.Table.from_pydict(columns, schema=VERIFICATION_EVENT_SCHEMA)


def _position_values(rows: Sequence[LoggedEvent]) -> dict[str, list[Any]]:
    return {
        "schema_version": [SCHEMA_VERSION] * len(rows),
        "topic": [row.topic for row in rows],
        "partition": [row.partition for row in rows],
        "offset": [row.offset for row in rows],
        "appended_at": [microseconds(row.appended_at) for row in rows],
    }


def _nested_values(events: Sequence[VerificationEvent]) -> dict[str, list[Any]]:
    pools = [event.drafters for event in events]
    rules = [event.sampling for event in events]
    return {
        "produced_at": [microseconds(event.produced_at) for event in events],
        "finish_reason": [event.finish_reason.value for event in events],
        "drafter_ids": [[one.drafter_id for one in pool] for pool in pools],
        "drafter_weights_versions": [[one.weights_version for one in pool] for pool in pools],
        "drafter_vocabulary_hashes": [
            [one.draft_vocabulary_hash for one in pool] for pool in pools
        ],
        "sampling_acceptance_rule": [rule.acceptance_rule.value for rule in rules],
        "sampling_temperature": [rule.temperature for rule in rules],
        "sampling_top_p": [rule.top_p for rule in rules],
        "sampling_top_k": [rule.top_k for rule in rules],
    }


def _feature_values(events: Sequence[VerificationEvent]) -> dict[str, list[Any]]:
    contents = [event.content for event in events]
    references = [None if content is None else content.features for content in contents]
    values = {
        f"content_features_{name}": [
            None if reference is None else getattr(reference, name) for reference in references
        ]
        for name in _FEATURES
    }
    values["content_num_top_tokens"] = [
        None if content is None else content.target_top_token_ids.shape[1] for content in contents
    ]
    return values


def _list_column(name: str, arrays: Sequence[NDArray[Any] | None]) -> pa.LargeListArray:
    """Concatenate one array per row into a list column; None is null."""
    kind = VERIFICATION_EVENT_SCHEMA.field(name).type
    present = [values.ravel() for values in arrays if values is not None]
    empty = np.empty(0, kind.value_type.to_pandas_dtype())
    lengths = [0 if values is None else values.size for values in arrays]
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    is_null = np.fromiter((values is None for values in arrays), np.bool_, len(arrays))
    return pa.LargeListArray.from_arrays(
        pa.array(offsets, pa.int64()),
        pa.array(np.concatenate([empty, *present])),
        type=kind,
        mask=pa.array(is_null) if is_null.any() else None,
    )


def events_from_table(table: pa.Table) -> list[LoggedEvent]:
    """Return the events of a table, in its order.

    Raises:
        ContractError: If the table does not conform, or a row breaks the contract; the path then
            starts with ``<topic>/<partition>/<offset>``.
    """
    rows: list[LoggedEvent] = []
    for batch in conform(table).to_batches():
        rows.extend(_logged_events(batch))
    return rows


def _logged_events(batch: pa.RecordBatch) -> Iterator[LoggedEvent]:
    row_readers = {name: _row_reader(batch.column(name)) for name in batch.schema.names}
    for index in range(batch.num_rows):

        def value(name: str, index: int = index) -> Any:
            return row_readers[name](index)

        try:
            event = _event(value)
        except ContractError as error:
            where = f"{value('topic')}/{value('partition')}/{value('offset')}"
            raise error.under(where) from error
        yield LoggedEvent(
            topic=value("topic"),
            partition=value("partition"),
            offset=value("offset"),
            appended_at=value("appended_at"),
            event=event,
        )


def _row_reader(column: pa.Array) -> Callable[[int], Any]:
    """Return a function from row number to value: arrays as views, times as UTC datetimes."""
    if pa.types.is_timestamp(column.type):
        counts = column.cast(pa.int64()).to_pylist()
        return lambda row: EPOCH + timedelta(microseconds=counts[row])
    if pa.types.is_large_list(column.type) and not pa.types.is_string(column.type.value_type):
        offsets = column.offsets.to_numpy().tolist()
        flat = column.values.to_numpy()
        return lambda row: flat[offsets[row] : offsets[row + 1]]
    values = column.to_pylist()
    return lambda row: values[row]


def _event(value: Callable[[str], Any]) -> VerificationEvent:
    plain = {name: value(name) for name in _PLAIN}
    drafters = zip(
        value("drafter_ids"),
        value("drafter_weights_versions").tolist(),
        value("drafter_vocabulary_hashes"),
        strict=True,
    )
    pool = tuple(
        DrafterVersion(drafter_id=one, weights_version=version, draft_vocabulary_hash=vocabulary)
        for one, version, vocabulary in drafters
    )
    return VerificationEvent(
        **plain,
        produced_at=value("produced_at"),
        **{name: value(name) for name in _VECTORS},
        finish_reason=choice("finish_reason", FinishReason, value("finish_reason")),
        drafters=pool,
        sampling=SamplingRule(
            acceptance_rule=choice(
                "sampling.acceptance_rule", AcceptanceRule, value("sampling_acceptance_rule")
            ),
            temperature=value("sampling_temperature"),
            top_p=value("sampling_top_p"),
            top_k=value("sampling_top_k"),
        ),
        rounds=Rounds(**{name: value(f"rounds_{name}") for name in _ARRAYS["rounds"]}),
        windows=_windows(value, len(pool)),
        content=_content(value),
    )


def _windows(value: Callable[[str], Any], num_drafters: int) -> ScoredWindows:
    start = value("windows_start")
    shape = (len(start), value("num_speculative_tokens"), num_drafters)
    return ScoredWindows(
        start=start,
        num_levels=value("windows_num_levels"),
        acceptance_probability=_shaped(value, "windows_acceptance_probability", shape),
        realised_acceptance=_shaped(value, "windows_realised_acceptance", shape),
    )


def _content(value: Callable[[str], Any]) -> Content | None:
    num_top_tokens = value("content_num_top_tokens")
    if num_top_tokens is None:
        return None
    shape = (value("num_positions"), num_top_tokens)
    uri = value("content_features_uri")
    return Content(
        prompt_token_ids=value("content_prompt_token_ids"),
        token_ids=value("content_token_ids"),
        target_top_token_ids=_shaped(value, "content_target_top_token_ids", shape),
        target_top_log_probabilities=_shaped(value, "content_target_top_log_probabilities", shape),
        target_tail_mass=value("content_target_tail_mass"),
        features=None
        if uri is None
        else FeatureReference(**{name: value(f"content_features_{name}") for name in _FEATURES}),
    )


def _shaped(value: Callable[[str], Any], name: str, shape: tuple[int, ...]) -> NDArray[Any]:
    flat: NDArray[Any] = value(name)
    if min(shape) < 0 or flat.size != np.prod(shape, dtype=np.int64):
        raise ContractError(name, found=f"{flat.size} values", expected=f"shape {shape}")
    return flat.reshape(shape)


def write_table(table: pa.Table, file: str | Path | IO[bytes]) -> None:
    """Write events as Parquet (zstd, bounded row groups, page checksums).

    Raises:
        ContractError: If the table has another schema than ``VERIFICATION_EVENT_SCHEMA``.
    """
    if not table.schema.equals(VERIFICATION_EVENT_SCHEMA):
        raise ContractError(
            "schema", found=table.schema.to_string(), expected="VERIFICATION_EVENT_SCHEMA"
        )
    bytes_per_row = max(1, table.nbytes // max(1, table.num_rows))
    pq.write_table(
        table,
        file,
        compression="zstd",
        use_dictionary=_DICTIONARY_COLUMNS,
        row_group_size=max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // bytes_per_row)),
        write_page_checksum=True,
    )


def read_table(file: str | Path | IO[bytes]) -> pa.Table:
    """Read one Parquet file of this or an older schema version.

    Raises:
        ContractError: If it is no readable Parquet file, or ``columns.conform`` refuses it.
        OSError: If the file cannot be opened.
    """
    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as parquet:
            table = parquet.read()
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ContractError(str(file), found=str(error), expected="a Parquet file") from error
    return conform(table)
