"""AdaNormalHedge: no rate, regret that falls with the loss of the best, drafters that may sleep."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy, Row
from learner.selection.compiled import compiled


@compiled
def log_weight(regret: float, absolute: float) -> float:
    """Return ln(Φ(R + 1, C + 1) - Φ(R - 1, C + 1)) with Φ(R, C) = exp([R]+² / 3C); -inf for 0.

    Args:
        regret: R, the summed regret.
        absolute: C >= |R|, the summed absolute regret.
    """
    scale = 3.0 * (absolute + 1.0)
    upper = max(regret + 1.0, 0.0)
    lower = max(regret - 1.0, 0.0)
    high = upper * upper / scale
    low = lower * lower / scale
    if not high > low:
        return -math.inf
    return high + math.log(-math.expm1(low - high))


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Add the window's regrets and weigh anew."""
    num_drafters = losses.size
    played = 0.0
    for index in range(num_drafters):
        played += table[0, index] * losses[index]
    largest = -np.inf
    for index in range(num_drafters):
        regret = played - losses[index]
        table[2, index] += regret
        table[3, index] += abs(regret)
        table[0, index] = np.log(table[1, index]) + log_weight(table[2, index], table[3, index])
        largest = max(largest, table[0, index])
    total = 0.0
    for index in range(num_drafters):
        weight = np.exp(table[0, index] - largest) if largest > -np.inf else table[1, index]
        table[0, index] = weight
        total += weight
    for index in range(num_drafters):
        table[0, index] /= total


class AdaNormalHedge(CompiledPolicy):
    """Weigh drafters by prior x (Φ(R + 1, C + 1) - Φ(R - 1, C + 1)), Φ(R, C) = exp([R]+² / 3C).

    R is the summed regret, C the summed absolute regret. Luo and Schapire, "Achieving all with no
    parameters: AdaNormalHedge" (2015), section 3. If no weight is left, the prior is played.

    Regret to any distribution u after T rounds (their theorem 1): at most
    sqrt(3 C_u (KL(u, prior) + ln B + ln(1 + ln N))), where C_u = Σ_i u_i C_i <= T and
    B = 1 + 3/2 Σ_i prior_i (1 + ln(1 + C_i)).
    """

    name = "ada_normal_hedge"
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.REGRET, Row.SUM)
