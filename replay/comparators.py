"""Hindsight comparators: what one could have played, had one known all losses before.

All functions take ``losses`` of shape (T, N), float64: the loss of every drafter in every round,
without NaN. Comparators are sequences of drafter indices, shape (T,), int16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled

ROUNDS_PER_BLOCK = 1024
"""Rounds between the states of the dynamic programme that are kept; the others are computed again
when a sequence is walked back, so memory does not grow with rounds times switches."""


def path_length(comparators: NDArray[np.integer[Any]]) -> int:
    """Count the switches in a comparator sequence of drafter indices, shape (T,)."""
    return int(np.count_nonzero(comparators[1:] != comparators[:-1]))


def best_fixed(losses: NDArray[np.float64]) -> NDArray[np.int16]:
    """Play the one drafter with the smallest total loss, ties to the first."""
    _checked(losses)
    return np.full(losses.shape[0], int(losses.sum(axis=0).argmin()), dtype=np.int16)


def best_per_group(
    losses: NDArray[np.float64], groups: NDArray[np.integer[Any]]
) -> NDArray[np.int16]:
    """Play, in each group, the one drafter with the smallest loss there.

    Args:
        losses: Shape (T, N).
        groups: Group of each round, shape (T,), in 0..G-1: its stream, domain or request.
    """
    _checked(losses)
    num_groups = int(groups.max()) + 1
    totals = [
        np.bincount(groups, weights=drafter_losses, minlength=num_groups)
        for drafter_losses in losses.T
    ]
    best = np.argmin(totals, axis=0).astype(np.int16)
    return np.asarray(best[groups])


def clairvoyant(losses: NDArray[np.float64]) -> NDArray[np.int16]:
    """Play the best drafter of every single round: a ceiling, since it fits the noise too."""
    _checked(losses)
    return np.asarray(losses.argmin(axis=1), dtype=np.int16)


@compiled
def step(loss: NDArray[np.float64], best: NDArray[np.float64], lowest: NDArray[np.float64]) -> None:
    """Play one more round: update ``best`` (S + 1, N) from the round before, in place."""
    num_levels, num_drafters = best.shape
    for level in range(num_levels):
        smallest = best[level, 0]
        for drafter in range(1, num_drafters):
            smallest = min(smallest, best[level, drafter])
        lowest[level] = smallest
    for drafter in range(num_drafters):
        best[0, drafter] += loss[drafter]
    for level in range(1, num_levels):
        switched = lowest[level - 1]
        for drafter in range(num_drafters):
            best[level, drafter] = min(best[level, drafter], switched) + loss[drafter]


@compiled
def run_forward(
    losses: NDArray[np.float64],
    rounds_per_block: int,
    states: NDArray[np.float64],
    lowest: NDArray[np.float64],
) -> None:
    """Fill ``states`` (B + 1, S + 1, N): before each block of rounds, and at last after all."""
    best = np.zeros(states.shape[1:])
    for index in range(losses.shape[0]):
        if index % rounds_per_block == 0:
            states[index // rounds_per_block] = best
        step(losses[index], best, lowest)
    states[-1] = best


@compiled
def walk_back(
    losses: NDArray[np.float64],
    state: NDArray[np.float64],
    levels: NDArray[np.int64],
    drafters: NDArray[np.int64],
    sequences: NDArray[np.int16],
) -> None:
    """Walk sequences back through one block of rounds.

    Args:
        losses: Of the block, (T, N).
        state: Before the block, (S + 1, N).
        levels: Switches each sequence may still make at the block's end, (M,); written for the
            round before the block.
        drafters: Its drafter in the block's last round, (M,); written likewise.
        sequences: Of the block, (M, T); written.
    """
    num_rounds = losses.shape[0]
    best = np.empty((num_rounds, state.shape[0], state.shape[1]))
    best[0] = state
    lowest = np.empty(state.shape[0])
    for index in range(num_rounds - 1):
        best[index + 1] = best[index]
        step(losses[index], best[index + 1], lowest)
    for which in range(levels.size):
        level, drafter = levels[which], drafters[which]
        for index in range(num_rounds - 1, -1, -1):
            sequences[which, index] = drafter
            if level > 0:
                before = best[index, level - 1]
                other = before.argmin()
                if before[other] < best[index, level, drafter]:
                    level -= 1
                    drafter = other
        levels[which], drafters[which] = level, drafter


@dataclass(frozen=True, slots=True)
class SwitchingComparators:
    """The best sequences with at most S switches, for all S in 0..S_max at once.

    Dynamic programme over rounds. With ``B_S[n]`` the smallest loss of the rounds so far with at
    most S switches, the last round played by drafter n, the next round with losses f gives

        B_S[n] <- f[n] + min( B_S[n], min_m B_{S-1}[m] ),   B_S = 0 before the first.

    A round costs O(S N). Every ``ROUNDS_PER_BLOCK`` rounds the state is kept, and a sequence is
    walked back from there, block by block.

    Attributes:
        total_losses: Loss of the best sequence with at most S switches, shape (S_max + 1,).
    """

    total_losses: NDArray[np.float64]
    _losses: NDArray[np.float64] = field(repr=False)
    _states: NDArray[np.float64] = field(repr=False)

    @property
    def max_switches(self) -> int:
        """Largest S that was asked for."""
        return self.total_losses.size - 1

    def sequence(self, num_switches: int) -> NDArray[np.int16]:
        """Return a best sequence with at most ``num_switches`` switches, shape (T,).

        Raises:
            ValueError: If ``num_switches`` is outside 0..``max_switches``.
        """
        return np.asarray(self.sequences([num_switches])[0])

    def sequences(self, num_switches: Sequence[int]) -> NDArray[np.int16]:
        """Return best sequences for several numbers of switches at once, shape (M, T).

        Raises:
            ValueError: If one of them is outside 0..``max_switches``.
        """
        for count in num_switches:
            if not 0 <= count <= self.max_switches:
                raise ValueError(f"num_switches={count} outside 0..{self.max_switches}")
        levels = np.array(num_switches, dtype=np.int64)
        drafters = self._states[-1][levels].argmin(axis=1)
        found = np.empty((len(levels), len(self._losses)), dtype=np.int16)
        for block in range(len(self._states) - 2, -1, -1):
            rows = slice(block * ROUNDS_PER_BLOCK, (block + 1) * ROUNDS_PER_BLOCK)
            part = np.empty((len(levels), len(self._losses[rows])), dtype=np.int16)
            walk_back(self._losses[rows], self._states[block], levels, drafters, part)
            found[:, rows] = part
        return found


def best_switching(losses: NDArray[np.float64], max_switches: int) -> SwitchingComparators:
    """Find the best sequences with at most S switches for all S in 0..``max_switches``.

    Raises:
        ValueError: If there is no round, no drafter, a NaN, or ``max_switches`` is negative.
    """
    _checked(losses)
    if max_switches < 0:
        raise ValueError(f"max_switches={max_switches}, expected >= 0")
    num_rounds, num_drafters = losses.shape
    num_blocks = -(-num_rounds // ROUNDS_PER_BLOCK)
    contiguous = np.ascontiguousarray(losses)
    states = np.empty((num_blocks + 1, max_switches + 1, num_drafters))
    run_forward(contiguous, ROUNDS_PER_BLOCK, states, np.empty(max_switches + 1))
    return SwitchingComparators(states[-1].min(axis=1), contiguous, states)


def _checked(losses: NDArray[np.float64]) -> None:
    if losses.ndim != 2 or 0 in losses.shape:
        raise ValueError(f"losses have shape {losses.shape}, expected (T, N) with T, N >= 1")
    if not np.isfinite(losses.sum()):
        raise ValueError(f"losses hold {int((~np.isfinite(losses)).sum())} non-finite values")
