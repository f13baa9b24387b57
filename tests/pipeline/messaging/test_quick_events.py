"""Read at a glance or rule by rule, a message is the same event, or refused with the same words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from io import BytesIO
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given, settings

from pipeline.bench.events import bench_event
from pipeline.eventlog.ports import Message, StoredMessage
from pipeline.messaging import event_decoding
from pipeline.messaging.event_decoding import decode_events
from pipeline.messaging.quick_events import MESSAGES_AT_ONCE, read_ordinary_events
from schemas import records
from schemas.avro import PACKAGED, SchemaTable, wire_schema
from schemas.codec import decode_verification_event, encode, frame
from schemas.equality import first_difference, same_message
from schemas.events import FinishReason, VerificationEvent
from tests.schemas.builders import make_drafters, make_event
from tests.schemas.strategies import verification_events

MOMENT = datetime(2026, 3, 29, 12, tzinfo=UTC)
EDGES: Sequence[float] = (-(2**15), -2, -1, 0, 1, 2, 3, 5, 6, 7, 100, 2**15 - 1)
FLOAT_EDGES = (-1.0, -0.0, 0.0, 1e-45, 0.5, 1.0, 1.001, np.inf, np.nan)
SCHEMA = PACKAGED.newest["verification_event"]


def whole_event(seed: int) -> VerificationEvent:
    """Return a segment in the middle of a request, or its end, with windows that are whole."""
    reason = FinishReason.STOP if seed % 2 else FinishReason.UNFINISHED
    return make_event(
        seed=seed,
        finish_reason=reason,
        is_final=bool(seed % 2),
        num_windows=5,
        num_drafters=3,
        segment_index=seed % 3,
    )


def ending_event(seed: int) -> VerificationEvent:
    """Return a request's end, whose last windows are short; some drafters slept."""
    event = whole_event(2 * seed + 1)
    levels = event.num_speculative_tokens
    end = event.first_position + event.num_positions
    start = end - 5 + np.arange(5)
    num_levels = np.minimum(levels, end - start).astype(np.int16)
    scores = np.stack([event.windows.acceptance_probability, event.windows.realised_acceptance])
    scores[:, seed % 5, :, 1] = np.nan
    for row, count in enumerate(num_levels):
        scores[:, row, count:] = np.nan
    windows = replace(
        event.windows,
        start=start.astype(np.int32),
        num_levels=num_levels,
        acceptance_probability=scores[0],
        realised_acceptance=scores[1],
    )
    return replace(event, windows=windows)


def carrying_event(seed: int) -> VerificationEvent:
    """Return a request's first segment with the policy's state and who was awake when."""
    event = replace(whole_event(2 * seed), segment_index=0)
    rng = np.random.default_rng(seed)
    return replace(
        event,
        policy_table=rng.normal(size=5 * len(event.drafters)),
        policy_numbers=rng.normal(size=4),
        num_awake_rounds=np.full(len(event.drafters), len(event.rounds.drafter_index), np.int32),
    )


ORDINARY = [kind(seed) for seed in range(8) for kind in (whole_event, ending_event, carrying_event)]


def read_with(values: Sequence[bytes | None]) -> list[VerificationEvent | None]:
    # The first message with its texts is read by the rules, the second at a glance.
    read_ordinary_events(values, PACKAGED)
    return read_ordinary_events(values, PACKAGED)


@pytest.mark.parametrize("event", [*ORDINARY, bench_event(0)])
def test_an_ordinary_event_is_read_at_a_glance_as_the_codec_reads_it(
    event: VerificationEvent,
) -> None:
    value = encode(event)
    (found,) = read_with([value])
    assert found is not None
    expected = decode_verification_event(value)
    assert first_difference(found, expected) is None
    assert encode(found) == value


def test_its_arrays_are_read_only_and_aligned() -> None:
    (found,) = read_with([encode(carrying_event(1))])
    assert found is not None
    for part in (found, found.rounds, found.windows):
        arrays = [getattr(part, name) for name in part.__dataclass_fields__]
        for values in arrays:
            if isinstance(values, np.ndarray):
                assert values.flags.aligned and values.flags.c_contiguous
                assert not values.flags.writeable


def test_more_messages_than_one_walk_takes_keep_their_order() -> None:
    events = [replace(event, sequence=n) for n, event in enumerate(ORDINARY * 6)]
    assert len(events) > 2 * MESSAGES_AT_ONCE
    found = read_with([encode(event) for event in events])
    assert [one.sequence for one in found if one is not None] == list(range(len(events)))


@settings(max_examples=150, deadline=None)
@given(verification_events())
def test_what_the_contract_admits_is_read_alike_or_left_to_the_codec(
    event: VerificationEvent,
) -> None:
    (found,) = read_with([encode(event)])
    assert found is None or same_message(found, event)


def written(record: dict[str, Any], version: int = SCHEMA.version) -> bytes:
    stream = BytesIO()
    stream.write(frame(SCHEMA.schema_id))
    fastavro.schemaless_writer(stream, SCHEMA.parsed, {"schema_version": version, **record})
    return stream.getvalue()


