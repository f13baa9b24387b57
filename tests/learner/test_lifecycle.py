"""A version's way to live and back, driven by events alone."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from learner.gate import GateSettings
from learner.lifecycle import ALLOWED, Lifecycle, Step, TransitionError, refuse_transition
from schemas.events import ReleaseState
from tests.learner.trials import HEAD, paired_event

DIRECT = GateSettings(min_requests=4, max_requests=32, canary_share=0.0)
WITH_CANARY = GateSettings(min_requests=4, max_requests=32, canary_share=0.5, min_canary_requests=3)
BETTER, EQUAL, WORSE = {1: 0.4, 2: 0.7}, {1: 0.5, 2: 0.5}, {1: 0.7, 2: 0.4}


def states(steps: Sequence[Step]) -> list[tuple[int, str]]:
    return [(step.version, step.state.value) for step in steps]


def on_trial(settings: GateSettings) -> Lifecycle:
    """Return the life of a drafter whose version 2 is on trial."""
    life = Lifecycle(HEAD, settings, live=1)
    assert states(life.offer(2, "trained")) == [(2, "candidate"), (2, "shadow")]
    return life


def play(
    life: Lifecycle, acceptance: dict[int, float], *, num_requests: int = 32, first: int = 0
) -> list[Step]:
    """Let workers follow the life's steps for so many requests; return the steps."""
    rng = np.random.default_rng(first)
    taken: list[Step] = []
    beside: int | None = 2 if life.candidate == 2 else 1
    is_canary = False
    for request in range(first, first + num_requests):
        own, other = life.live, beside
        if is_canary and request % 2 and other is not None:
            own, other = other, own
        event = paired_event(request, own=own, beside=other, acceptance=acceptance, rng=rng)
        for step in life.observe(event):
            taken.append(step)
            is_canary = step.state is ReleaseState.CANARY
            if step.state is ReleaseState.SHADOW:
                beside = step.version
            elif step.state in (ReleaseState.RETIRED, ReleaseState.ROLLED_BACK):
                beside = None
    return taken


def test_a_better_version_goes_live_and_its_predecessor_watches_it_for_a_while() -> None:
    life = on_trial(DIRECT)
    steps = play(life, BETTER, num_requests=80)
    assert states(steps) == [(2, "live"), (1, "shadow"), (1, "retired")]
    assert (life.live, life.previous, life.candidate) == (2, 1, None)
    evidence = steps[0].evidence
    assert evidence is not None
    assert evidence.difference_low > 0.0
    assert evidence.new_acceptance_length > evidence.old_acceptance_length
    assert "better: " in steps[0].reason


def test_with_a_canary_a_version_serves_a_share_before_all() -> None:
    life = on_trial(WITH_CANARY)
    steps = play(life, BETTER)
    assert states(steps)[:3] == [(2, "canary"), (2, "live"), (1, "shadow")]
    assert steps[1].reason.startswith("held as a canary for 3 requests; by stream: stream-a +")


def test_a_release_tells_what_its_training_took_and_when_that_is_paid_back() -> None:
    life = Lifecycle(HEAD, DIRECT, live=1)
    life.offer(2, "trained", update_seconds=2.5)
    (step, *_) = play(life, BETTER)
    found = re.search(r"; 2\.5 s of training are paid back after (\d+) verifications", step.reason)
    assert found, step.reason
    assert int(found[1]) > 0


@pytest.mark.parametrize("settings", [DIRECT, WITH_CANARY])
def test_a_worse_version_is_retired_without_having_served(settings: GateSettings) -> None:
    life = on_trial(settings)
    steps = play(life, WORSE)
    assert states(steps) == [(2, "retired")]
    assert "worse: " in steps[0].reason
    assert (life.live, life.is_open) == (1, True)


def test_an_equal_version_stays_in_the_shadow_and_gives_way_to_a_newer_one() -> None:
    life = on_trial(DIRECT)
    assert play(life, EQUAL, num_requests=3) == []
    assert not life.is_open
    assert play(life, EQUAL, num_requests=1, first=3) == []
    assert life.is_open
    assert states(life.offer(3, "trained")) == [(2, "retired"), (3, "candidate"), (3, "shadow")]


