"""Hindsight comparators: what one could have played, had one known all losses before.

All functions take ``losses`` of shape (T, N), float64: the loss of every drafter in every round,
without NaN. Comparators are sequences of drafter indices, shape (T,), int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

CHECKPOINT_EVERY = 8
"""Levels of the dynamic programme kept in memory: one in eight, the others are rebuilt."""


def path_length(comparators: NDArray[np.int64]) -> int:
    """Count the switches in a comparator sequence of drafter indices, shape (T,)."""
    return int(np.count_nonzero(comparators[1:] != comparators[:-1]))


def best_fixed(losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Play the one drafter with the smallest total loss, ties to the first."""
    _checked(losses)
    return np.full(losses.shape[0], int(losses.sum(axis=0).argmin()), dtype=np.int64)


def best_per_group(losses: NDArray[np.float64], groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """Play, in each group, the one drafter with the smallest loss there.

    Args:
        losses: Shape (T, N).
        groups: Group of each round, shape (T,), in 0..G-1: its stream or its request.
    """
    _checked(losses)
    num_groups = int(groups.max()) + 1
    totals = [
        np.bincount(groups, weights=drafter_losses, minlength=num_groups)
        for drafter_losses in losses.T
    ]
    best = np.argmin(totals, axis=0)
    return np.asarray(best[groups], dtype=np.int64)


def clairvoyant(losses: NDArray[np.float64]) -> NDArray[np.int64]:
    """Play the best drafter of every single round: a ceiling, since it fits the noise too."""
    _checked(losses)
    return np.asarray(losses.argmin(axis=1), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SwitchingComparators:
    """The best sequences with at most S switches, for all S in 0..S_max at once.

    Dynamic programme over segments. With ``L[n, t]`` the summed loss of drafter n in the first t
    rounds and ``B_S[t]`` the smallest loss of those rounds with at most S switches,

        B_S[t] = min_n ( L[n, t] + min_{u < t} ( B_{S-1}[u] - L[n, u] ) ),   B_S[0] = 0,

    where u is the round at which the last segment starts. The inner minimum is a running minimum,
    so a level costs O(T N) in whole-array operations and O(T) memory. One level in
    ``CHECKPOINT_EVERY`` is kept; a sequence rebuilds the others as it walks back.

    Attributes:
        total_losses: Loss of the best sequence with at most S switches, shape (S_max + 1,).
    """

    total_losses: NDArray[np.float64]
    _summed: NDArray[np.float64] = field(repr=False)
    _checkpoints: tuple[NDArray[np.float64], ...] = field(repr=False)

    @property
    def max_switches(self) -> int:
        """Largest S that was asked for."""
        return self.total_losses.size - 1

    def sequence(self, num_switches: int) -> NDArray[np.int64]:
        """Return a best sequence with at most ``num_switches`` switches, shape (T,).

        Raises:
            ValueError: If ``num_switches`` is outside 0..max_switches.
        """
        if not 0 <= num_switches <= self.max_switches:
            raise ValueError(f"num_switches={num_switches} outside 0..{self.max_switches}")
        end = self._summed.shape[1] - 1
        comparators = np.empty(end, dtype=np.int64)
        levels: list[NDArray[np.float64]] = []
        for level in range(num_switches, -1, -1):
            if not levels:
                levels = self._levels_up_to(level - 1)
            before = levels.pop() if level else None
            start, drafter = _last_segment(self._summed, before, end)
            comparators[start:end] = drafter
            end = start
            if end == 0:
                break
        return comparators

    def _levels_up_to(self, level: int) -> list[NDArray[np.float64]]:
        """Rebuild levels from the checkpoint at or below ``level`` to ``level``; [] for -1."""
        if level < 0:
            return []
        first = level // CHECKPOINT_EVERY
        levels = [self._checkpoints[first]]
        for _ in range(level - first * CHECKPOINT_EVERY):
            levels.append(_next_level(self._summed, levels[-1]))
        return levels


def best_switching(losses: NDArray[np.float64], max_switches: int) -> SwitchingComparators:
    """Find the best sequences with at most S switches for all S in 0..``max_switches``.

    Raises:
        ValueError: If there is no round, no drafter, a NaN, or ``max_switches`` is negative.
    """
    _checked(losses)
    if max_switches < 0:
        raise ValueError(f"max_switches={max_switches}, expected >= 0")
    num_rounds, num_drafters = losses.shape
    summed = np.zeros((num_drafters, num_rounds + 1))
    np.cumsum(losses.T, axis=1, out=summed[:, 1:])
    totals, checkpoints = [], []
    for level, best in enumerate(_levels(summed, max_switches)):
        totals.append(float(best[-1]))
        if level % CHECKPOINT_EVERY == 0:
            checkpoints.append(best)
    return SwitchingComparators(np.array(totals), summed, tuple(checkpoints))


def _levels(summed: NDArray[np.float64], max_switches: int) -> Iterator[NDArray[np.float64]]:
    """Yield B_0, B_1, ..., each of shape (T + 1,)."""
    best: NDArray[np.float64] = summed.min(axis=0)
    yield best
    for _ in range(max_switches):
        best = _next_level(summed, best)
        yield best


def _next_level(summed: NDArray[np.float64], before: NDArray[np.float64]) -> NDArray[np.float64]:
    """Allow one more switch: B_S from B_{S-1}, one drafter at a time to stay in O(T) memory."""
    best = np.full_like(before, np.inf)
    for drafter_summed in summed:
        gain = np.minimum.accumulate(before[:-1] - drafter_summed[:-1])
        gain += drafter_summed[1:]
        np.minimum(best[1:], gain, out=best[1:])
    best[0] = 0.0
    # The same sums in another order differ in the last bits; more switches never cost more.
    return np.minimum(best, before, out=best)


def _last_segment(
    summed: NDArray[np.float64], before: NDArray[np.float64] | None, end: int
) -> tuple[int, int]:
    """Return start and drafter of the last segment of a best sequence of ``end`` rounds."""
    if before is None:
        return 0, int(summed[:, end].argmin())
    starts = [int(np.argmin(before[:end] - row[:end])) for row in summed]
    totals = [before[u] - row[u] + row[end] for u, row in zip(starts, summed, strict=True)]
    drafter = int(np.argmin(totals))
    return starts[drafter], drafter


def _checked(losses: NDArray[np.float64]) -> None:
    if losses.ndim != 2 or 0 in losses.shape:
        raise ValueError(f"losses have shape {losses.shape}, expected (T, N) with T, N >= 1")
    if not np.isfinite(losses).all():
        raise ValueError(f"losses hold {int((~np.isfinite(losses)).sum())} non-finite values")
