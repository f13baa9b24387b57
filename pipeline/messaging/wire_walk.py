"""A compiled walk over encoded verification events: where fields lie, and whether all is well.

It accepts only what the rules of ``schemas.checks`` admit, and only events of the ordinary kind;
of what it does not accept it says nothing. Offsets are relative to the first byte of the message.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled

BOOLEAN, LONG, DOUBLE, BYTES, ARRAY, NULL = range(6)
"""Kinds of fields; ``NULL`` is a union that has to hold its first branch, nothing."""

BEFORE, START, VALUE = range(3)
"""What is noted of a field: where it begins, where its bytes begin behind their length, and their
length, or its number, or how many items it has."""

FIELDS = (
    *("schema_version", "event_id", "worker_id", "worker_epoch", "sequence", "produced_at"),
    *("stream", "request_id", "segment_index", "is_final", "policy_version"),
    *("prior_probabilities", "policy_table", "policy_numbers", "drafters"),
    *("num_speculative_tokens", "num_prompt_tokens", "first_position", "num_positions"),
    "num_awake_rounds",
    *("rounds.first_position", "rounds.drafter_index", "rounds.num_draft_tokens"),
    *("rounds.num_accepted_tokens", "rounds.num_emitted_tokens", "rounds.num_scored_windows"),
    *("rounds.batch_size", "rounds.selection_probability", "rounds.score_probability"),
    *("rounds.draft_seconds", "rounds.verify_seconds", "rounds.score_seconds"),
    *("windows.start", "windows.num_levels"),
    *("windows.acceptance_probability", "windows.realised_acceptance"),
)
"""The fields that are looked at, as ``places`` lists where they stand among all."""

SCHEMA_VERSION, EVENT_ID, WORKER_ID, WORKER_EPOCH, SEQUENCE, PRODUCED_AT = range(6)
STREAM, REQUEST_ID, SEGMENT_INDEX, IS_FINAL, POLICY_VERSION = range(6, 11)
PRIOR, POLICY_TABLE, POLICY_NUMBERS, DRAFTERS = range(11, 15)
LEVELS, NUM_PROMPT_TOKENS, FIRST_POSITION, NUM_POSITIONS, AWAKE = range(15, 20)
ROUND_FIRST, ROUND_DRAFTER, ROUND_DRAFTED, ROUND_ACCEPTED, ROUND_EMITTED = range(20, 25)
ROUND_SCORED, ROUND_BATCH, ROUND_CHANCE, ROUND_SCORE_CHANCE = range(25, 29)
ROUND_SECONDS = 29
WINDOW_START, WINDOW_LEVELS, ACCEPTANCE, REALISED = range(32, 36)

MOST_ROUNDS = 10_000
"""Rounds whose positions cannot add up beyond int32."""
MOST_TOKENS = 2**31 - 1
MOST_LEVELS = 2**15 - 2
MOST_MICROSECONDS = 253_402_300_800_000_000
"""The year 10,000, with which times end."""
PRIOR_TOLERANCE = 5e-7
"""Half of what the rule allows, which adds up in another order."""
FLOAT16_ONE = 0x3C00
FLOAT16_INFINITY = 0x7C00
LARGEST_FLOAT32 = np.float32(3.4028234663852886e38)
LONGEST_IDENTIFIER = 200


Number: TypeAlias = int | np.int64


@compiled
def read_long(buffer: NDArray[np.uint8], position: Number, end: int) -> tuple[Number, Number]:
    """Return a number and where it ends; -1 if it ends nowhere or needs more than 63 bits."""
    bits, shift = np.int64(0), np.int64(0)
    while position < end and shift < 63:
        byte = np.int64(buffer[position])
        position += 1
        bits |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (bits >> 1) ^ -(bits & 1), position
        shift += 7
    return 0, -1


@compiled
def pass_field(
    buffer: NDArray[np.uint8], kind: int, position: Number, end: int
) -> tuple[Number, Number]:
    """Return a field's ``VALUE`` and where it ends; -1 if it is not whole, or of another kind."""
    if kind == BOOLEAN:
        is_whole = position < end and buffer[position] <= 1
        return (np.int64(buffer[position]), position + 1) if is_whole else (np.int64(0), -1)
    if kind == DOUBLE:
        return np.int64(0), (position + 8 if position + 8 <= end else -1)
    value, after = read_long(buffer, position, end)
    if after < 0 or kind == LONG:
        return value, after
    if kind == NULL:
        return value, (after if value == 0 else -1)
    return value, (after + value if 0 <= value <= end - after else -1)


