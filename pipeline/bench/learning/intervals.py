"""Ratios of learning runs with their intervals: paired by stream, bootstrapped over blocks.

Requests that follow each other hang together, so blocks of them are drawn; runs of one seed are
compared on the same blocks. With several seeds, seeds are drawn first: their streams differ, and
the interval is for another order of the traffic, not for these orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BLOCK = 8
"""Requests that are drawn together."""

NUM_RESAMPLES = 2000
LEVEL = 0.95

Columns = NDArray[np.float64]
"""Sums that a figure is made of, one row per request, (Q, C)."""

Figure = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From sums (..., C) to the figure (...)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def keys(self, name: str) -> dict[str, float]:
        """Return it as flat keys."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def estimate(
    seeds: Sequence[Columns],
    figure: Figure,
    *,
    is_ratio: bool = True,
    num_resamples: int = NUM_RESAMPLES,
) -> Estimate:
    """Return the mean over seeds of a figure of sums, with its interval.

    Args:
        seeds: Per seed its columns, (Q, C).
        figure: Of the sums; NaN where they do not tell.
        is_ratio: Whether it is positive and its mean the geometric one; else the arithmetic.
        num_resamples: Of the bootstrap.

    Raises:
        ValueError: If there is no seed.
    """
    if not seeds:
        raise ValueError("no runs to compare")
    rng = np.random.default_rng(0)
    mean = _geometric_mean if is_ratio else np.mean
    value = mean(np.array([figure(one.sum(axis=0)) for one in seeds]))
    drawn = np.stack([_resampled(one, rng, num_resamples) for one in seeds])
    figures = figure(drawn)
    chosen = rng.integers(0, len(seeds), (num_resamples, len(seeds)))
    means = mean(figures[chosen, np.arange(num_resamples)[:, None]], axis=1)
    low, high = np.nanquantile(means, [(1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2])
    # Few blocks draw few different means; the interval holds its own figure all the same.
    return Estimate(value=float(value), low=float(min(low, value)), high=float(max(high, value)))


def _resampled(columns: Columns, rng: np.random.Generator, num_resamples: int) -> Columns:
    """Return the sums of drawn blocks, (R, C)."""
    size = len(columns)
    starts = np.arange(0, size, BLOCK)
    blocks = np.add.reduceat(columns, starts, axis=0)
    drawn = rng.integers(0, len(blocks), (num_resamples, len(blocks)))
    return np.asarray(blocks[drawn].sum(axis=1))


def _geometric_mean(values: NDArray[np.float64], axis: int = 0) -> NDArray[np.float64]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.exp(np.log(values).mean(axis=axis)))


def ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the first sum over the second."""
    return np.asarray(sums[..., 0] / sums[..., 1])


def lowest_window(ours: NDArray[np.int64], theirs: NDArray[np.int64], *, width: int = 20) -> float:
    """Return the smallest ratio of tokens per verification over any ``width`` requests.

    Args:
        ours: Verifications of every request, (Q,).
        theirs: Those of whom it is compared with, for the same tokens.
        width: Requests of a window, 1..Q.
    """
    kernel = np.ones(width)
    return float(np.min(np.convolve(theirs, kernel, "valid") / np.convolve(ours, kernel, "valid")))


def over_seeds(values: Sequence[float], statistic: Callable[..., NDArray[np.float64]]) -> Estimate:
    """Return a statistic over seeds, with an interval by drawing seeds alone."""
    found = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(0)
    drawn = found[rng.integers(0, len(found), (NUM_RESAMPLES, len(found)))]
    low, high = np.quantile(statistic(drawn, axis=1), [(1.0 - LEVEL) / 2, (1.0 + LEVEL) / 2])
    return Estimate(value=float(statistic(found)), low=float(low), high=float(high))
