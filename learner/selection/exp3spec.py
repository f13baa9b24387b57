"""EXP3Spec: the adversarial bandit of BanditSpec, as published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.bandit import Bandit
from learner.selection.base import Row
from learner.selection.hedge import mixed_loss, weigh_losses
from learner.selection.ucbspec import largest_loss

NUM_SPECULATIVE_TOKENS, NUM_ROUNDS = 0, 1
ESTIMATE = 2


def learn_round(
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    index: int,
    probability: float,
    length_loss: float,
    agreement_loss: float,
) -> None:
    """Estimate the played drafter's loss by its share of the dice, and weigh anew."""
    numbers[NUM_ROUNDS] += 1.0
    num_drafters = table.shape[1]
    table[ESTIMATE, index] += (
        length_loss / largest_loss(numbers[NUM_SPECULATIVE_TOKENS]) / (probability)
    )
    rate = np.sqrt(np.log(num_drafters) / ((numbers[NUM_ROUNDS] + 1.0) * num_drafters))
    weigh_losses(table, ESTIMATE, rate)


class Exp3Spec(Bandit):
    """Weigh drafters by exp(-η_t x estimated loss), η_t = sqrt(ln N / (t N)) in round t.

    BanditSpec (notes/selection.md, section 5.2): a round's estimate is (K + 1 - length) / (K p) for
    the drafter that was played and 0 for the others; p is the probability with which it was
    selected, carried by the event, so that late feedback stays unbiased. No exploration is mixed
    in. ``num_speculative_tokens`` is K; at 0 it is taken as large.

    The expected regret against any losses fixed beforehand is at most 2 sqrt(T N ln N), in
    units of the largest loss (Bubeck and Cesa-Bianchi, "Regret analysis of stochastic and
    nonstochastic multi-armed bandit problems", 2012, theorem 3.1). With feedback d rounds
    late a pool of learners keeps (d + 1) times the bound of T / (d + 1) rounds (``bold``); one
    learner fed late is held to that by the tests, not by a proof.
    """

    name = "exp3spec"
    round_kernel = staticmethod(learn_round)
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.LOSS)
    parameters: ClassVar[Mapping[str, float]] = {"num_speculative_tokens": 0.0}
    num_counters = 1

    def _newcomers_loss(
        self, losses: NDArray[np.float64], prior: NDArray[np.float64], num_drafters: int
    ) -> float:
        rate = np.sqrt(np.log(num_drafters) / ((self.numbers[NUM_ROUNDS] + 1.0) * num_drafters))
        return mixed_loss(losses, prior, rate)
