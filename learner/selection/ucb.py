"""UCB1 with a width to tune: the bandit that an engineer would try."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.bandit import IndexBandit, observe, play_confident
from learner.selection.compiled import compiled

WIDTH, NUM_ROUNDS = 0, 1


@compiled
def weigh(table: NDArray[np.float64], numbers: NDArray[np.float64]) -> None:
    """Play the best index."""
    play_confident(table, numbers[NUM_ROUNDS], numbers[WIDTH])


def learn_round(
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    index: int,
    probability: float,
    length_loss: float,
    agreement_loss: float,
) -> None:
    """Learn how long the played drafter's text was."""
    observe(table, numbers, index, length_loss)
    weigh(table, numbers)


class Ucb(IndexBandit):
    """Play the smallest mean length loss - width x sqrt(2 ln t / n).

    Auer, Cesa-Bianchi and Fischer, "Finite-time analysis of the multiarmed bandit problem" (2002),
    section 2 (UCB1 is width 1). Widths of 0.1 to 1 are worth trying; scope=stream carries
    what was learned from one request to the next.

    At width 1 the expected regret, if each drafter's losses are drawn independently from one law
    with mean Δ_i above the best, is at most 8 Σ ln T / Δ_i + (1 + π²/3) Σ Δ_i (their theorem 1),
    and feedback d rounds late adds at most d Σ Δ_i (Joulani, György and Szepesvári, "Online
    learning under delayed feedback", 2013, section 5). Below width 1/2 nothing is proved,
    and against an adversary the regret of any width can grow linearly.
    """

    name = "ucb"
    round_kernel = staticmethod(learn_round)
    weigh = staticmethod(weigh)
    parameters: ClassVar[Mapping[str, float]] = {"width": 0.25}
