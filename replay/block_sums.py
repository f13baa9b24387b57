"""Sums over consecutive requests, in bounded memory: what paired intervals are drawn from."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from replay.regret import Interval

MAX_ROWS = 4096


class BlockSums:
    """Rows of sums, one per request; when there are too many, neighbours are added up.

    Requests stay in order, so a row is a block of consecutive ones: blocks are what a bootstrap of
    dependent requests draws.

    Args:
        width: Sums per row.
        max_rows: Rows kept, even and >= 2.
    """

    def __init__(self, width: int, *, max_rows: int = MAX_ROWS) -> None:
        self._sums = np.zeros((max_rows, width))
        self._num_rows = 0
        self._requests_per_row = 1
        self._in_row = 0

    @property
    def rows(self) -> NDArray[np.float64]:
        """The sums, shape (B, width)."""
        return self._sums[: self._num_rows]

    @property
    def total(self) -> NDArray[np.float64]:
        """Sums over all requests, shape (width,)."""
        return np.asarray(self.rows.sum(axis=0))

    def _widen(self, width: int) -> None:
        missing = width - self._sums.shape[1]
        if missing > 0:
            self._sums = np.hstack([self._sums, np.zeros((len(self._sums), missing))])

    def add(self, values: NDArray[np.float64]) -> None:
        """Add the sums of the next request, shape (width,); a wider row appends columns."""
        self._widen(values.size)
        if self._in_row == 0:
            if self._num_rows == len(self._sums):
                self._merge_neighbours()
            self._num_rows += 1
        self._sums[self._num_rows - 1, : values.size] += values
        self._in_row = (self._in_row + 1) % self._requests_per_row

    def _merge_neighbours(self) -> None:
        merged = self._sums[0::2] + self._sums[1::2]
        self._sums[: len(merged)] = merged
        self._sums[len(merged) :] = 0.0
        self._num_rows = len(merged)
        self._requests_per_row *= 2


def block_bootstrap_statistic(
    rows: NDArray[np.float64],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    generator: np.random.Generator,
    *,
    num_resamples: int = 1000,
) -> Interval | None:
    """Return a statistic of the summed rows with its 95 % percentile interval.

    Circular block bootstrap over rows, in blocks of B^(1/3): what is compared within a row stays
    paired.

    Args:
        rows: Shape (B, width).
        statistic: From sums (..., width) to values (...); NaN where it does not exist.
        generator: The dice.
        num_resamples: Resampled logs.

    Returns:
        None with fewer than two whole blocks, or where the statistic does not exist.
    """
    count = len(rows)
    length = max(1, math.ceil(math.cbrt(count)))
    value = float(statistic(rows.sum(axis=0))) if count else math.nan
    if count < 2 * length or count < 4 or not math.isfinite(value):
        return None
    num_blocks = math.ceil(count / length)
    summed = np.zeros((count + length + 1, rows.shape[1]))
    np.cumsum(np.concatenate([rows, rows[:length]]), axis=0, out=summed[1:])
    block_sums = summed[length : length + count] - summed[:count]
    draws = generator.integers(0, count, (num_resamples, num_blocks))
    resampled = np.zeros((num_resamples, rows.shape[1]))
    for column in draws.T:
        resampled += block_sums[column]
    values = statistic(resampled * (count / (num_blocks * length)))
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    low, high = np.quantile(values, [0.025, 0.975])
    return Interval(value=value, low=float(low), high=float(high))
