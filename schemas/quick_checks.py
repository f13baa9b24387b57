"""Accepting at a glance what nearly every event is.

Each function answers True only for what the rules of ``checks`` admit, in a few passes over all
of it together; False says nothing. Then the rules are gone through one by one, which costs more
and finds the place and both values, or finds that all is well.

Floats >= 0 are ordered as their bit patterns are, so one comparison of integers bounds them from
both sides: negative numbers and NaN lie above every bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from schemas import events

INT16, INT32 = np.dtype(np.int16), np.dtype(np.int32)
FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
FLOAT64 = np.dtype(np.float64)

MOST_ROUNDS = 10_000
"""Rounds whose positions cannot add up beyond int32."""

FLOAT16_ONE = np.uint16(0x3C00)
FLOAT32_ONE = 0x3F800000
LARGEST_FLOAT32 = 0x7F7FFFFF


def has_no_policy_state(event: events.VerificationEvent) -> bool:
    """Tell that the event brings no state of a policy, as most do."""
    return _are(FLOAT64, (0,), (event.policy_table, event.policy_numbers))


def are_good_rounds(event: events.VerificationEvent) -> bool:
    """Tell that the rounds are at first sight what the contract admits."""
    rounds = event.rounds
    first = rounds.first_position
    counts = (
        rounds.drafter_index,
        rounds.num_draft_tokens,
        rounds.num_accepted_tokens,
        rounds.num_emitted_tokens,
        rounds.num_scored_windows,
        rounds.batch_size,
    )
    floats = (
        rounds.selection_probability,
        rounds.score_probability,
        rounds.draft_seconds,
        rounds.verify_seconds,
        rounds.score_seconds,
    )
    if not (_is_vector(first) and first.dtype == INT32 and 0 < first.size <= MOST_ROUNDS):
        return False
    if not (_are(INT16, first.shape, counts) and _are(FLOAT32, first.shape, floats)):
        return False
    return _are_good_counts(event, counts) and _are_good_floats(floats)


_LOWEST_COUNTS = np.array([[-1], [0], [0], [0], [0], [1]], np.int16)


def _are_good_counts(
    event: events.VerificationEvent, counts: tuple[NDArray[np.int16], ...]
) -> bool:
    """Tell that the rounds emit the segment's positions; only the last may be cut."""
    drafter, drafted, accepted, emitted = counts[:4]
    first = event.rounds.first_position
    table = np.concatenate(counts).reshape(len(counts), first.size)
    most = (drafter >= 0) * np.int16(event.num_speculative_tokens)
    is_bad = (drafted > most) | (accepted > drafted) | (drafter >= len(event.drafters))
    is_cut = emitted != accepted + np.int16(1)
    is_bad[:-1] |= (first[1:] - first[:-1] != emitted[:-1]) | is_cut[:-1]
    if np.count_nonzero(is_bad) or np.count_nonzero(table < _LOWEST_COUNTS):
        return False
    last = int(emitted[-1])
    if is_cut[-1] and not (event.is_final and last <= int(accepted[-1])):
        return False
    end = event.first_position + event.num_positions
    return int(first[0]) == event.first_position and int(first[-1]) + last == end


def _are_good_floats(floats: tuple[NDArray[np.float32], ...]) -> bool:
    """Tell that the first two are probabilities above 0 and the others finite and >= 0."""
    bits = np.concatenate(floats).view(np.uint32).reshape(len(floats), -1)
    # Of 0 this makes the largest number there is.
    bits[:2] -= np.uint32(1)
    return not np.count_nonzero(bits > _HIGHEST_FLOATS)


_HIGHEST_FLOATS = np.array(
    [[FLOAT32_ONE - 1]] * 2 + [[LARGEST_FLOAT32]] * 3,
    np.uint32,
)


def are_good_windows(event: events.VerificationEvent) -> bool:
    """Tell that the windows are at first sight what the contract admits; whole ones only."""
    windows, levels = event.windows, event.num_speculative_tokens
    start, scores = windows.start, (windows.acceptance_probability, windows.realised_acceptance)
    if not _is_vector(start):
        return False
    size = start.size
    shape = (size, levels, len(event.drafters))
    if start.dtype != INT32 or not _are(INT16, (size,), (windows.num_levels,)):
        return False
    if not (_are(FLOAT16, shape, scores) and size and levels):
        return False
    is_bad = windows.num_levels != levels
    is_bad[1:] |= start[1:] <= start[:-1]
    if np.count_nonzero(is_bad):
        return False
    end = event.first_position + event.num_positions
    if int(start[0]) < event.num_prompt_tokens or int(start[-1]) + levels > end:
        return False
    return not any(np.count_nonzero(one.view(np.uint16) > FLOAT16_ONE) for one in scores)


def _is_vector(values: Any) -> bool:
    return isinstance(values, np.ndarray) and values.ndim == 1


def _are(dtype: np.dtype[Any], shape: tuple[int, ...], arrays: tuple[Any, ...]) -> bool:
    for one in arrays:
        if not (isinstance(one, np.ndarray) and one.dtype == dtype and one.shape == shape):
            return False
    return True
