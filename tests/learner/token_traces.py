"""Traces of drafters that read tokens only, for tests: who would have predicted which token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from learner.arms import ArmCosts
from learner.priced_walk import PricedTrace, prepare_priced
from learner.walk import Coins, WindowTrace


def token_trace(acceptance: NDArray[np.floating], num_speculative_tokens: int) -> WindowTrace:
    """Return the windows of acceptances (P, N): level k of start t is that of t + k - 1."""
    size, levels = len(acceptance), num_speculative_tokens
    padded = np.full((size + levels - 1, acceptance.shape[1]), np.nan)
    padded[:size] = acceptance
    left = size - np.arange(size)
    windows = sliding_window_view(padded, levels, axis=0).transpose(0, 2, 1)
    return WindowTrace(
        num_positions=size,
        starts=np.arange(size, dtype=np.int64),
        num_levels=np.minimum(left, levels).astype(np.int16),
        is_whole=left >= levels,
        acceptance_probability=windows,
        realised_acceptance=windows,
        is_idle=np.zeros(size, dtype=np.bool_),
    )


def priced(trace: WindowTrace, generator: np.random.Generator) -> PricedTrace:
    """Lay out a trace with coins of the generator."""
    coins = Coins.toss(generator, trace.num_positions, trace.num_speculative_tokens)
    return prepare_priced(trace, coins, generator.random(trace.num_positions))


def repeated_hits(patterns: Sequence[str], num_tokens: int) -> NDArray[np.float64]:
    """Return (P, N) of one pattern per drafter, repeated: "1" is a hit."""
    columns = [
        np.resize([float(character) for character in pattern], num_tokens) for pattern in patterns
    ]
    return np.stack(columns, axis=1)


def flat_costs(
    draft_seconds: Sequence[float], max_tokens: int, *, slope: float = 0.0, scoring: float = 0.0
) -> ArmCosts:
    """Return costs where a verification takes 1 + ``slope`` per drafted token."""
    return ArmCosts(
        draft_seconds=np.array(draft_seconds, dtype=np.float64),
        verify_seconds=1.0 + slope * np.arange(max_tokens + 1, dtype=np.float64),
        score_seconds=np.full(len(draft_seconds), scoring),
    )
