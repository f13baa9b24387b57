"""Decoding many events at once: one compiled walk over all, then one object each.

An event of the newest schema without content, as nearly all are, is read and checked by
``pipeline.messaging.wire_walk``. Whatever that does not accept is left to ``schemas.codec``, which
finds the place and both values, or that all is well. Texts that come back in event after event are
taken from an event that ``schemas.codec`` has read, by their bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.messaging.wire_walk import BEFORE, FIELDS, START, VALUE, flattened, walk_all
from schemas.avro import SchemaTable, WireSchema
from schemas.codec import decode_verification_event, frame
from schemas.errors import ContractError
from schemas.events import (
    DrafterVersion,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)
from schemas.packing import EPOCH, FLOAT16, FLOAT32, FLOAT64, INT16, INT32
from schemas.trusted import trusted

MESSAGE = "verification_event"
MESSAGES_AT_ONCE = 64
"""Messages of one walk, which copies them behind one another."""
MOST_TEXTS = 4096
"""Different texts that are remembered; then it begins anew."""

_IS_ALLOWED = np.zeros(256, np.uint8)
_IS_ALLOWED[np.frombuffer(b"._@:+-", np.uint8)] = 1
for _first, _last in ("09", "AZ", "az"):
    _IS_ALLOWED[ord(_first) : ord(_last) + 1] = 2

_NAMES = ("event_id", "worker_id", "stream", "request_id")
_NUMBERS = (
    *("worker_epoch", "sequence", "produced_at", "segment_index", "policy_version"),
    *("num_prompt_tokens", "first_position", "num_positions"),
)
_FLOATS = ("selection_probability", "draft_seconds", "verify_seconds", "score_seconds")
_ROUND_DTYPES: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(Rounds.__dataclass_fields__, INT16),
    "first_position": INT32,
    **dict.fromkeys((*_FLOATS, "score_probability"), FLOAT32),
}
_VECTORS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("prior_probabilities", "policy_table", "policy_numbers"), FLOAT64),
    "num_awake_rounds": INT32,
    **{f"rounds.{name}": dtype for name, dtype in _ROUND_DTYPES.items()},
    "windows.start": INT32,
    "windows.num_levels": INT16,
}
_SCORES = ("windows.acceptance_probability", "windows.realised_acceptance")

_Texts: TypeAlias = tuple[FinishReason, str, str, str, str]
"""Finish reason, target, its fingerprint, hash of the tokenizer, policy."""
_Pool: TypeAlias = tuple[tuple[DrafterVersion, ...], SamplingRule, int]
"""Drafters, how was sampled, and K."""


def read_ordinary_events(
    values: Sequence[bytes | None], table: SchemaTable
) -> list[VerificationEvent | None]:
    """Return the event of every message that is an ordinary one, None for any other.

    The events are those that ``schemas.codec.decode_verification_event`` returns. None says
    nothing: the message may be an event of another kind, or none.
    """
    reader = _reader_of(table.newest[MESSAGE])
    if reader is None:
        return [None] * len(values)
    events: list[VerificationEvent | None] = []
    for first in range(0, len(values), MESSAGES_AT_ONCE):
        events += reader.read(values[first : first + MESSAGES_AT_ONCE], table)
    return events


_readers: dict[int, tuple[WireSchema, _Reader | None]] = {}
_MOST_READERS = 16


def _reader_of(schema: WireSchema) -> _Reader | None:
    """Return the reader of this very schema, None if it has fields that the walk does not know."""
    known = _readers.get(id(schema))
    if known is None or known[0] is not schema:
        if len(_readers) >= _MOST_READERS:
            _readers.clear()
        known = _readers[id(schema)] = (schema, _new_reader(schema))
    return known[1]


def _new_reader(schema: WireSchema) -> _Reader | None:
    if sys.byteorder != "little":
        return None
    try:
        return _Reader(schema)
    except (KeyError, ValueError):
        return None


class _Reader:
    """Reads messages of one schema."""

    def __init__(self, schema: WireSchema) -> None:
        paths, kinds, item_kinds = flattened(schema.parsed)
        at = {path: index for index, path in enumerate(paths)}
        self._kinds = np.array(kinds)
        self._item_kinds = np.array(item_kinds)
        self._places = np.array([at[path] for path in FIELDS])
        self._version = schema.version
        self._frame = frame(schema.schema_id)
        self._names, self._numbers, self._scores = (
            [at[path] for path in some] for some in (_NAMES, _NUMBERS, _SCORES)
        )
        self._vectors = [(at[path], dtype, dtype.itemsize) for path, dtype in _VECTORS.items()]
        self._is_final = at["is_final"]
        self._text_ends = at["finish_reason"], at["policy_version"]
        self._pool_ends = at["drafters"], at["num_prompt_tokens"]
        self._texts: dict[bytes, _Texts] = {}
        self._pools: dict[bytes, _Pool] = {}

    def read(
        self, values: Sequence[bytes | None], table: SchemaTable
    ) -> list[VerificationEvent | None]:
        """Return the events of the ordinary messages, None for any other."""
        events: list[VerificationEvent | None] = [None] * len(values)
        found = [
            (index, value)
            for index, value in enumerate(values)
            if isinstance(value, bytes) and value.startswith(self._frame)
        ]
        noted, is_good = self._walked([value for _, value in found])
        for (index, value), note, good in zip(found, noted, is_good, strict=True):
            if good:
                events[index] = self._event(value, note, table)
        return events

    def _walked(self, values: Sequence[bytes]) -> tuple[NDArray[np.int64], list[bool]]:
        noted = np.empty((len(values), 3, len(self._kinds)), np.int64)
        is_good = np.zeros(len(values), np.bool_)
        walk_all(
            np.frombuffer(b"".join(values), np.uint8),
            np.array([0, *accumulate(map(len, values))]),
            len(self._frame),
            *(self._kinds, self._item_kinds, self._places),
            _IS_ALLOWED,
            self._version,
            *(noted, is_good),
        )
        return noted, is_good.tolist()

    def _event(
        self, value: bytes, note: NDArray[np.int64], table: SchemaTable
    ) -> VerificationEvent | None:
        """Build the event; texts and pool are those that were read from the same bytes before."""
        before = note[BEFORE]
        ends = (self._text_ends, self._pool_ends)
        texts, pool = (value[before[first] : before[last]] for first, last in ends)
        known_texts, known_pool = self._texts.get(texts), self._pools.get(pool)
        if known_texts is None or known_pool is None:
            return self._remembered(value, texts, pool, table)
        starts, sizes = note[START].tolist(), note[VALUE].tolist()
        return self._built(value, starts, sizes, known_texts, known_pool)

    def _remembered(
        self, value: bytes, texts: bytes, pool: bytes, table: SchemaTable
    ) -> VerificationEvent | None:
        try:
            event = decode_verification_event(value, table=table)
        except ContractError:
            return None
        for known in (self._texts, self._pools):
            if len(known) >= MOST_TEXTS:
                known.clear()
        self._texts[texts] = _texts_of(event)
        self._pools[pool] = event.drafters, event.sampling, event.num_speculative_tokens
        return event

    def _built(
        self, value: bytes, starts: list[int], sizes: list[int], texts: _Texts, pool: _Pool
    ) -> VerificationEvent | None:
        drafters, sampling, num_levels = pool
        event_id, worker_id, stream, request_id = [
            value[starts[index] : starts[index] + sizes[index]].decode("ascii")
            for index in self._names
        ]
        epoch, sequence, produced_at, segment_index, policy_version, *positions = [
            sizes[index] for index in self._numbers
        ]
        is_final = bool(sizes[self._is_final])
        if is_final == (texts[0] is FinishReason.UNFINISHED):
            return None
        prior, policy_table, policy_numbers, awake, *rest = [
            np.ndarray(
                sizes[index] // width, dtype, value[starts[index] : starts[index] + sizes[index]]
            )
            for index, dtype, width in self._vectors
        ]
        shape = (len(rest[-1]), num_levels, len(drafters))
        scores = [
            np.ndarray(shape, FLOAT16, value[starts[index] : starts[index] + sizes[index]])
            for index in self._scores
        ]
        # In the order of the fields.
        fields = (
            *(event_id, worker_id, epoch, sequence),
            *(EPOCH + timedelta(microseconds=produced_at), stream, request_id),
            *(segment_index, is_final, *texts, policy_version),
            *(prior, policy_table, policy_numbers),
            *(drafters, sampling, num_levels, *positions, awake),
            trusted(Rounds, rest[:-2]),
            trusted(ScoredWindows, rest[-2:] + scores),
            None,
        )
        return trusted(VerificationEvent, fields)


def _texts_of(event: VerificationEvent) -> _Texts:
    return (
        event.finish_reason,
        event.target_id,
        event.target_fingerprint,
        event.tokenizer_hash,
        event.policy_name,
    )
