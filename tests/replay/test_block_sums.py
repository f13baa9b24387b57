"""Sums over blocks of requests keep their totals, and intervals from them cover the truth."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from replay.block_sums import BlockSums, block_bootstrap_statistic


def ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[..., 0] / sums[..., 1])


def test_a_few_requests_have_rows_of_their_own() -> None:
    sums = BlockSums(2)
    for index in range(5):
        sums.add(np.array([index, 1.0]))
    assert sums.rows[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_many_requests_share_rows_in_order_and_nothing_is_lost() -> None:
    sums = BlockSums(1, max_rows=8)
    for index in range(100):
        sums.add(np.array([float(index)]))
    assert len(sums.rows) <= 8
    assert sums.total[0] == 99 * 100 / 2
    assert sums.rows[0, 0] == sum(range(16))
    assert sums.rows[1, 0] == sum(range(16, 32))
    assert sums.rows[-1, 0] == sum(range(96, 100))


def test_a_wider_row_appends_columns_of_zero() -> None:
    sums = BlockSums(1)
    sums.add(np.array([1.0]))
    sums.add(np.array([1.0, 5.0, 2.0]))
    sums.add(np.array([4.0]))
    assert sums.rows.tolist() == [[1, 0, 0], [1, 5, 2], [4, 0, 0]]


def test_the_interval_of_a_ratio_covers_it() -> None:
    covered = 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        size = generator.uniform(5.0, 50.0, 80)
        rows = np.column_stack([size * generator.normal(3.0, 1.0, 80), size])
        interval = block_bootstrap_statistic(rows, ratio, generator, num_resamples=300)
        assert interval is not None
        assert interval.low <= interval.value <= interval.high
        covered += interval.low <= 3.0 <= interval.high
    assert 172 <= covered <= 200


def test_paired_rows_give_a_narrow_interval_of_their_quotient() -> None:
    generator = np.random.default_rng(1)
    luck = generator.uniform(1.0, 9.0, 100)
    rows = np.column_stack([1.1 * luck, luck])
    interval = block_bootstrap_statistic(rows, ratio, generator)
    assert interval is not None
    assert interval.high - interval.low < 1e-9
    assert abs(interval.value - 1.1) < 1e-9


def test_too_few_rows_or_no_value_give_no_interval() -> None:
    generator = np.random.default_rng(0)
    assert block_bootstrap_statistic(np.ones((3, 2)), ratio, generator) is None
    assert block_bootstrap_statistic(np.zeros((50, 2)), ratio, generator) is None
    assert block_bootstrap_statistic(np.empty((0, 2)), ratio, generator) is None
