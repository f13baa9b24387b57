"""A thousand games for the bounds: random and adversarial losses, feedback in time and late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tests.learner.selection.play import late

NUM_GAMES = 1000
NUM_SPECULATIVE_TOKENS = 8
LONG_DELAY = 1000

Losses = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Game:
    """Losses (T, N), a comparator per round (T,), a prior (N,), and when feedback arrives.

    If ``hurts_heaviest``, the losses are only a shape: the adversary makes them as it watches.
    """

    family: str
    losses: Losses
    comparators: NDArray[np.int64]
    prior: NDArray[np.float64]
    num_learned_before: NDArray[np.int64]
    hurts_heaviest: bool = False


def _segments(generator: Generator, num_rounds: int, num_drafters: int) -> NDArray[np.int64]:
    """A best drafter per round, from few of the drafters, that changes at most six times."""
    num_segments = int(generator.integers(1, 8))
    starts = np.sort(generator.integers(0, num_rounds, num_segments))
    few = generator.integers(0, num_drafters, size=3)
    best = generator.choice(few, size=num_segments + 1)
    return np.asarray(best[np.searchsorted(starts, np.arange(num_rounds), side="right")])


def _uniform(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    return generator.random((len(best), num_drafters))


def _bernoulli(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    means = generator.random(num_drafters)
    return np.asarray(generator.random((len(best), num_drafters)) < means, dtype=np.float64)


def _shifting(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    is_best = best[:, None] == np.arange(num_drafters)
    return np.asarray(np.where(is_best, 0.1, 0.8) + 0.2 * generator.random(is_best.shape) - 0.1)


def _extreme(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    return np.where(best[:, None] == np.arange(num_drafters), 0.0, 1.0)


def _lengths(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    """As windows are: 1 - length / (K + 1), one drafter better than the others for a while."""
    rates = np.where(best[:, None] == np.arange(num_drafters), 0.9, 0.6)
    shape = (*rates.shape, NUM_SPECULATIVE_TOKENS)
    runs = np.cumprod(generator.random(shape) < rates[..., None], axis=2).sum(axis=2)
    return np.asarray(1.0 - (runs + 1.0) / (NUM_SPECULATIVE_TOKENS + 1.0))


def _alternating(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    """Who led is hurt next: 0 and 1 turn by turn, after a first step that breaks the tie."""
    turn = (np.arange(len(best))[:, None] + np.arange(num_drafters)) % 2
    losses = turn.astype(np.float64)
    losses[0] *= 0.5
    return losses


def _leader_is_hurt(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    losses, totals = np.zeros((len(best), num_drafters)), np.zeros(num_drafters)
    for row in losses:
        row[int(np.argmin(totals))] = 1.0
        totals += row
    return losses


def _late_winner(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    losses = np.full((len(best), num_drafters), 0.5)
    third = len(best) // 3
    losses[:third, -1], losses[third:, -1] = 1.0, 0.0
    return losses


def _needle(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    """All lose everything but one, which is right at rare moments only."""
    losses = np.ones((len(best), num_drafters))
    losses[:, 0] = generator.random(len(best)) > 0.05
    return losses


def _hurt_heaviest(generator: Generator, best: NDArray[np.int64], num_drafters: int) -> Losses:
    return np.zeros((len(best), num_drafters))


FAMILIES: tuple[Callable[[Generator, NDArray[np.int64], int], Losses], ...] = (
    _uniform,
    _bernoulli,
    _shifting,
    _extreme,
    _lengths,
    _alternating,
    _leader_is_hurt,
    _late_winner,
    _needle,
    _hurt_heaviest,
)


def _delays(generator: Generator, kind: int, num_rounds: int) -> NDArray[np.int64]:
    """None, one, up to 2 K, always 2 K, or up to a thousand rounds."""
    if kind == 0:
        return np.zeros(num_rounds, dtype=np.int64)
    if kind == 1:
        return np.ones(num_rounds, dtype=np.int64)
    if kind == 2:
        return generator.integers(0, 2 * NUM_SPECULATIVE_TOKENS + 1, num_rounds)
    if kind == 3:
        return np.full(num_rounds, 2 * NUM_SPECULATIVE_TOKENS)
    return generator.integers(0, LONG_DELAY + 1, num_rounds)


def _game(seed: int) -> Game:
    generator = np.random.default_rng(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    kind = seed // len(FAMILIES) % 5
    num_rounds = 1200 if kind == 4 else int(generator.integers(20, 400))
    num_drafters = int(generator.choice([2, 3, 8, 22]))
    best = _segments(generator, num_rounds, num_drafters)
    prior = generator.dirichlet(np.ones(num_drafters)) * 0.9 + 0.1 / num_drafters
    return Game(
        family=family.__name__,
        losses=family(generator, best, num_drafters),
        comparators=best,
        prior=prior,
        num_learned_before=late(_delays(generator, kind, num_rounds)),
        hurts_heaviest=family is _hurt_heaviest,
    )


@cache
def games() -> tuple[Game, ...]:
    """All games, the same in every run."""
    return tuple(_game(seed) for seed in range(NUM_GAMES))
