"""Ratios of sums with block-bootstrap intervals."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.bench.learning.intervals import estimate, lowest_window, over_seeds, ratio


def pairs(seed: int, factor: float, size: int = 400) -> NDArray[np.float64]:
    rng = np.random.default_rng(seed)
    theirs = rng.integers(10, 40, size).astype(np.float64)
    return np.stack([theirs, theirs / factor], axis=1)


def test_a_ratio_that_never_varies_has_no_width() -> None:
    found = estimate([pairs(0, 1.3), pairs(1, 1.3)], ratio)
    assert found.value == pytest.approx(1.3)
    assert (found.low, found.high) == pytest.approx((1.3, 1.3))


def test_seeds_count_as_a_geometric_mean() -> None:
    found = estimate([pairs(0, 1.0), pairs(1, 1.44)], ratio)
    assert found.value == pytest.approx(1.2)
    assert found.low == pytest.approx(1.0)
    assert found.high == pytest.approx(1.44)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    covered = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        ours, theirs = rng.gamma(20.0, 1.0, 160), rng.gamma(20.0, 1.1, 160)
        found = estimate([np.stack([theirs, ours], axis=1)], ratio, num_resamples=400)
        covered += found.low <= 1.1 <= found.high
    assert 51 <= covered <= 60


def test_requests_that_hang_together_make_the_interval_wider() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(0.0, 1.0, 160)
    blocks = np.repeat(rng.normal(0.0, 1.0, 20), 8)
    widths = []
    for one in (noise, blocks):
        found = estimate([np.stack([20.0 + one, np.full(160, 20.0)], axis=1)], ratio)
        widths.append(found.high - found.low)
    assert widths[1] > 2.0 * widths[0]


def test_the_lowest_window_finds_twenty_bad_requests() -> None:
    theirs = np.full(100, 10)
    ours = np.full(100, 10)
    ours[40:60] = 12
    assert lowest_window(ours, theirs) == pytest.approx(10 / 12)
    assert lowest_window(theirs, theirs) == 1.0


def test_a_statistic_over_seeds_lies_in_its_interval() -> None:
    found = over_seeds([0.99, 0.97, 0.98], np.min)
    assert found.low == found.value == 0.97
    assert found.high >= 0.97
    assert found.keys("k") == {"k": 0.97, "k_low": found.low, "k_high": found.high}


def test_invalid_nothing_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="no runs"):
        estimate([], ratio)