def spoiled_record(event: VerificationEvent, rng: np.random.Generator) -> bytes:
    """Return the event with one field, or one element of an array, that is something else."""
    record = records.from_verification_event(event)
    group = record[rng.choice(["rounds", "windows"])] if rng.random() < 0.5 else record
    name = str(rng.choice([key for key in group if not isinstance(group[key], dict | list)]))
    value = group[name]
    if isinstance(value, bytes):
        kind = rng.integers(4)
        dtype = np.dtype(rng.choice(["<i2", "<i4", "<f2", "<f4", "<f8"]))
        if kind == 0:
            value = value[: rng.integers(len(value) + 1)]
        elif kind == 1:
            value += value[:8] or bytes(8)
        elif len(value) >= 8:
            array = np.frombuffer(value[: len(value) // 8 * 8], dtype).copy()
            edges = FLOAT_EDGES if dtype.kind == "f" else EDGES
            with np.errstate(over="ignore"):
                array[rng.integers(len(array))] = rng.choice(edges)
            value = array.tobytes()
    elif isinstance(value, bool):
        value = not value
    elif isinstance(value, int):
        value = int(rng.choice([-1, 0, 1, 7, 2**31 - 1, 2**31, 2**62, 2**63 - 1]))
    elif isinstance(value, str):
        value = str(rng.choice(["", ".", "a/b", "é", "a" * 201, "stop", "unfinished", "\x00"]))
    changed = {**group, name: value}
    if group is not record:
        changed = {**record, **{key: changed for key in record if record[key] is group}}
    return written(changed)


def spoiled_bytes(value: bytes, rng: np.random.Generator) -> bytes:
    """Return the message cut, longer, or with a byte that is something else."""
    kind = rng.integers(4)
    if kind == 0:
        return value[: rng.integers(len(value))]
    if kind == 1:
        return value + bytes([rng.integers(256)])
    # Most of a message are scores; what stands before them is where things can go wrong.
    place = int(rng.integers(min(len(value), 400) if kind == 2 else len(value)))
    return value[:place] + bytes([rng.integers(256)]) + value[place + 1 :]


def stored(values: Sequence[bytes | None]) -> list[StoredMessage]:
    return [
        StoredMessage(
            partition=3,
            offset=offset,
            appended_at=MOMENT,
            message=Message(key=b"stream-0", value=value),
        )
        for offset, value in enumerate(values)
    ]


def verdicts(values: Sequence[bytes | None]) -> list[str]:
    rows, letters = decode_events("t", stored(values))
    found = {row.offset: encode(row.event).hex() for row in rows}
    found |= {one.stored.offset: f"{one.kind}: {one.reason}" for one in letters}
    # Where a body ends too early the parser names its stream, a new one each time.
    return [re.sub(" at 0x[0-9a-f]+", "", found[offset]) for offset in range(len(values))]


def adversarial_values() -> list[bytes | None]:
    """Return good and bad messages in turns, of all kinds."""
    rng = np.random.default_rng(0)
    values: list[bytes | None] = []
    for event in ORDINARY:
        value = encode(replace(event, stream="stream-0"))
        values.append(value)
        for _ in range(25):
            values += [spoiled_record(replace(event, stream="stream-0"), rng)]
            values += [spoiled_bytes(value, rng)]
        values += [None, b"", value[:5], value, written(records.from_verification_event(event), 1)]
    return values


def test_spoiled_messages_are_refused_one_by_one_with_the_same_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = adversarial_values()
    quick = verdicts(values)
    monkeypatch.setattr(event_decoding, "read_ordinary_events", lambda v, _: [None] * len(v))
    careful = verdicts(values)
    different = [n for n in range(len(values)) if quick[n] != careful[n]]
    assert different == []
    num_good = sum(":" not in one for one in quick)
    assert len(ORDINARY) < num_good < len(values) / 2


def test_a_bad_message_amid_good_ones_costs_nobody_else_its_quick_reading() -> None:
    good = [encode(event) for event in ORDINARY]
    read_ordinary_events(good, PACKAGED)
    values = [part for value in good for part in (value, value[:-1], None)]
    found = read_ordinary_events(values, PACKAGED)
    assert [one is not None for one in found] == [True, False, False] * len(good)


def test_an_event_with_content_and_one_of_an_older_schema_are_left_to_the_codec() -> None:
    text = (resources.files("schemas") / "verification_event.v1.avsc").read_text("utf-8")
    old = wire_schema("verification_event", text)
    older = encode(whole_event(0), table=SchemaTable.of([old]))
    with_content = encode(make_event(seed=1, with_content=True))
    assert read_with([older, with_content]) == [None, None]
    rows, letters = decode_events("t", [])
    assert (rows, letters) == ([], [])


def test_one_pool_is_not_taken_for_another_of_the_same_size() -> None:
    event = whole_event(0)
    newer = replace(event, drafters=make_drafters(3, weights_version=2))
    found = read_with([encode(event), encode(newer), encode(event)])
    assert [one.drafters[0].weights_version for one in found if one] == [1, 2, 1]
