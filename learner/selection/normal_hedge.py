"""NormalHedge: no rate to tune, and no weight for drafters that do worse than the mixture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy, Row
from learner.selection.compiled import compiled

MAX_NEWTON_STEPS = 100

REGRET_NOISE = 1e-9
"""Regrets up to this are rounding: the weights are scale free and would amplify it."""


@compiled
def scaled_inverse_c(relative: NDArray[np.float64], prior: NDArray[np.float64]) -> float:
    """Return x = M² / 2c for regrets ``relative`` in [0, 1] whose largest, M, was scaled to 1.

    x solves g(x) = ln Σ_i prior_i exp(relative_i² x) = 1. With prior j on the largest it lies in
    [1, 1 + ln(1/prior_j)], so no exponent can overflow. g is convex and increases, and is at
    least 1 at the upper end, so Newton's steps from there fall on the root without passing it.
    """
    x: float = 1.0 - np.log(prior[np.argmax(relative)])
    for _ in range(MAX_NEWTON_STEPS):
        total = 0.0
        slope = 0.0
        for index in range(relative.size):
            square = relative[index] * relative[index]
            term = prior[index] * np.exp(square * x - x)
            total += term
            slope += term * square
        step = (np.log(total) + x - 1.0) * total / slope
        x -= step
        if step <= 1e-14 * x:
            break
    return x


@compiled
def weigh(
    regrets: NDArray[np.float64], prior: NDArray[np.float64], weights: NDArray[np.float64]
) -> None:
    """Write NormalHedge's weights, shape (N,), sum 1; the prior if no regret is positive."""
    largest = regrets.max()
    if not largest > REGRET_NOISE:
        weights[:] = prior
        return
    for index in range(regrets.size):
        weights[index] = max(regrets[index], 0.0) / largest
    x = scaled_inverse_c(weights, prior)
    total = 0.0
    for index in range(regrets.size):
        relative = weights[index]
        weights[index] = prior[index] * relative * np.exp((relative * relative - 1.0) * x)
        total += weights[index]
    for index in range(regrets.size):
        weights[index] /= total


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Add the window's regrets and weigh anew."""
    played = 0.0
    for index in range(losses.size):
        played += table[0, index] * losses[index]
    for index in range(losses.size):
        table[2, index] += played - losses[index]
    weigh(table[2], table[1], table[0])


class NormalHedge(CompiledPolicy):
    """Weigh drafters by their regret R: prior x [R]+ / c x exp([R]+² / 2c).

    Chaudhuri, Freund and Hsu, "A parameter-free hedging algorithm" (2009), section 3, with a prior
    in the place of 1/N; the base learner of HedgeSpec. The scale c solves
    Σ_i prior_i exp([R_i]+² / 2c) = e. While no drafter beats the mixture, the prior is played.

    Regret to the best share ε of N drafters, uniform prior, after T rounds is at most
    sqrt((1 + ln(1/ε)) (3 (1 + 50 δ) T + 16 ln²N / δ (10.2 / δ² + ln N))) for every δ in (0, 1/2]
    (their theorem 1); to the best drafter, ε = 1/N. The tests hold it to the smaller
    sqrt(T (1 + ln N)), which is measured, not proved. Late feedback adds at most the mass
    that moves while it is out.
    """

    name = "normal_hedge"
    version = 2
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.REGRET)
