"""Thinning out: means over bins of tokens, and numbers with as many digits as a plot can show."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ROWS_PER_POINT = 40
"""Rows that a point stands for at least, as long as there are enough for twenty points."""

MOVING_SHARE = 0.05
"""Share of the token axis that a moving mean covers."""


def bins_of(token: NDArray[np.int64], num_tokens: int, points: int) -> NDArray[np.int64]:
    """Return the bin of each token, in 0..points - 1, shape as ``token``."""
    return np.clip(token * points // max(num_tokens, 1), 0, points - 1)


def bin_centres(num_tokens: int, points: int) -> NDArray[np.float64]:
    """Return the token in the middle of each bin, (points,)."""
    return (np.arange(points) + 0.5) * num_tokens / points


def num_bins(num_tokens: int, num_rows: int, points: int) -> int:
    """Use fewer bins where there is little data: a mean of too few rows is only noise."""
    return int(np.clip(min(num_rows // ROWS_PER_POINT, num_tokens), min(20, num_rows), points))


def binned_means(
    bins: NDArray[np.int64],
    sums: NDArray[Any],
    counts: NDArray[np.integer[Any]],
    points: int,
) -> NDArray[np.float64]:
    """Return moving means of what was added up, (points, N); NaN where a bin has nothing.

    Args:
        bins: Bin of each row, (C,).
        sums: Values added up, (C, N).
        counts: How many values that were, (C, N).
        points: Number of bins.
    """
    binned_counts = np.zeros((points, sums.shape[1]))
    binned_sums = np.zeros_like(binned_counts)
    for index, (column, count) in enumerate(zip(sums.T, counts.T, strict=True)):
        binned_counts[:, index] = np.bincount(bins, weights=count, minlength=points)
        binned_sums[:, index] = np.bincount(bins, weights=column, minlength=points)
    return moving_means(binned_sums, binned_counts)


def moving_means(sums: NDArray[Any], counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return sums / counts over ``MOVING_SHARE`` of the bins around each; NaN where it is empty."""
    means = np.full(sums.shape, np.nan)
    np.divide(moving_sums(sums), moving_sums(counts), out=means, where=counts > 0)
    return means


def moving_sums(values: NDArray[Any]) -> NDArray[np.float64]:
    """Sum over the bins around each, (points, N); fewer at the ends."""
    points = values.shape[0]
    half = int(points * MOVING_SHARE / 2)
    summed = np.zeros((points + 1, values.shape[1]))
    np.cumsum(values, axis=0, out=summed[1:])
    at = np.arange(points)
    return summed[np.minimum(at + half + 1, points)] - summed[np.maximum(at - half, 0)]


def rounded(values: NDArray[Any]) -> list[float]:
    """Return six digits of each finite value."""
    return [float(f"{value:.6g}") for value in values]


def rounded_or_none(values: NDArray[np.floating[Any]]) -> list[float | None]:
    """Return five digits of each value, None for NaN."""
    return [float(f"{value:.5g}") if np.isfinite(value) else None for value in values]
