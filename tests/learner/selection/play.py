"""Compiled games: a policy plays loss sequences, and feedback reaches it late."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from learner.selection import CompiledPolicy
from learner.selection.compiled import LEARN, LEARN_ROUND, TABLE, VECTOR, Kernel, pointer
from learner.selection.kernels import draw

INDICES = types.int64[::1]


def in_time(num_rounds: int) -> NDArray[np.int64]:
    """Windows learned before each round, if feedback arrives at once."""
    return np.arange(num_rounds)


def late(delay_rounds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Windows learned before each round: the window of round s arrives ``delay_rounds[s]`` late,
    and no window is learned before its predecessor.
    """
    num_rounds = len(delay_rounds)
    arrival = np.maximum.accumulate(np.arange(num_rounds) + 1 + delay_rounds)
    return np.searchsorted(arrival, np.arange(num_rounds), side="right").astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Play:
    """A finished game.

    Attributes:
        losses: (T, N).
        probabilities: Of each round (T, N).
        final: Probabilities once all feedback has arrived, (N,).
        drawn: Drafter of each round (T,), -1 where none was drawn.
    """

    losses: NDArray[np.float64]
    probabilities: NDArray[np.float64]
    final: NDArray[np.float64]
    drawn: NDArray[np.int64]

    @property
    def expected_losses(self) -> NDArray[np.float64]:
        return np.asarray((self.probabilities * self.losses).sum(axis=1))

    @property
    def regrets(self) -> NDArray[np.float64]:
        """Expected loss minus the loss of every drafter, (N,)."""
        return np.asarray(self.expected_losses.sum() - self.losses.sum(axis=0))

    def regret_to(self, comparators: NDArray[np.int64]) -> float:
        best = self.losses[np.arange(len(self.losses)), comparators].sum()
        return float(self.expected_losses.sum() - best)

    @property
    def moves(self) -> NDArray[np.float64]:
        """Mass that moves after each round, (T,)."""
        steps = np.diff(self.probabilities, axis=0, append=self.final[None])
        return np.asarray(0.5 * np.abs(steps).sum(axis=1))


def _play_windows(
    learn: Any,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    losses: NDArray[np.float64],
    num_learned_before: NDArray[np.int64],
    hurts_heaviest: bool,
    probabilities: NDArray[np.float64],
) -> None:
    num_learned = 0
    for round_index in range(losses.shape[0]):
        while num_learned < num_learned_before[round_index]:
            learn(table, numbers, losses[num_learned])
            num_learned += 1
        probabilities[round_index] = table[0]
        if hurts_heaviest:
            losses[round_index] = 0.0
            losses[round_index, np.argmax(table[0])] = 1.0
    while num_learned < losses.shape[0]:
        learn(table, numbers, losses[num_learned])
        num_learned += 1


def _play_rounds(
    learn_round: Any,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    losses: NDArray[np.float64],
    num_learned_before: NDArray[np.int64],
    coins: NDArray[np.float64],
    probabilities: NDArray[np.float64],
    drawn: NDArray[np.int64],
) -> None:
    num_learned = 0
    for round_index in range(losses.shape[0]):
        while num_learned < num_learned_before[round_index]:
            index = drawn[num_learned]
            loss = losses[num_learned, index]
            learn_round(table, numbers, index, probabilities[num_learned, index], loss, loss)
            num_learned += 1
        probabilities[round_index] = table[0]
        drawn[round_index] = draw(table[0], coins[round_index])


@cache
def _compiled_windows() -> Kernel:
    learn = types.FunctionType(LEARN)
    arguments = (learn, TABLE, VECTOR, TABLE, INDICES, types.boolean, TABLE)
    return pointer(_play_windows, types.void(*arguments))


@cache
def _compiled_rounds() -> Kernel:
    learn = types.FunctionType(LEARN_ROUND)
    arguments = (learn, TABLE, VECTOR, TABLE, INDICES, VECTOR, TABLE, INDICES)
    return pointer(_play_rounds, types.void(*arguments))


def play_windows(
    policy: CompiledPolicy,
    losses: NDArray[np.float64],
    num_learned_before: NDArray[np.int64],
    *,
    hurts_heaviest: bool = False,
) -> Play:
    """Play all rounds with full information; an adversary may instead hurt the heaviest."""
    losses = losses.copy()
    probabilities = np.empty_like(losses)
    _compiled_windows()(
        pointer(policy.kernel, LEARN),
        policy.table,
        policy.numbers,
        losses,
        num_learned_before,
        hurts_heaviest,
        probabilities,
    )
    drawn = np.full(len(losses), -1)
    return Play(
        losses=losses, probabilities=probabilities, final=policy.probabilities(), drawn=drawn
    )


def play_rounds(
    policy: CompiledPolicy,
    losses: NDArray[np.float64],
    num_learned_before: NDArray[np.int64],
    seed: int,
) -> Play:
    """Play all rounds as a bandit: drafters are drawn, and theirs are the only losses seen."""
    probabilities, drawn = np.empty_like(losses), np.empty(len(losses), dtype=np.int64)
    _compiled_rounds()(
        pointer(policy.round_kernel, LEARN_ROUND),
        policy.table,
        policy.numbers,
        losses,
        num_learned_before,
        np.random.default_rng(seed).random(len(losses)),
        probabilities,
        drawn,
    )
    return Play(
        losses=losses, probabilities=probabilities, final=policy.probabilities(), drawn=drawn
    )
