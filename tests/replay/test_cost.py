"""Measured costs are the means of what was measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from replay.cost import ENOUGH_ROUNDS, CostMeter
from replay.requests import RequestTrace, join_segments
from schemas.events import NO_DRAFTER
from tests.replay.synthetic import make_request


def timed(*, draft: float = 0.002, verify: float = 0.01, per_token: float = 0.001) -> RequestTrace:
    """Return a request whose rounds take exactly what they should, drafter 1 twice as long."""
    event = make_request(num_tokens=400, num_speculative_tokens=4)
    rounds = event.rounds
    drafted = rounds.num_draft_tokens.astype(np.float32)
    times = np.where(rounds.drafter_index == 1, 2, 1)
    changed = replace(
        rounds,
        draft_seconds=(drafted * draft * times).astype(np.float32),
        verify_seconds=(verify + per_token * drafted).astype(np.float32),
        score_seconds=np.full(drafted.size, 0.003, dtype=np.float32),
    )
    return join_segments([replace(event, rounds=changed)])


def test_seconds_are_per_drafted_token_per_verification_and_per_window() -> None:
    request = timed()
    meter = CostMeter()
    meter.add(request, np.arange(3))
    cost = meter.measured(4, 4)
    assert cost.draft_seconds[:3] == pytest.approx([0.002, 0.004, 0.002], rel=1e-5)
    assert np.isnan(cost.draft_seconds[3]), "a drafter that was never played"
    assert cost.verify_seconds == pytest.approx(0.01 + 0.001 * np.arange(5), rel=1e-5)
    total = 0.003 * request.rounds.first_position.size
    assert cost.score_seconds == pytest.approx(total / request.windows.start.size, rel=1e-5)


def test_sizes_that_were_rare_or_never_seen_lie_on_the_line() -> None:
    request = timed()
    assert np.bincount(request.rounds.num_draft_tokens)[3] < ENOUGH_ROUNDS
    meter = CostMeter()
    meter.add(request, np.arange(3))
    cost = meter.measured(3, 6)
    assert cost.verify_seconds[6] == pytest.approx(0.016, rel=1e-4)


def test_drafters_are_added_up_by_their_number_in_the_log() -> None:
    meter = CostMeter()
    meter.add(timed(), np.array([5, 0, 2]))
    meter.add(timed(draft=0.004), np.array([1, 0, 2]))
    cost = meter.measured(6, 4)
    assert cost.draft_seconds[[5, 1]] == pytest.approx([0.002, 0.004], rel=1e-5)
    assert 0.004 < cost.draft_seconds[0] < 0.008


def test_what_was_never_measured_is_not_a_number() -> None:
    cost = CostMeter().measured(2, 3)
    assert np.isnan(cost.draft_seconds).all()
    assert np.isnan(cost.verify_seconds).all()
    assert np.isnan(cost.score_seconds)


def test_rounds_without_drafter_cost_their_verification_alone() -> None:
    event = make_request(no_drafter_share=1.0)
    assert set(event.rounds.drafter_index) == {NO_DRAFTER}
    meter = CostMeter()
    meter.add(join_segments([event]), np.arange(3))
    cost = meter.measured(3, 4)
    assert np.isnan(cost.draft_seconds).all()
    assert cost.verify_seconds[0] == pytest.approx(0.04, rel=1e-5)
