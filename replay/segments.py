"""Segments of requests, straight from the columns of the log.

An event as a checked message costs a fraction of a millisecond, which is most of the time of a
replay. Here a batch of rows is checked as arrays (``row_checks``) and cut into segments; only a row
that looks wrong is read as a message, whose refusal says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from replay.row_checks import BatchArrays, looks_wrong
from schemas.arrow import LoggedEvent, events_from_table
from schemas.columns import conform
from schemas.events import AcceptanceRule, FinishReason, Rounds, VerificationEvent
from schemas.packing import microseconds

ROUND_FIELDS = tuple(field.name for field in fields(Rounds))
PROMPT = "content_prompt_token_ids"
"""The one column of content that a re-run may ask for."""

CENSORED = (FinishReason.ABORTED, FinishReason.ERROR)

_PLAIN = (
    *("worker_id", "worker_epoch", "sequence", "stream", "request_id", "segment_index"),
    *("is_final", "policy_name", "num_speculative_tokens", "num_prompt_tokens"),
    *("first_position", "num_positions"),
)
_SCALARS = ("topic", "partition", "offset", "appended_at", "produced_at", *_PLAIN)
_OF_EVENT = (
    *_PLAIN,
    *("drafter_ids", "prior_probabilities", "policy_table", "policy_numbers"),
    "num_awake_rounds",
)


_NO_TOKENS: NDArray[np.int32] = np.empty(0, dtype=np.int32)
_NO_TOKENS.flags.writeable = False


@dataclass(slots=True, kw_only=True, eq=False)
class Segment:
    """What replay needs of one event; shapes and ranges as in ``VerificationEvent``.

    Attributes:
        appended_at, produced_at: Microseconds since 1970, UTC.
        is_censored: The request was aborted or failed in this segment.
        is_deterministic: Accepted or not follows from the windows alone (greedy, one-hot).
        weights_versions: Per drafter, int64 (N,).
        rounds: The fields of ``Rounds`` in their order, float64, which holds them exactly,
            (F, R).
        windows: Start and number of levels of each window, int32 (2, W).
        acceptance_probability, realised_acceptance: float16 (W, K, N).
        prompt_token_ids: int32, in the first segment if its content was read; else empty.
    """

    topic: str
    partition: int
    offset: int
    appended_at: int
    worker_id: str
    worker_epoch: int
    sequence: int
    produced_at: int
    stream: str
    request_id: str
    segment_index: int
    is_final: bool
    is_censored: bool
    is_deterministic: bool
    policy_name: str
    num_speculative_tokens: int
    num_prompt_tokens: int
    first_position: int
    num_positions: int
    drafter_ids: tuple[str, ...]
    weights_versions: NDArray[np.int64]
    prior_probabilities: NDArray[np.float64]
    policy_table: NDArray[np.float64]
    policy_numbers: NDArray[np.float64]
    num_awake_rounds: NDArray[np.int32]
    rounds: NDArray[np.float64]
    windows: NDArray[np.int32]
    acceptance_probability: NDArray[np.float16]
    realised_acceptance: NDArray[np.float16]
    prompt_token_ids: NDArray[np.int32]


def segment_of_event(
    event: VerificationEvent,
    *,
    topic: str = "",
    partition: int = 0,
    offset: int = 0,
    appended_at: int = 0,
) -> Segment:
    """Return the segment of an event that was read as a message, and of its place in the log."""
    return Segment(
        topic=topic,
        partition=partition,
        offset=offset,
        appended_at=appended_at,
        **{name: getattr(event, name) for name in _OF_EVENT},
        produced_at=microseconds(event.produced_at),
        is_censored=event.finish_reason in CENSORED,
        is_deterministic=event.sampling.acceptance_rule is not AcceptanceRule.SPECULATIVE_SAMPLING,
        weights_versions=np.array([one.weights_version for one in event.drafters], np.int64),
        rounds=np.array([getattr(event.rounds, name) for name in ROUND_FIELDS], np.float64),
        windows=np.array([event.windows.start, event.windows.num_levels], np.int32),
        acceptance_probability=event.windows.acceptance_probability,
        realised_acceptance=event.windows.realised_acceptance,
        prompt_token_ids=_NO_TOKENS if event.content is None else event.content.prompt_token_ids,
    )


def segment_of_row(logged: LoggedEvent) -> Segment:
    """Return the segment of a row that was read as a message."""
    return segment_of_event(
        logged.event,
        topic=logged.topic,
        partition=logged.partition,
        offset=logged.offset,
        appended_at=microseconds(logged.appended_at),
    )


def segments_of_batch(batch: pa.RecordBatch) -> Iterator[Segment]:
    """Yield the segments of a batch of rows, in its order.

    Raises:
        ContractError: At the first row that breaks the contract, after those before it.
    """
    for part in conform(pa.Table.from_batches([batch])).to_batches():
        yield from _conformed_segments(part)


def _conformed_segments(batch: pa.RecordBatch) -> Iterator[Segment]:
    arrays = BatchArrays.of(batch, ROUND_FIELDS)
    if arrays is None:
        # Lists that belong together have different lengths somewhere.
        for index in range(batch.num_rows):
            yield segment_of_row(_checked_event(batch, index))
        return
    is_suspect = looks_wrong(batch, arrays)
    columns = [_plain(batch.column(name)) for name in _SCALARS]
    rules = batch.column("sampling_acceptance_rule").to_pylist()
    reasons = batch.column("finish_reason").to_pylist()
    ids = _Pools(batch.column("drafter_ids"))
    prompts = batch.column(PROMPT)
    for index, values in enumerate(zip(*columns, strict=True)):
        if is_suspect[index]:
            _checked_event(batch, index)
        yield Segment(
            **dict(zip(_SCALARS, values, strict=True)),
            is_censored=reasons[index] in CENSORED,
            is_deterministic=rules[index] != AcceptanceRule.SPECULATIVE_SAMPLING,
            drafter_ids=ids.of_row(index),
            prompt_token_ids=_tokens(prompts, index),
            **_arrays_of_row(arrays, index, values[_SCALARS.index("num_speculative_tokens")]),
        )


def _checked_event(batch: pa.RecordBatch, index: int) -> LoggedEvent:
    (event,) = events_from_table(pa.Table.from_batches([batch.slice(index, 1)]))
    return event


def _plain(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values


def _arrays_of_row(arrays: BatchArrays, index: int, num_levels: int) -> dict[str, Any]:
    """Return a row's arrays, copied: a view would keep the whole batch in memory."""
    first, last = arrays.round_offsets[index], arrays.round_offsets[index + 1]
    start, stop = arrays.window_offsets[index], arrays.window_offsets[index + 1]
    scores = slice(arrays.score_offsets[index], arrays.score_offsets[index + 1])
    shape = (stop - start, num_levels, arrays.num_drafters[index])
    found = {
        name: values[offsets[index] : offsets[index + 1]].copy()
        if offsets[index] < offsets[index + 1]
        else _empty(values.dtype)
        for name, (offsets, values) in arrays.vectors.items()
    }
    return {
        **found,
        "rounds": arrays.rounds[:, first:last].copy(),
        "windows": arrays.windows[:, start:stop].copy(),
        "acceptance_probability": arrays.probability[scores].copy().reshape(shape),
        "realised_acceptance": arrays.realised[scores].copy().reshape(shape),
    }


@cache
def _empty(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the one empty array of a type: most rows carry no state of a policy."""
    empty: NDArray[Any] = np.empty(0, dtype=dtype)
    empty.flags.writeable = False
    return empty


def _tokens(column: pa.LargeListArray, index: int) -> NDArray[np.int32]:
    values = column[index].values
    return _NO_TOKENS if values is None else np.array(values, dtype=np.int32)


class _Pools:
    """The drafter ids of every row, equal pools as the same tuple."""

    def __init__(self, column: pa.LargeListArray) -> None:
        self._offsets = column.offsets.to_pylist()
        self._ids = column.values.to_pylist()
        self._seen: dict[tuple[str, ...], tuple[str, ...]] = {}

    def of_row(self, index: int) -> tuple[str, ...]:
        """Return the ids of one row."""
        ids = tuple(self._ids[self._offsets[index] : self._offsets[index + 1]])
        return self._seen.setdefault(ids, ids)