@compiled
def pass_items(
    buffer: NDArray[np.uint8], item_kinds: NDArray[np.int64], position: Number, end: int
) -> tuple[Number, Number]:
    """Return how many items an array has and where it ends, or -1."""
    num_items = np.int64(0)
    while True:
        count, position = read_long(buffer, position, end)
        if position < 0 or count < 0:
            return num_items, -1
        if count == 0:
            return num_items, position
        num_items += count
        for _ in range(count):
            for kind in item_kinds:
                _, position = pass_field(buffer, kind, position, end)
                if position < 0:
                    return num_items, -1


@compiled
def walk(
    buffer: NDArray[np.uint8],
    base: int,
    position: Number,
    end: int,
    kinds: NDArray[np.int64],
    item_kinds: NDArray[np.int64],
    noted: NDArray[np.int64],
) -> bool:
    """Note all fields of one body, (3, F), and tell whether it is whole, and nothing follows."""
    for index in range(kinds.size):
        kind = kinds[index]
        noted[BEFORE, index] = position - base
        if kind == ARRAY:
            value, position = pass_items(buffer, item_kinds, position, end)
        else:
            value, position = pass_field(buffer, kind, position, end)
        if position < 0:
            return False
        noted[VALUE, index] = value
        noted[START, index] = position - base - (value if kind == BYTES else 0)
    return position == end


@compiled
def is_identifier(
    buffer: NDArray[np.uint8], is_allowed: NDArray[np.uint8], first: int, size: int
) -> bool:
    """Tell that a name may stand for a folder or a label; ``is_allowed`` as in ``walk_all``."""
    if not 0 < size <= LONGEST_IDENTIFIER or is_allowed[buffer[first]] < 2:
        return False
    num_others = 0
    for index in range(first, first + size):
        num_others += is_allowed[buffer[index]] == 0
    return num_others == 0


