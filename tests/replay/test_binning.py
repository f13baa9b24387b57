"""Thinned-out numbers are the means they claim to be."""

from __future__ import annotations

import numpy as np

from replay.binning import (
    ROWS_PER_POINT,
    binned_means,
    bins_of,
    moving_sums,
    num_bins,
    rounded_or_none,
)


def test_every_token_falls_into_a_bin_also_beyond_the_ends() -> None:
    bins = bins_of(np.array([-5, 0, 49, 50, 99, 100, 500]), 100, 2)
    assert bins.tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert bins_of(np.array([0]), 0, 10).tolist() == [0]


def test_a_constant_stays_itself_and_nan_is_left_out() -> None:
    values = np.full((400, 2), 3.0, dtype=np.float32)
    values[::2, 1] = np.nan
    means = binned_means(np.repeat(np.arange(100), 4), values, 100)
    assert np.array_equal(means, np.full((100, 2), 3.0))


def test_moving_means_weigh_bins_by_their_rows() -> None:
    bins = np.array([0] * 30 + [1] * 10)
    values = np.concatenate([np.zeros(30), np.ones(10)]).astype(np.float32)[:, None]
    # Of 40 bins, one to each side counts.
    means = binned_means(bins, values, 40)
    assert means[0, 0] == means[1, 0] == 0.25
    assert np.isnan(means[2:]).all()


def test_sums_at_the_ends_cover_fewer_bins() -> None:
    sums = moving_sums(np.ones((80, 1)))[:, 0]
    assert sums[0] == 3.0 and sums[40] == 5.0 and sums[-1] == 3.0


def test_little_data_gets_few_points() -> None:
    assert num_bins(10_000, 10_000, 200) == 200
    assert num_bins(10_000, 100 * ROWS_PER_POINT, 200) == 100
    assert num_bins(10_000, 50, 200) == 20
    assert num_bins(3, 3, 200) == 3


def test_numbers_are_short_and_never_nan() -> None:
    assert rounded_or_none(np.array([1.23456789, np.nan, np.inf])) == [1.2346, None, None]
