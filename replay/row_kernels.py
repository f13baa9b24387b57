"""Compiled checks of the arrays of many rows; what they ask is written in ``schemas.checks``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled

FIRST, DRAFTER, DRAFTED, ACCEPTED, EMITTED, SCORED = range(6)
SELECTION, DRAFT_SECONDS, VERIFY_SECONDS, SCORE_SECONDS, BATCH, SCORE = range(6, 12)
"""Rows of the packed rounds: the fields of ``Rounds`` in their order."""

ONE, INFINITY, MAGNITUDE = np.uint16(0x3C00), np.uint16(0x7C00), np.uint16(0x7FFF)
LARGEST = float(np.finfo(np.float32).max)
LARGEST_DOUBLE = float(np.finfo(np.float64).max)
MAX_COUNT = 2**15 - 1


@compiled
def wrong_rounds(
    rounds: NDArray[np.float64],
    num_drafters: int,
    num_levels: int,
    first_position: int,
    num_positions: int,
    is_final: bool,
) -> bool:
    """Whether the rounds of a row, (F, R), break a rule."""
    total = 0.0
    num_rounds = rounds.shape[1]
    for index in range(num_rounds):
        total += rounds[EMITTED, index]
    if total != num_positions:
        return True
    end = 0.0
    for index in range(num_rounds):
        drafter, drafted = rounds[DRAFTER, index], rounds[DRAFTED, index]
        accepted, emitted = rounds[ACCEPTED, index], rounds[EMITTED, index]
        if not -1 <= drafter < num_drafters:
            return True
        limit = num_levels if drafter >= 0 else 0
        if not 0 <= drafted <= limit or not 0 <= accepted <= drafted:
            return True
        if rounds[FIRST, index] != first_position + end:
            return True
        end += emitted
        lowest = 0.0 if is_final and end == total else accepted + 1
        if not lowest <= emitted <= accepted + 1:
            return True
        if (
            not 0 <= rounds[SCORED, index] <= MAX_COUNT
            or not 1 <= rounds[BATCH, index] <= MAX_COUNT
        ):
            return True
        for name in (SELECTION, SCORE):
            if not 0.0 < rounds[name, index] <= 1.0:
                return True
        for name in (DRAFT_SECONDS, VERIFY_SECONDS, SCORE_SECONDS):
            if not 0.0 <= rounds[name, index] <= LARGEST:
                return True
    return False


@compiled
def wrong_windows(
    starts: NDArray[np.int32],
    levels: NDArray[np.int32],
    num_levels: int,
    num_prompt_tokens: int,
    end: int,
    is_final: bool,
) -> bool:
    """Whether starts and levels of a row's windows, (W,), break a rule."""
    lowest = num_prompt_tokens
    for index in range(starts.size):
        start, count = int(starts[index]), int(levels[index])
        room = end - start
        if start < lowest or room < count or room < min(1, num_levels):
            return True
        lowest = start + 1
        most = min(num_levels, room) if is_final else num_levels
        least = min(num_levels, max(room - 1, 1)) if is_final else num_levels
        if not least <= count <= most:
            return True
    return False


@compiled
def wrong_scores(
    bits: NDArray[np.uint16], levels: NDArray[np.int32], num_levels: int, num_drafters: int
) -> bool:
    """Whether scores of a row, flat (W K N) float16 bits, leave [0, 1] or exist where none may."""
    num_wrong = 0
    for index in range(bits.size):
        num_wrong += (bits[index] > ONE) & ((bits[index] & MAGNITUDE) <= INFINITY)
    if num_wrong:
        return True
    size = num_levels * num_drafters
    for window in range(levels.size):
        for index in range(window * size + levels[window] * num_drafters, (window + 1) * size):
            if (bits[index] & MAGNITUDE) <= INFINITY:
                return True
    return False


@compiled
def wrong_start(
    prior: NDArray[np.float64],
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    awake: NDArray[np.int32],
    num_drafters: int,
    num_rounds: int,
    segment_index: int,
) -> bool:
    """Whether prior, carried state or awake rounds of a row break a rule."""
    total = 0.0
    for value in prior:
        if not 0.0 <= value <= 1.0:
            return True
        total += value
    # Stricter than the contract by the rounding that another order of summation may bring.
    if prior.size and not abs(total - 1.0) <= 0.9e-6:
        return True
    for values in (table, numbers):
        for value in values:
            if not -LARGEST_DOUBLE <= value <= LARGEST_DOUBLE:
                return True
    if table.size % max(num_drafters, 1) or (table.size and (not num_drafters or segment_index)):
        return True
    if numbers.size and not table.size:
        return True
    if awake.size and awake.size != num_drafters:
        return True
    num_wrong = 0
    for count in awake:
        num_wrong += not 0 <= count <= num_rounds
    return num_wrong > 0


@compiled
def wrong_arrays(
    round_offsets: NDArray[np.int64],
    rounds: NDArray[np.float64],
    window_offsets: NDArray[np.int64],
    windows: NDArray[np.int32],
    score_offsets: NDArray[np.int64],
    probability: NDArray[np.uint16],
    realised: NDArray[np.uint16],
    num_drafters: NDArray[np.int64],
    prior_offsets: NDArray[np.int64],
    priors: NDArray[np.float64],
    table_offsets: NDArray[np.int64],
    tables: NDArray[np.float64],
    number_offsets: NDArray[np.int64],
    numbers: NDArray[np.float64],
    awake_offsets: NDArray[np.int64],
    awake: NDArray[np.int32],
    segment_index: NDArray[np.int64],
    num_levels: NDArray[np.int64],
    num_prompt_tokens: NDArray[np.int64],
    first_position: NDArray[np.int64],
    num_positions: NDArray[np.int64],
    is_final: NDArray[np.bool_],
    wrong: NDArray[np.bool_],
) -> None:
    """Mark rows, (B,), whose arrays break a rule; rows that are marked already are passed over."""
    for row in range(wrong.size):
        if wrong[row]:
            continue
        last = row + 1
        own = rounds[:, round_offsets[row] : round_offsets[last]]
        starts = windows[0, window_offsets[row] : window_offsets[last]]
        levels = windows[1, window_offsets[row] : window_offsets[last]]
        scores = slice(score_offsets[row], score_offsets[last])
        depth, drafters = num_levels[row], num_drafters[row]
        end = first_position[row] + num_positions[row]
        wrong[row] = (
            wrong_start(
                priors[prior_offsets[row] : prior_offsets[last]],
                tables[table_offsets[row] : table_offsets[last]],
                numbers[number_offsets[row] : number_offsets[last]],
                awake[awake_offsets[row] : awake_offsets[last]],
                drafters,
                own.shape[1],
                segment_index[row],
            )
            or wrong_rounds(
                own, drafters, depth, first_position[row], num_positions[row], is_final[row]
            )
            or wrong_windows(starts, levels, depth, num_prompt_tokens[row], end, is_final[row])
            or wrong_scores(probability[scores], levels, depth, drafters)
            or wrong_scores(realised[scores], levels, depth, drafters)
        )