@compiled
def taken(buffer: NDArray[np.uint8], base: int, place: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return a copy of a field's bytes, aligned for any type."""
    first = base + place[START]
    return buffer[first : first + place[VALUE]].copy()


@compiled
def is_good_head(
    buffer: NDArray[np.uint8],
    base: int,
    is_allowed: NDArray[np.uint8],
    version: int,
    field: NDArray[np.int64],
) -> bool:
    """Tell that names and numbers are admitted; ``field`` (len(FIELDS), 3) as noted."""
    if field[SCHEMA_VERSION, VALUE] != version:
        return False
    for name in (EVENT_ID, WORKER_ID, STREAM, REQUEST_ID):
        first = base + field[name, START]
        if not is_identifier(buffer, is_allowed, first, field[name, VALUE]):
            return False
    for name in (WORKER_EPOCH, SEQUENCE, SEGMENT_INDEX, POLICY_VERSION, PRODUCED_AT):
        if field[name, VALUE] < 0:
            return False
    for name in (NUM_PROMPT_TOKENS, FIRST_POSITION, NUM_POSITIONS):
        if not 0 <= field[name, VALUE] <= MOST_TOKENS:
            return False
    is_small = 1 <= field[LEVELS, VALUE] <= MOST_LEVELS and field[DRAFTERS, VALUE] >= 1
    return bool(is_small and field[PRODUCED_AT, VALUE] < MOST_MICROSECONDS)


@compiled
def is_good_policy(buffer: NDArray[np.uint8], base: int, field: NDArray[np.int64]) -> bool:
    """Tell that the prior is a distribution and the state, if any, one of these drafters."""
    num_drafters = field[DRAFTERS, VALUE]
    if field[PRIOR, VALUE] != 8 * num_drafters:
        return False
    total = 0.0
    for chance in taken(buffer, base, field[PRIOR]).view(np.float64):
        if not 0.0 <= chance <= 1.0:
            return False
        total += chance
    if not abs(total - 1.0) <= PRIOR_TOLERANCE:
        return False
    table, numbers = field[POLICY_TABLE, VALUE], field[POLICY_NUMBERS, VALUE]
    if table % (8 * num_drafters) or numbers % 8:
        return False
    if table == 0:
        return bool(numbers == 0)
    if field[SEGMENT_INDEX, VALUE] != 0:
        return False
    for name in (POLICY_TABLE, POLICY_NUMBERS):
        for value in taken(buffer, base, field[name]).view(np.float64):
            if not np.isfinite(value):
                return False
    return True


@compiled
def have_sizes(field: NDArray[np.int64], first: int, last: int, size: int) -> bool:
    """Tell that the fields from ``first`` up to ``last`` have so many bytes each."""
    num_others = 0
    for name in range(first, last):
        num_others += field[name, VALUE] != size
    return num_others == 0


@compiled
def are_good_rounds(buffer: NDArray[np.uint8], base: int, field: NDArray[np.int64]) -> bool:
    """Tell that the rounds emit the segment's positions; only the last may be cut."""
    count = field[ROUND_FIRST, VALUE] // 4
    if not 0 < count <= MOST_ROUNDS or field[ROUND_FIRST, VALUE] != 4 * count:
        return False
    if not (
        have_sizes(field, ROUND_DRAFTER, ROUND_CHANCE, 2 * count)
        and have_sizes(field, ROUND_CHANCE, WINDOW_START, 4 * count)
    ):
        return False
    first = taken(buffer, base, field[ROUND_FIRST]).view(np.int32)
    drafter = taken(buffer, base, field[ROUND_DRAFTER]).view(np.int16)
    drafted = taken(buffer, base, field[ROUND_DRAFTED]).view(np.int16)
    accepted = taken(buffer, base, field[ROUND_ACCEPTED]).view(np.int16)
    emitted = taken(buffer, base, field[ROUND_EMITTED]).view(np.int16)
    scored = taken(buffer, base, field[ROUND_SCORED]).view(np.int16)
    batch = taken(buffer, base, field[ROUND_BATCH]).view(np.int16)
    position = field[FIRST_POSITION, VALUE]
    for index in range(count):
        if not -1 <= drafter[index] < field[DRAFTERS, VALUE]:
            return False
        most = field[LEVELS, VALUE] if drafter[index] >= 0 else 0
        if not 0 <= accepted[index] <= drafted[index] <= most:
            return False
        if first[index] != position or scored[index] < 0 or batch[index] < 1:
            return False
        if emitted[index] != accepted[index] + 1:
            is_last = index == count - 1 and field[IS_FINAL, VALUE] == 1
            if not (is_last and 0 <= emitted[index] <= accepted[index]):
                return False
        position += emitted[index]
    return bool(position == field[FIRST_POSITION, VALUE] + field[NUM_POSITIONS, VALUE])


@compiled
def are_good_times(buffer: NDArray[np.uint8], base: int, field: NDArray[np.int64]) -> bool:
    """Tell that the rounds' chances are above 0, their seconds finite, and who was awake when."""
    for name in (ROUND_CHANCE, ROUND_SCORE_CHANCE):
        for chance in taken(buffer, base, field[name]).view(np.float32):
            if not (chance > 0.0 and chance <= 1.0):
                return False
    for name in range(ROUND_SECONDS, WINDOW_START):
        for seconds in taken(buffer, base, field[name]).view(np.float32):
            if not (seconds >= 0.0 and seconds <= LARGEST_FLOAT32):
                return False
    if field[AWAKE, VALUE] == 0:
        return True
    if field[AWAKE, VALUE] != 4 * field[DRAFTERS, VALUE]:
        return False
    for num_rounds in taken(buffer, base, field[AWAKE]).view(np.int32):
        if not 0 <= num_rounds <= field[ROUND_FIRST, VALUE] // 4:
            return False
    return True


@compiled
def are_good_windows(buffer: NDArray[np.uint8], base: int, field: NDArray[np.int64]) -> bool:
    """Tell that the windows start where the segment has tokens, and have the levels they may."""
    count, levels = field[WINDOW_START, VALUE] // 4, field[LEVELS, VALUE]
    if count == 0 or field[WINDOW_START, VALUE] != 4 * count:
        return False
    size = 2 * count * levels * field[DRAFTERS, VALUE]
    if field[WINDOW_LEVELS, VALUE] != 2 * count or not have_sizes(field, ACCEPTANCE, 36, size):
        return False
    starts = taken(buffer, base, field[WINDOW_START]).view(np.int32)
    num_levels = taken(buffer, base, field[WINDOW_LEVELS]).view(np.int16)
    lowest = field[NUM_PROMPT_TOKENS, VALUE]
    end = field[FIRST_POSITION, VALUE] + field[NUM_POSITIONS, VALUE]
    are_whole = True
    for window in range(count):
        start = np.int64(starts[window])
        most, least = levels, levels
        if field[IS_FINAL, VALUE] == 1:
            most, least = min(levels, end - start), min(levels, max(end - start - 1, 1))
        exists = num_levels[window]
        if start < lowest or start + max(exists, 1) > end or not least <= exists <= most:
            return False
        are_whole &= exists == levels
        lowest = start + 1
    for name in (ACCEPTANCE, REALISED):
        scores = taken(buffer, base, field[name]).view(np.uint16)
        if not (are_whole and are_all_scored(scores)):
            shape = (count, levels, field[DRAFTERS, VALUE])
            if not are_good_scores(scores.reshape(shape), num_levels):
                return False
    return True


@compiled
def are_all_scored(scores: NDArray[np.uint16]) -> bool:
    """Tell that all float16 are in [0, 1]: their bit patterns are ordered as they are."""
    highest = np.uint16(0)
    for bits in scores:
        highest = max(highest, bits)
    return bool(highest <= FLOAT16_ONE)


@compiled
def are_good_scores(scores: NDArray[np.uint16], num_levels: NDArray[np.int16]) -> bool:
    """Tell that the float16 (W, K, N) are in [0, 1] or NaN, and NaN beyond a window's levels."""
    num_windows, depth, num_drafters = scores.shape
    for window in range(num_windows):
        for level in range(depth):
            for drafter in range(num_drafters):
                bits = scores[window, level, drafter]
                is_score = level < num_levels[window] and bits <= FLOAT16_ONE
                if not (is_score or (bits & 0x7FFF) > FLOAT16_INFINITY):
                    return False
    return True


@compiled
def walk_all(
    buffer: NDArray[np.uint8],
    bounds: NDArray[np.int64],
    frame: int,
    kinds: NDArray[np.int64],
    item_kinds: NDArray[np.int64],
    places: NDArray[np.int64],
    is_allowed: NDArray[np.uint8],
    version: int,
    noted: NDArray[np.int64],
    is_good: NDArray[np.bool_],
) -> None:
    """Walk over framed messages that lie one behind the other.

    Args:
        buffer: The messages.
        bounds: Where they begin, and where the last ends, (n + 1,).
        frame: Bytes in front of every body.
        kinds: Of all fields of the schema, (F,).
        item_kinds: Of the fields of an array's items.
        places: Where ``FIELDS`` stand among all fields, (len(FIELDS),).
        is_allowed: Of every byte, whether an identifier may hold it; 2 = also as its first.
        version: Of the schema.
        noted: (n, 3, F), written.
        is_good: (n,), written.
    """
    field = np.empty((places.size, 3), np.int64)
    for number in range(is_good.size):
        base, end = bounds[number], bounds[number + 1]
        is_good[number] = False
        if not walk(buffer, base, base + frame, end, kinds, item_kinds, noted[number]):
            continue
        for index in range(places.size):
            for kind in range(3):
                field[index, kind] = noted[number, kind, places[index]]
        is_good[number] = (
            is_good_head(buffer, base, is_allowed, version, field)
            and is_good_policy(buffer, base, field)
            and are_good_rounds(buffer, base, field)
            and are_good_times(buffer, base, field)
            and are_good_windows(buffer, base, field)
        )


def flattened(parsed: Any) -> tuple[list[str], list[int], list[int]]:
    """Return paths and kinds of a schema's fields, and the kinds of the items of its array.

    Raises:
        ValueError: If it has a field of a kind that the walk does not know.
    """
    paths: list[str] = []
    kinds: list[int] = []
    item_kinds: list[int] = []
    for field in parsed["fields"]:
        kind, name = field["type"], field["name"]
        if isinstance(kind, list) and kind[0] == "null":
            paths.append(name)
            kinds.append(NULL)
        elif isinstance(kind, dict) and kind["type"] == "record":
            inner_paths, inner_kinds, _ = flattened(kind)
            paths += [f"{name}.{inner}" for inner in inner_paths]
            kinds += inner_kinds
        elif isinstance(kind, dict) and kind["type"] == "array" and not item_kinds:
            item_kinds = flattened(kind["items"])[1]
            paths.append(name)
            kinds.append(ARRAY)
        else:
            plain = kind["type"] if isinstance(kind, dict) else kind
            if plain not in _PLAIN_KINDS:
                raise ValueError(f"field {name!r} is of kind {plain!r}")
            paths.append(name)
            kinds.append(_PLAIN_KINDS[plain])
    return paths, kinds, item_kinds


_PLAIN_KINDS = {
    **{"boolean": BOOLEAN, "int": LONG, "long": LONG, "double": DOUBLE},
    **{"bytes": BYTES, "string": BYTES},
}
