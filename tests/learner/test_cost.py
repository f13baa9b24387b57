"""Seconds per drafted token, per verification and per scored window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from learner.cost import CostSums
from schemas.events import NO_DRAFTER, Rounds, VerificationEvent
from tests.schemas.builders import make_event


def event_of(
    *, drafter: list[int], drafted: list[int], draft_seconds: list[float], num_windows: int = 4
) -> VerificationEvent:
    """Build an event of rounds that accept nothing; verifying takes 1 s + 0.1 s per row."""
    rows = np.array(drafted) + 1
    count = len(drafted)
    event = make_event(
        num_windows=0, num_drafters=2, num_speculative_tokens=4, acceptance_probability=0.0
    )
    rounds = Rounds(
        first_position=(5 + np.arange(count)).astype(np.int32),
        drafter_index=np.array(drafter, np.int16),
        num_draft_tokens=np.array(drafted, np.int16),
        num_accepted_tokens=np.zeros(count, np.int16),
        num_emitted_tokens=np.ones(count, np.int16),
        num_scored_windows=np.zeros(count, np.int16),
        selection_probability=np.ones(count, np.float32),
        draft_seconds=np.array(draft_seconds, np.float32),
        verify_seconds=(1 + 0.1 * rows).astype(np.float32),
        score_seconds=np.full(count, 0.5, np.float32),
    )
    windows = make_event(num_windows=num_windows, num_drafters=2).windows
    empty = replace(event, rounds=rounds, num_positions=count, windows=event.windows)
    return replace(empty, windows=windows) if num_windows else empty


BOTH = np.array([0, 1])


def learned(event: VerificationEvent, positions: list[int], num_drafters: int) -> CostSums:
    sums = CostSums.empty().with_new(num_drafters)
    return sums.learned(event, np.array(positions), decay=0.5)


def test_costs_are_ratios_of_sums_and_unmeasured_ones_are_nan() -> None:
    event = event_of(
        drafter=[0, 0, NO_DRAFTER, 0, 0, 0, 0],
        drafted=[4, 2, 0, 0, 4, 4, 4],
        draft_seconds=[0.4, 0.1, 0.0, 0.3, 0.4, 0.4, 0.4],
    )
    cost = learned(event, [0, 1], 2).model()
    assert cost.draft_seconds[0] == pytest.approx(2.0 / 18)
    assert np.isnan(cost.draft_seconds[1])
    np.testing.assert_allclose(cost.verify_seconds[[0, 2, 4]], [1.1, 1.3, 1.5], rtol=1e-6)
    assert np.isnan(cost.verify_seconds[[1, 3]]).all()
    np.testing.assert_allclose(cost.score_seconds, 7 * 0.5 / (4 * 2))


def test_costs_stand_at_the_learners_positions_without_orphans() -> None:
    event = event_of(drafter=[0, 1, 1, 1, 1, 1, 1], drafted=[2] * 7, draft_seconds=[0.2] * 7)
    cost = learned(event, [-1, 2], 3).model()
    np.testing.assert_allclose(cost.draft_seconds, [np.nan, np.nan, 0.1], rtol=1e-6)


def test_old_costs_fade() -> None:
    slow = event_of(drafter=[0] * 7, drafted=[1] * 7, draft_seconds=[3.0] * 7)
    fast = event_of(drafter=[0] * 7, drafted=[1] * 7, draft_seconds=[0.0] * 7)
    sums = learned(slow, [0, 1], 2).learned(fast, BOTH, decay=0.5)
    assert sums.model().draft_seconds[0] == pytest.approx(1.0)


def test_a_longer_draft_later_extends_the_verification_costs() -> None:
    short = make_event(num_speculative_tokens=2, num_drafters=2)
    long = make_event(num_speculative_tokens=6, num_drafters=2, sequence=1)
    sums = learned(short, [0, 1], 2).learned(long, BOTH, decay=0.5)
    assert sums.num_speculative_tokens == 6
    again = sums.learned(short, BOTH, decay=0.5)
    assert again.num_speculative_tokens == 6
    assert again.num_verifications.sum() > short.rounds.num_draft_tokens.size


def test_an_event_without_scoring_leaves_its_cost_unknown() -> None:
    event = event_of(drafter=[0], drafted=[1], draft_seconds=[0.1], num_windows=0)
    assert np.isnan(learned(event, [0, 1], 2).model().score_seconds).all()


def test_forgotten_sums_are_unknown_rather_than_a_ratio_of_rounding() -> None:
    sums = learned(make_event(num_drafters=2), [0, 1], 2)
    idle = event_of(drafter=[NO_DRAFTER], drafted=[0], draft_seconds=[0.0], num_windows=0)
    for _ in range(1200):
        sums = sums.learned(idle, BOTH, decay=0.5)
    assert np.isnan(sums.model().draft_seconds).all()


def test_reading_the_prompt_is_not_the_cost_of_a_round_without_draft() -> None:
    event = event_of(
        drafter=[NO_DRAFTER] * 4, drafted=[0] * 4, draft_seconds=[0.0] * 4, num_windows=0
    )
    seconds = np.array([90.0, 1.0, 1.0, 1.0], np.float32)
    first = int(event.rounds.first_position[0])
    event = replace(
        event, rounds=replace(event.rounds, verify_seconds=seconds), num_prompt_tokens=first
    )
    assert learned(event, [0, 1], 2).model().verify_seconds[0] == pytest.approx(1.0)
