"""The gate: error rates over many simulated comparisons, and what it must never let in."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from learner.gate import (
    Decision,
    GateSettings,
    PairedSums,
    break_even_verifications,
    judged,
    num_looks,
    paired_evidence,
    round_seconds,
)
from schemas.events import CostModel

SETTINGS = GateSettings(min_requests=8, max_requests=128)
NUM_SEEDS = 200
MOST = 0.09
"""A rate of 0.05 shows more than this in 200 seeds once in a hundred times."""


def simulated(difference: float, rng: np.random.Generator, size: int) -> PairedSums:
    """Draw requests in which the newer version is better by ``difference`` per window."""
    counts = rng.integers(10, 60, size)
    old = counts * rng.normal(2.0, 0.3, size)
    new = old + counts * (difference + rng.normal(0.0, 0.25, size))
    return PairedSums(num_windows=counts, new_lengths=new, old_lengths=old)


@cache
def decision(difference: float, seed: int) -> tuple[Decision, int]:
    """Look as often as the gate does; return the decision and the requests that it took."""
    rng = np.random.default_rng(seed)
    everything = simulated(difference, rng, SETTINGS.max_requests)
    for look in range(1, num_looks(SETTINGS.max_requests, SETTINGS.min_requests) + 1):
        size = SETTINGS.min_requests * 2 ** (look - 1)
        sums = PairedSums(
            num_windows=everything.num_windows[:size],
            new_lengths=everything.new_lengths[:size],
            old_lengths=everything.old_lengths[:size],
        )
        verdict = judged(sums, SETTINGS, look=look)
        if verdict.decision is not Decision.WAIT:
            return verdict.decision, size
    return Decision.WAIT, SETTINGS.max_requests


def share(difference: float, wanted: Decision) -> float:
    found = [decision(difference, seed)[0] for seed in range(NUM_SEEDS)]
    return found.count(wanted) / NUM_SEEDS


def test_a_better_version_is_promoted() -> None:
    assert share(0.2, Decision.PROMOTE) >= 0.98
    assert share(0.2, Decision.REFUSE) == 0.0


def test_an_equal_version_waits_and_is_let_in_no_more_often_than_stated() -> None:
    assert share(0.0, Decision.PROMOTE) <= MOST
    assert share(0.0, Decision.REFUSE) <= MOST


def test_a_worse_version_is_refused_and_never_let_in() -> None:
    assert share(-0.2, Decision.REFUSE) >= 0.98
    assert share(-0.2, Decision.PROMOTE) == 0.0
    assert share(-0.02, Decision.PROMOTE) <= SETTINGS.error


def test_a_clear_difference_needs_few_requests() -> None:
    sizes = [decision(0.6, seed)[1] for seed in range(NUM_SEEDS)]
    assert np.mean(np.array(sizes) == SETTINGS.min_requests) >= 0.95


def test_windows_of_one_request_are_not_taken_for_independent() -> None:
    """The same requests with ten times the windows tell no more."""
    sums = simulated(0.1, np.random.default_rng(0), 20)
    longer = PairedSums(
        num_windows=sums.num_windows * 10,
        new_lengths=sums.new_lengths * 10,
        old_lengths=sums.old_lengths * 10,
    )
    one, ten = paired_evidence(sums, error=0.05), paired_evidence(longer, error=0.05)
    assert ten.num_windows == 10 * one.num_windows
    assert np.isclose(one.difference_low, ten.difference_low)
    assert np.isclose(one.difference_high, ten.difference_high)


def test_one_request_says_nothing() -> None:
    sums = PairedSums(
        num_windows=np.array([50]), new_lengths=np.array([200.0]), old_lengths=np.array([100.0])
    )
    verdict = judged(sums, SETTINGS, look=1)
    assert verdict.decision is Decision.WAIT
    assert np.isnan(verdict.evidence.difference_low)


def test_invalid_acceptance_is_refused() -> None:
    sums = simulated(0.5, np.random.default_rng(0), 20)
    sums.new_lengths[3] = np.nan
    assert judged(sums, SETTINGS, look=1).decision is Decision.REFUSE


def test_a_slower_version_must_gain_what_it_costs() -> None:
    sums = simulated(0.2, np.random.default_rng(1), 64)
    assert judged(sums, SETTINGS, look=1).decision is Decision.PROMOTE
    assert judged(sums, SETTINGS, look=1, cost_ratio=1.2).decision is Decision.WAIT
    assert judged(sums, SETTINGS, look=1, cost_ratio=float("nan")).decision is Decision.PROMOTE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"error": 0.0}, "error=0.0"),
        ({"min_requests": 2}, "min_requests=2"),
        ({"min_requests": 9, "max_requests": 8}, "min_requests=9, expected 3..max_requests=8"),
        ({"canary_share": 1.0}, "canary_share=1.0"),
    ],
)
def test_invalid_settings_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GateSettings(**changes)  # type: ignore[arg-type]


def test_break_even_is_where_saved_seconds_equal_the_update() -> None:
    count = break_even_verifications(
        update_seconds=6.0, round_seconds=0.05, old_length=2.0, new_length=2.5
    )
    saved = count * (2.5 / 2.0 - 1.0) * 0.05
    assert np.isclose(saved, 6.0)
    assert break_even_verifications(
        update_seconds=6.0, round_seconds=0.05, old_length=2.0, new_length=2.0
    ) == float("inf")


def test_seconds_of_a_round_are_drafting_and_one_verification() -> None:
    cost = CostModel(
        draft_seconds=np.array([0.0, 0.01]),
        score_seconds=np.zeros(2),
        verify_seconds=np.array([0.1, 0.11, 0.12]),
    )
    assert np.isclose(round_seconds(cost, 1, 2), 0.14)
