"""Loops over the scores of windows, compiled: what walks, tables and learners need of them at once.

Scores are stored as float16, which the processor has no arithmetic for and numpy converts slowly;
``halves`` reads their bits.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled
from learner.selection.kernels import ASLEEP

FLOAT16_INFINITY = 0x7C00
EXPONENT_SHIFT = 2.0**112
"""Between the exponent biases of float16 and float32."""


@compiled
def decode_halves(bits: NDArray[np.uint16], words: NDArray[np.uint32]) -> None:
    """Move sign-free float16 bits to their places in float32, unscaled; NaN becomes infinity."""
    for index in range(bits.size):
        half = np.uint32(bits[index] & 0x7FFF)
        words[index] = (half << 13) if half < FLOAT16_INFINITY else np.uint32(0x7F800000)


@compiled
def scale_halves(values: NDArray[np.float32], out: NDArray[np.float64]) -> None:
    """Give decoded halves their value; infinity becomes NaN."""
    for index in range(values.size):
        scaled = np.float64(values[index]) * EXPONENT_SHIFT
        out[index] = scaled if scaled < 1e6 else np.nan


def halves(values: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return scores >= 0 or NaN as contiguous float64, exactly, much faster than numpy does."""
    if values.dtype != np.float16:
        return np.ascontiguousarray(values, dtype=np.float64)
    bits = np.ascontiguousarray(values).view(np.uint16).reshape(-1)
    words = np.empty(bits.size, dtype=np.uint32)
    decode_halves(bits, words)
    out = np.empty(bits.size)
    scale_halves(words.view(np.float32), out)
    return out.reshape(values.shape)


@compiled
def half(bits: int) -> float:
    """Return the value of one sign-free float16, exactly; NaN for a NaN."""
    magnitude = int(bits) & 0x7FFF
    if magnitude > FLOAT16_INFINITY:
        return math.nan
    exponent, fraction = magnitude >> 10, magnitude & 0x3FF
    if exponent == 0:
        return math.ldexp(float(fraction), -24)
    return math.ldexp(float(0x400 + fraction), exponent - 25)


@compiled
def measure_windows(
    probability: NDArray[np.float64],
    realised: NDArray[np.float64],
    num_levels: NDArray[np.int16],
    starts: NDArray[np.int64],
    coins: NDArray[np.float64],
    depth: int,
    accepted: NDArray[np.int16],
    agreement_loss: NDArray[np.float64],
    length_loss: NDArray[np.float64],
    first_loss: NDArray[np.float64],
) -> None:
    """Measure every window for every drafter; outputs are written.

    Args:
        probability: Acceptance probabilities, (W, K, N); NaN = not scored or no such level.
        realised: Realised acceptances, likewise.
        num_levels: Levels that exist, (W,).
        starts: Row of ``accepted``, ``agreement_loss`` and ``coins`` of each window, (W,).
        coins: Of the positions, at least (P + depth,).
        depth: Levels that are read, in 1..K.
        accepted: Levels accepted in a row, (P, N); ``ASLEEP`` if that is not known.
        agreement_loss: 1 - mean probability of the levels that verification reached, (P, N).
        length_loss: 1 - expected acceptance length / (depth + 1), exact estimator, (W, N); NaN
            unless all existing levels are scored.
        first_loss: 1 - probability at level 1, (W, N).
    """
    num_windows, _, num_drafters = probability.shape
    for window in range(num_windows):
        position = starts[window]
        exists = min(depth, int(num_levels[window]))
        for drafter in range(num_drafters):
            first_loss[window, drafter] = 1.0 - probability[window, 0, drafter]
            gain = 0.0
            reach = 1.0
            for level in range(exists):
                gain += reach * probability[window, level, drafter]
                reach *= realised[window, level, drafter]
            length_loss[window, drafter] = 1.0 - (1.0 + gain) / (depth + 1)
            # Reach is NaN if a level that exists is: whether it was needed may not decide, or only
            # windows with a rejection would count.
            if np.isnan(reach) or np.isnan(realised[window, 0, drafter]):
                accepted[position, drafter] = ASLEEP
                agreement_loss[position, drafter] = 1.0
                continue
            count = 0
            total = 0.0
            num_reached = 0
            for level in range(depth):
                if not np.isnan(probability[window, level, drafter]):
                    total += probability[window, level, drafter]
                    num_reached += 1
                if not coins[position + level] < realised[window, level, drafter]:
                    break
                count += 1
            accepted[position, drafter] = count
            agreement_loss[position, drafter] = 1.0 - min(total / max(num_reached, 1), 1.0)


@compiled
def measure_lengths(
    probability: NDArray[np.float64],
    realised: NDArray[np.float64],
    num_levels: NDArray[np.int16],
    exact: NDArray[np.float64],
    published: NDArray[np.float64],
) -> None:
    """Write the expected acceptance length of both estimators, (W, N), as ``measures`` has them."""
    num_windows, _, num_drafters = probability.shape
    for window in range(num_windows):
        for drafter in range(num_drafters):
            gain = 0.0
            reach = 1.0
            product = 1.0
            product_gain = 0.0
            for level in range(num_levels[window]):
                chance = probability[window, level, drafter]
                gain += reach * chance
                reach *= realised[window, level, drafter]
                product *= chance
                product_gain += product
            exact[window, drafter] = 1.0 + gain
            published[window, drafter] = 1.0 + product_gain
