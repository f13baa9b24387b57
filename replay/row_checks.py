"""The rules of ``schemas.checks`` over a whole batch of rows at once.

A row that these checks pass keeps the contract. One that they stop need not break it: it is read
once more as a message, which refuses it with the reason or lets it pass. So they may be stricter
than the contract, never laxer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from replay.row_kernels import wrong_arrays
from schemas.checks import IDENTIFIER, MAX_LEVELS, POLICY
from schemas.events import AcceptanceRule, FinishReason

MAX_POSITION = 2**31 - 1

_COUNTED = re.compile(r"(.*)\{0,(\d+)\}")

_IDENTIFIERS = ("topic", "event_id", "worker_id", "stream", "request_id", "target_id")
_COUNTS = {
    **dict.fromkeys(
        ("offset", "worker_epoch", "sequence", "segment_index", "policy_version"), 2**63 - 1
    ),
    **dict.fromkeys(
        ("partition", "num_prompt_tokens", "first_position", "num_positions"), MAX_POSITION
    ),
    "sampling_top_k": 2**63 - 1,
    "num_speculative_tokens": MAX_LEVELS,
}
_VECTORS = {
    "weights_versions": "drafter_weights_versions",
    "prior_probabilities": "prior_probabilities",
    "policy_table": "policy_table",
    "policy_numbers": "policy_numbers",
    "num_awake_rounds": "num_awake_rounds",
}


@dataclass(frozen=True, slots=True, eq=False)
class BatchArrays:
    """The list columns of a batch, one flat array each, with offsets (B + 1,) into it.

    Attributes:
        rounds: Fields of the rounds, float64 (F, R of all rows).
        windows: Start and number of levels, int32 (2, W of all rows).
        probability, realised: Scores of all rows, flat float16.
        num_drafters: Per row, (B,).
        vectors: Offsets and values of what is a list per row beside them.
    """

    round_offsets: NDArray[np.int64]
    rounds: NDArray[np.float64]
    window_offsets: NDArray[np.int64]
    windows: NDArray[np.int32]
    score_offsets: NDArray[np.int64]
    probability: NDArray[np.float16]
    realised: NDArray[np.float16]
    num_drafters: NDArray[np.int64]
    vectors: dict[str, tuple[NDArray[np.int64], NDArray[Any]]]

    @classmethod
    def of(cls, batch: pa.RecordBatch, round_fields: Sequence[str]) -> BatchArrays | None:
        """Take the arrays out of a batch; None if lists that belong together differ in length."""
        rounds = [_flat(batch.column(f"rounds_{name}")) for name in round_fields]
        starts, levels = (_flat(batch.column(f"windows_{n}")) for n in ("start", "num_levels"))
        probability = _flat(batch.column("windows_acceptance_probability"))
        realised = _flat(batch.column("windows_realised_acceptance"))
        num_drafters = np.diff(batch.column("drafter_ids").offsets.to_numpy())
        depth = batch.column("num_speculative_tokens").to_numpy()
        num_scores = np.diff(starts[0]) * depth * num_drafters
        vectors = {name: _flat(batch.column(column)) for name, column in _VECTORS.items()}
        hashes = batch.column("drafter_vocabulary_hashes").offsets.to_numpy()
        fits = (
            all(_same_lengths(rounds[0][0], offsets) for offsets, _ in rounds)
            and _same_lengths(starts[0], levels[0])
            and _same_lengths(probability[0], realised[0])
            and np.array_equal(np.diff(probability[0]), num_scores)
            and np.array_equal(np.diff(vectors["weights_versions"][0]), num_drafters)
            and np.array_equal(np.diff(vectors["prior_probabilities"][0]), num_drafters)
            and np.array_equal(np.diff(hashes), num_drafters)
        )
        if not fits:
            return None
        return cls(
            *_packed(rounds, np.float64),
            *_packed([starts, levels], np.int32),
            probability[0],
            probability[1],
            realised[1],
            num_drafters,
            vectors,
        )


def _flat(column: pa.LargeListArray) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return offsets that begin at 0, and the values between the first and the last."""
    offsets = column.offsets.to_numpy()
    values = column.values.to_numpy()[offsets[0] : offsets[-1]]
    return offsets - offsets[0], values


def _same_lengths(one: NDArray[np.int64], other: NDArray[np.int64]) -> bool:
    return np.array_equal(one, other)


