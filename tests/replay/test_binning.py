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


def test_a_constant_stays_itself_and_what_is_missing_is_left_out() -> None:
    counts = np.tile([5, 0], (400, 1))
    counts[::2, 1] = 3
    means = binned_means(np.repeat(np.arange(100), 4), 3.0 * counts, counts, 100)
    assert np.allclose(means, 3.0)


def test_moving_means_weigh_bins_by_their_counts() -> None:
    # Of 40 bins, one to each side counts.
    sums, counts = np.array([[0.0], [10.0]]), np.array([[30], [10]])
    means = binned_means(np.array([0, 1]), sums, counts, 40)
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
