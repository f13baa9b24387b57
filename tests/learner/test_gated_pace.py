"""Learning from nothing through the gate: how soon what was learned is served."""

from __future__ import annotations

import numpy as np
import pytest

from learner.gate import GateSettings
from learner.lifecycle import Lifecycle
from schemas.events import ReleaseState
from tests.learner.trials import HEAD, paired_event

LEARNED = 0.75
"""Acceptance of every level once the head has learned all there is."""


def rate(num_requests: int) -> float:
    """Return the acceptance of a head that has learned for so many requests: fast, then slower."""
    return float(LEARNED * (1.0 - np.exp(-num_requests / 15.0)))


def served_rates(settings: GateSettings, num_requests: int, *, seed: int) -> list[float]:
    """Return the acceptance of the live version at every request, canaries aside.

    Training goes on with every request, and a version is handed in as soon as the desk is open.
    """
    rng = np.random.default_rng(seed)
    life = Lifecycle(HEAD, settings, live=0)
    version_to_rate, beside, is_canary, newest = {0: 0.0}, None, False, 0
    found = []
    for request in range(num_requests):
        if life.is_open:
            newest += 1
            version_to_rate[newest] = rate(request)
            life.offer(newest, "trained")
            beside, is_canary = newest, False
        own, other = life.live, beside
        if is_canary and other is not None and rng.random() < settings.canary_share:
            own, other = other, own
        found.append(version_to_rate[life.live])
        event = paired_event(request, own=own, beside=other, acceptance=version_to_rate, rng=rng)
        for step in life.observe(event):
            is_canary = step.state is ReleaseState.CANARY
            if step.state is ReleaseState.SHADOW:
                beside = step.version
            elif step.state in (ReleaseState.RETIRED, ReleaseState.ROLLED_BACK):
                beside = None
    return found


def requests_to(level: float, rates: list[float]) -> int:
    return next((n for n, one in enumerate(rates) if one >= level), len(rates))


@pytest.mark.parametrize("seed", range(3))
def test_what_was_learned_from_nothing_is_served_within_few_requests(seed: int) -> None:
    """Without a gate two thirds of the level are served after 17 requests, nine tenths after 35."""
    rates = served_rates(GateSettings(), 100, seed=seed)
    assert requests_to(2 / 3 * LEARNED, rates) <= 50
    assert requests_to(0.9 * LEARNED, rates) <= 60