def _packed(
    columns: Sequence[tuple[NDArray[np.int64], NDArray[Any]]], dtype: Any
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Stack columns of equal lengths, (F, total)."""
    offsets = columns[0][0]
    packed = np.empty((len(columns), int(offsets[-1])), dtype=dtype)
    for row, (_, values) in zip(packed, columns, strict=True):
        row[:] = values
    return offsets, packed


def looks_wrong(batch: pa.RecordBatch, arrays: BatchArrays) -> NDArray[np.bool_]:
    """Return the rows, (B,), that may break the contract."""
    wrong = _wrong_texts(batch) | _wrong_numbers(batch) | _wrong_pools(batch, arrays)
    is_final = batch.column("is_final").to_numpy(zero_copy_only=False)
    table, numbers, awake, prior = (
        arrays.vectors[name]
        for name in (
            *("policy_table", "policy_numbers", "num_awake_rounds"),
            "prior_probabilities",
        )
    )
    wrong_arrays(
        arrays.round_offsets,
        arrays.rounds,
        arrays.window_offsets,
        arrays.windows,
        arrays.score_offsets,
        arrays.probability.view(np.uint16),
        arrays.realised.view(np.uint16),
        arrays.num_drafters,
        *prior,
        *table,
        *numbers,
        *awake,
        _numbers(batch, "segment_index"),
        _numbers(batch, "num_speculative_tokens"),
        _numbers(batch, "num_prompt_tokens"),
        _numbers(batch, "first_position"),
        _numbers(batch, "num_positions"),
        is_final,
        wrong,
    )
    return wrong


def _numbers(batch: pa.RecordBatch, name: str) -> NDArray[Any]:
    values: NDArray[Any] = batch.column(name).to_numpy()
    return values


def _matches(texts: pa.Array, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    """Return which texts match a first character and a counted class of others.

    The count is checked beside: counted classes are slow.
    """
    classes, longest = _COUNTED.fullmatch(pattern.pattern).groups()  # type: ignore[union-attr]
    found = pc.match_substring_regex(texts, pattern=rf"\A{classes}*\z")
    found = pc.and_(found, pc.less_equal(pc.binary_length(texts), 1 + int(longest)))
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)


def _is_one_of(texts: pa.Array, values: Sequence[str]) -> NDArray[np.bool_]:
    found = pc.is_in(texts, value_set=pa.array(values, texts.type))
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.bool_)


def _wrong_texts(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    good = _matches(batch.column("policy_name"), POLICY)
    for name in _IDENTIFIERS:
        good &= _matches(batch.column(name), IDENTIFIER)
    reason = batch.column("finish_reason")
    good &= _is_one_of(reason, [str(one.value) for one in FinishReason])
    rule = batch.column("sampling_acceptance_rule")
    good &= _is_one_of(rule, [str(one.value) for one in AcceptanceRule])
    is_final = batch.column("is_final").to_numpy(zero_copy_only=False)
    good &= is_final != _is_one_of(reason, [FinishReason.UNFINISHED.value])
    is_greedy = _is_one_of(rule, [AcceptanceRule.GREEDY.value])
    good &= is_greedy == (_numbers(batch, "sampling_temperature") == 0.0)
    return ~good


def _wrong_numbers(batch: pa.RecordBatch) -> NDArray[np.bool_]:
    temperature, top_p = (_numbers(batch, f"sampling_{n}") for n in ("temperature", "top_p"))
    good = np.isfinite(temperature) & (temperature >= 0.0) & (top_p > 0.0) & (top_p <= 1.0)
    for name, highest in _COUNTS.items():
        values = _numbers(batch, name)
        good &= (values >= 0) & (values <= highest)
    return np.asarray(~good)


def _wrong_pools(batch: pa.RecordBatch, arrays: BatchArrays) -> NDArray[np.bool_]:
    """Return the rows with a bad or repeated drafter id or a negative version."""
    column = batch.column("drafter_ids")
    offsets = column.offsets.to_numpy()
    ids = column.values
    first, last = int(offsets[0]), int(offsets[-1])
    codes = ids.slice(first, last - first).dictionary_encode()
    good = _matches(codes.dictionary, IDENTIFIER)[codes.indices.to_numpy()]
    good &= arrays.vectors["weights_versions"][1] >= 0
    row = np.repeat(np.arange(batch.num_rows), arrays.num_drafters)
    pairs = np.unique(row * (len(codes.dictionary) + 1) + codes.indices.to_numpy())
    num_distinct = np.bincount(pairs // (len(codes.dictionary) + 1), minlength=batch.num_rows)
    wrong = num_distinct != arrays.num_drafters
    wrong[row[~good]] = True
    return np.asarray(wrong)