def test_versions_that_nothing_comes_of_get_longer_and_longer_trials() -> None:
    life = Lifecycle(HEAD, DIRECT, live=1)
    rng = np.random.default_rng(0)
    times = []
    for version in range(2, 8):
        life.offer(version, "trained")
        acceptance = {1: 0.5, version: 0.5}
        num_requests = 0
        while not life.is_open:
            event = paired_event(
                1000 * version + num_requests, own=1, beside=version, acceptance=acceptance, rng=rng
            )
            num_requests += 1
            if life.observe(event):
                break
        times.append(num_requests)
    assert times[:4] == [4, 8, 16, 32]
    assert max(times) == DIRECT.max_requests


def test_a_version_that_answers_nonsense_on_trial_is_withdrawn_at_once() -> None:
    life = on_trial(DIRECT)
    rng = np.random.default_rng(0)
    broken = {1: 0.5, 2: float("nan")}
    steps = life.observe(paired_event(0, own=1, beside=2, acceptance=broken, rng=rng))
    assert states(steps) == [(2, "retired")]
    assert steps[0].reason == "no usable answer in a request"


def test_a_canary_that_answers_nonsense_is_rolled_back() -> None:
    life = on_trial(WITH_CANARY)
    play(life, BETTER, num_requests=4)
    rng = np.random.default_rng(0)
    event = paired_event(9, own=2, beside=1, acceptance={1: 0.5, 2: float("nan")}, rng=rng)
    assert states(life.observe(event)) == [(2, "rolled_back")]
    assert life.live == 1


def test_a_live_version_that_turns_out_worse_is_rolled_back() -> None:
    """What was better on the traffic of the trial need not be on that of today."""
    life = on_trial(DIRECT)
    assert states(play(life, BETTER, num_requests=4)) == [(2, "live"), (1, "shadow")]
    steps = play(life, WORSE, num_requests=16, first=4)
    assert states(steps) == [(1, "live"), (2, "rolled_back")]
    assert (life.live, life.previous, life.is_open) == (1, None, True)
    assert steps[0].evidence is not None
    assert steps[0].evidence.difference_high < 0.0


def test_a_live_version_that_fails_again_and_again_is_rolled_back() -> None:
    life = on_trial(DIRECT)
    play(life, BETTER, num_requests=40)
    rng = np.random.default_rng(0)
    broken = {2: float("nan")}
    first = paired_event(50, own=2, beside=None, acceptance=broken, rng=rng)
    assert life.observe(first) == []
    again = paired_event(51, own=2, beside=None, acceptance=broken, rng=rng)
    assert states(life.observe(again)) == [(1, "live"), (2, "rolled_back")]


def test_no_newer_version_comes_before_the_live_one_was_compared_with_its_predecessor() -> None:
    life = on_trial(DIRECT)
    play(life, BETTER, num_requests=4)
    assert not life.is_open
    play(life, BETTER, num_requests=4, first=4)
    assert life.is_open
    assert states(life.offer(3, "trained"))[0] == (1, "retired")


@pytest.mark.parametrize(
    ("state", "version", "candidate"), [("shadow", 2, 2), ("canary", 2, 2), ("shadow", 0, None)]
)
def test_a_life_goes_on_from_what_was_published(
    state: str, version: int, candidate: int | None
) -> None:
    life = Lifecycle(HEAD, DIRECT, live=1, beside=(version, ReleaseState(state)))
    assert life.candidate == candidate
    assert life.previous == (None if candidate else 0)


def test_events_tell_which_worker_has_taken_up_a_version() -> None:
    life = on_trial(DIRECT)
    play(life, BETTER, num_requests=1)
    assert life.worker_to_version == {"worker-0": 1}
    play(life, BETTER, num_requests=5, first=1)
    assert life.worker_to_version == {"worker-0": 2}


def test_every_step_that_a_life_takes_is_one_that_versions_may_take() -> None:
    for settings in (DIRECT, WITH_CANARY):
        for acceptance in (BETTER, EQUAL, WORSE):
            life = on_trial(settings)
            version_to_state = {1: ReleaseState.LIVE, 2: ReleaseState.SHADOW}
            for step in play(life, acceptance, num_requests=60):
                old = version_to_state[step.version]
                refuse_transition(HEAD, step.version, old, step.state)
                version_to_state[step.version] = step.state


def test_invalid_transitions_are_refused_with_both_states() -> None:
    with pytest.raises(TransitionError, match="head version 3 is retired: it cannot become canary"):
        refuse_transition("head", 3, ReleaseState.RETIRED, ReleaseState.CANARY)
    assert ALLOWED.keys() == set(ReleaseState)
