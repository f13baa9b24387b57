"""Squint: all learning rates at once, and a regret that falls with its own variance."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy, Row
from learner.selection.compiled import compiled

REGRET, VARIANCE = 2, 3

NODES, NODE_WEIGHTS = np.polynomial.legendre.leggauss(16)

SQRT_PI = math.sqrt(math.pi)


@compiled
def scaled_erfc(x: float) -> float:
    """Return exp(x²) erfc(x) for x >= 0, where either factor alone would leave the floats."""
    if x < 25.0:
        return math.exp(x * x) * math.erfc(x)
    inverse = 1.0 / (x * x)
    return (1.0 - inverse * (0.5 - inverse * (0.75 - inverse * 1.875))) / (x * SQRT_PI)


@compiled
def log_evidence(regret: float, variance: float) -> float:
    """Return ln of the integral of exp(η R - η² V) over η in [0, 1/2].

    With a = (R - V) / 2√V and b = R / 2√V it is √π / 2√V exp(b²) (erf(b) - erf(a)). Where a and b
    have one sign, the difference is taken between scaled complements, which cannot cancel unless
    the integrand is nearly flat; there, quadrature is exact.

    Args:
        regret: R, the summed regret.
        variance: V >= 0, the summed squared regret.
    """
    if abs(regret) <= 8.0 and variance <= 16.0:
        total = 0.0
        for index in range(NODES.size):
            rate = 0.25 * (NODES[index] + 1.0)
            total += NODE_WEIGHTS[index] * math.exp(rate * (regret - rate * variance))
        return math.log(0.25 * total)
    root = math.sqrt(variance)
    low = (regret - variance) / (2.0 * root)
    high = regret / (2.0 * root)
    at_end = 0.5 * regret - 0.25 * variance
    factor = math.log(SQRT_PI / (2.0 * root))
    if low > 0.0:
        # The largest exponent, at η = 1/2, is taken out.
        return factor + at_end + math.log(scaled_erfc(low) - math.exp(-at_end) * scaled_erfc(high))
    if high < 0.0:
        return factor + math.log(scaled_erfc(-high) - math.exp(at_end) * scaled_erfc(-low))
    return factor + high * high + math.log(math.erf(high) - math.erf(low))


def learn(
    table: NDArray[np.float64], numbers: NDArray[np.float64], losses: NDArray[np.float64]
) -> None:
    """Add the window's regrets and their squares, and weigh anew."""
    num_drafters = losses.size
    played = 0.0
    for index in range(num_drafters):
        played += table[0, index] * losses[index]
    largest = -np.inf
    for index in range(num_drafters):
        regret = played - losses[index]
        table[REGRET, index] += regret
        table[VARIANCE, index] += regret * regret
        table[0, index] = np.log(table[1, index]) + log_evidence(
            table[REGRET, index], table[VARIANCE, index]
        )
        largest = max(largest, table[0, index])
    total = 0.0
    for index in range(num_drafters):
        table[0, index] = np.exp(table[0, index] - largest)
        total += table[0, index]
    for index in range(num_drafters):
        table[0, index] /= total


class Squint(CompiledPolicy):
    """Weigh drafters by prior x the integral of exp(η R - η² V) over all rates η in [0, 1/2].

    R is the summed regret, V the summed squared regret. Koolen and van Erven, "Second-order
    quantile methods for experts and combinatorial games" (2015), section 3, improper prior.

    Regret after T rounds to any share of the drafters whose prior mass is π and whose mean squared
    regret is V (their theorem 4): at most
    sqrt(2 V) (1 + sqrt(2 ln((1/2 + ln(T + 1)) / π))) + 5 ln(1 + (1 + 2 ln(T + 1)) / π).
    """

    name = "squint"
    kernel = staticmethod(learn)
    rows = (Row.DISTRIBUTION, Row.DISTRIBUTION, Row.REGRET, Row.SUM)
