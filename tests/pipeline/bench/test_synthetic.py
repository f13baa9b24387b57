"""Synthetic traffic has the rates it promises, and shifts where it says."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.bench.synthetic import (
    NUM_SPECULATIVE_TOKENS,
    hit_rate,
    synthetic_pool,
    synthetic_requests,
    trace_of_hits,
)


@pytest.mark.parametrize(
    ("length", "rate"), [(2.88, 0.656), (4.23, 0.779), (5.69, 0.856), (7.15, 0.909), (8.5, 0.947)]
)
def test_a_mean_acceptance_length_becomes_the_rate_that_gives_it(
    length: float, rate: float
) -> None:
    assert hit_rate(length) == pytest.approx(rate, abs=1e-3)


@pytest.mark.parametrize("length", [1.0, 11.0, 20.0])
def test_invalid_lengths_are_refused(length: float) -> None:
    with pytest.raises(ValueError, match=r"outside \(1, 11\)"):
        hit_rate(length)


def test_every_domain_has_its_specialist_and_copies_are_worse() -> None:
    pool = synthetic_pool(22, np.random.default_rng(0))
    assert pool.lengths.shape == (7, 22)
    np.testing.assert_array_equal(pool.best_of_domain, np.arange(1, 8))
    for copy in range(8, 22):
        home = (copy - 1) % 7
        assert pool.lengths[home, copy] < pool.lengths[home, home + 1]


def test_invalid_pool_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="num_drafters=1"):
        synthetic_pool(1, np.random.default_rng(0))


def test_hits_come_at_their_rates_and_together() -> None:
    pool = synthetic_pool(4, np.random.default_rng(1))
    requests = list(
        synthetic_requests(
            pool, np.random.default_rng(2), num_requests=60, num_tokens=600, shift="none"
        )
    )
    hits = np.concatenate([r.trace.realised_acceptance[:, 0] for r in requests])
    domains = np.concatenate([r.domain for r in requests])
    for domain in np.unique(domains):
        found = hits[domains == domain].mean(axis=0, dtype=np.float64)
        np.testing.assert_allclose(found, pool.rates[domain], atol=0.03)
    inside = hits[domains == domains[0]].astype(np.float64)
    assert np.corrcoef(inside[:, 0], inside[:, 1])[0, 1] > 0.1


def test_a_shift_inside_a_request_goes_there_and_back() -> None:
    pool = synthetic_pool(8, np.random.default_rng(0))
    for request in synthetic_requests(
        pool, np.random.default_rng(0), num_requests=5, num_tokens=90, shift="inside"
    ):
        first, middle, last = request.domain[[0, 45, 89]]
        assert first == last != middle
        assert np.count_nonzero(np.diff(request.domain)) == 2


def test_a_window_holds_the_hits_that_follow_its_start() -> None:
    hits = np.random.default_rng(0).random((25, 3)) < 0.6
    trace = trace_of_hits(hits)
    for start in (0, 7, 14):
        np.testing.assert_array_equal(
            trace.realised_acceptance[start], hits[start : start + NUM_SPECULATIVE_TOKENS]
        )
    np.testing.assert_array_equal(trace.num_levels[-3:], [3, 2, 1])
    np.testing.assert_array_equal(trace.is_whole, np.arange(25) <= 15)
    assert np.isnan(trace.realised_acceptance[-1, 1:]).all()


def test_a_larger_pool_sees_the_same_text_and_keeps_its_first_drafters() -> None:
    found = []
    for size in (8, 32):
        rng = np.random.default_rng(4)
        pool = synthetic_pool(size, rng)
        requests = synthetic_requests(
            pool, np.random.default_rng(5), num_requests=4, num_tokens=80, shift="inside"
        )
        found.append((pool.rates[:, :8], list(requests)))
    (rates, few), (first_rates, many) = found
    np.testing.assert_array_equal(rates, first_rates)
    for one, other in zip(few, many, strict=True):
        np.testing.assert_array_equal(one.domain, other.domain)
        np.testing.assert_array_equal(
            one.trace.realised_acceptance, other.trace.realised_acceptance[:, :, :8]
        )
