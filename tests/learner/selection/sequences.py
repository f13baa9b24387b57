"""Loss sequences for the bounds, random and adversarial, and the play against them."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from learner.selection import Policy

NUM_ROUNDS = 1500


def _random(num_drafters: int) -> NDArray[np.float64]:
    return np.random.default_rng(num_drafters).random((NUM_ROUNDS, num_drafters))


def _alternating() -> NDArray[np.float64]:
    """Turn by turn 0 and 1: whoever led is hurt next."""
    first = np.arange(NUM_ROUNDS) % 2
    return np.stack([first, 1 - first], axis=1).astype(np.float64)


def _shifting() -> NDArray[np.float64]:
    """Each drafter is the best for a long while, in turn."""
    best = np.arange(NUM_ROUNDS) * 5 // NUM_ROUNDS
    return np.where(best[:, None] == np.arange(5), 0.0, 1.0)


def _late_winner() -> NDArray[np.float64]:
    losses = np.full((NUM_ROUNDS, 8), 0.5)
    losses[: NUM_ROUNDS // 3, 7], losses[NUM_ROUNDS // 3 :, 7] = 1.0, 0.0
    return losses


def _leader_is_hurt() -> NDArray[np.float64]:
    """The drafter that is ahead so far loses everything in the next round."""
    losses, totals = np.zeros((NUM_ROUNDS, 4)), np.zeros(4)
    for row in losses:
        row[int(np.argmin(totals))] = 1.0
        totals += row
    return losses


SEQUENCES = {
    "random_2": _random(2),
    "random_32": _random(32),
    "alternating": _alternating(),
    "shifting": _shifting(),
    "late_winner": _late_winner(),
    "leader_is_hurt": _leader_is_hurt(),
    "all_bad": np.ones((NUM_ROUNDS, 3)),
}


def regrets_of_play(policy: Policy, losses: NDArray[np.float64], delay: int) -> NDArray[np.float64]:
    """Play all rounds, each loss arriving ``delay`` rounds late; regret to every drafter, (N,)."""
    waiting: deque[NDArray[np.float64]] = deque()
    regrets = np.zeros(losses.shape[1])
    for row in losses:
        regrets += policy.probabilities() @ row - row
        waiting.append(row)
        if len(waiting) > delay:
            policy.learn(waiting.popleft())
    return regrets
