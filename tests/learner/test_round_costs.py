"""A version's rounds cost what its events measured, noise aside."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from learner.round_costs import RoundCosts
from schemas.events import VerificationEvent
from tests.schemas.builders import make_event


def event(place: int, seconds_per_token: float, *, sequence: int) -> VerificationEvent:
    """Return an event whose rounds one drafter drafted at a price, verified in 1 s each."""
    made = make_event(sequence=sequence, num_windows=40, num_drafters=2)
    rounds = made.rounds
    size = len(rounds.first_position)
    has_drafter = rounds.drafter_index >= 0
    return replace(
        made,
        rounds=replace(
            rounds,
            drafter_index=np.where(has_drafter, place, -1).astype(rounds.drafter_index.dtype),
            draft_seconds=(rounds.num_draft_tokens * seconds_per_token).astype(np.float32),
            verify_seconds=np.ones(size, np.float32),
            score_seconds=np.zeros(size, np.float32),
        ),
    )


def costs(new: float, old: float, *, num_events: int = 12) -> RoundCosts:
    found = RoundCosts()
    for sequence in range(num_events):
        found.add(event(0, old, sequence=sequence), {1: 0, 2: 1})
        found.add(event(1, new, sequence=sequence), {1: 0, 2: 1})
    return found


def test_a_dearer_version_has_a_ratio_above_one() -> None:
    found = costs(0.5, 0.1)
    per_round = found.num_draft_tokens / found.num_rounds
    assert found.ratio(2, 1) == pytest.approx((1 + 0.5 * per_round) / (1 + 0.1 * per_round), 1e-4)
    assert found.ratio(1, 2) == pytest.approx(1 / found.ratio(2, 1), 1e-4)
    assert found.mean_round_seconds == pytest.approx(1 + 0.3 * per_round, 1e-4)


def test_noise_is_no_difference_and_little_tells_nothing() -> None:
    assert costs(0.101, 0.1).ratio(2, 1) == 1.0
    assert math.isnan(costs(0.5, 0.1, num_events=1).ratio(2, 1))
    assert math.isnan(RoundCosts().ratio(2, 1))
    assert math.isnan(RoundCosts().mean_round_seconds)
