"""UCBSpec: the stochastic bandit of BanditSpec, as published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from learner.selection.bandit import COUNT, LOSS, IndexBandit, observe, share_unplayed
from learner.selection.compiled import compiled
from learner.selection.kernels import sharpen_to_best

DELTA, NUM_SPECULATIVE_TOKENS, NUM_ROUNDS = 0, 1, 2


@compiled
def largest_loss(num_speculative_tokens: float) -> float:
    """Return K / (K + 1), the length loss of a round that accepts nothing; 1 if K is unknown."""
    if num_speculative_tokens == 0.0:
        return 1.0
    return num_speculative_tokens / (num_speculative_tokens + 1.0)


@compiled
def confidence_radius(count: float, num_drafters: int, round_index: float, delta: float) -> float:
    """Return the radius around the mean of n losses whose range is 1.

    1/2 sqrt((1 + n) / n² (1 + 2 ln(N t² sqrt(1 + n) / δ))), BanditSpec's with L = 1.
    """
    logarithm = np.log(num_drafters * round_index**2 * np.sqrt(1.0 + count) / delta)
    return float(0.5 * np.sqrt((1.0 + count) / count**2 * (1.0 + 2.0 * logarithm)))


@compiled
def weigh(table: NDArray[np.float64], numbers: NDArray[np.float64]) -> None:
    """Play the best index."""
    if share_unplayed(table):
        return
    num_drafters = table.shape[1]
    scale = largest_loss(numbers[NUM_SPECULATIVE_TOKENS])
    for index in range(num_drafters):
        count = table[COUNT, index]
        radius = confidence_radius(count, num_drafters, numbers[NUM_ROUNDS] + 1.0, numbers[DELTA])
        table[0, index] = scale * radius - table[LOSS, index] / count
    sharpen_to_best(table[0])


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


class UcbSpec(IndexBandit):
    """Play the largest mean acceptance length + confidence radius.

    BanditSpec (notes/selection.md, section 5.1): every drafter once, then mean + K/2 x
    sqrt((1 + n) / n² (1 + 2 ln(N t² sqrt(1 + n) / δ))) over lengths in [1, K + 1]; here both are
    divided by K + 1. ``num_speculative_tokens`` is K; at 0 the range of losses is taken as 1, a
    radius wider by 1 / K.

    If each drafter's losses have one conditional mean, Δ_i above the best, then with probability
    1 - δ all means stay within their radius r (self-normalised bound of Abbasi-Yadkori, Pál and
    Szepesvári, 2011), so that no drafter is played once 2 r < Δ_i: the regret is at most Σ Δ_i n_i,
    with n_i - 1 the last count at which 2 r >= Δ_i in round T. Feedback d rounds late
    adds at most d Σ Δ_i (Joulani, György and Szepesvári, 2013, section 5). Within a request
    of some hundred rounds 2 r stays above any Δ, so that it plays all in turn.
    """

    name = "ucbspec"
    round_kernel = staticmethod(learn_round)
    weigh = staticmethod(weigh)
    parameters: ClassVar[Mapping[str, float]] = {"delta": 0.05, "num_speculative_tokens": 0.0}

    @classmethod
    def check_parameter(cls, name: str, value: float) -> None:
        """Refuse a delta outside (0, 1)."""
        super().check_parameter(name, value)
        if name == "delta" and not 0.0 < value < 1.0:
            raise ValueError(f"policy {cls.name!r}: {name}={value} outside (0, 1)")
