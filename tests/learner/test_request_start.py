"""Experts before a request: whoever was right at the starts before is followed."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.request_start import ROUTER, SHARED, STREAM, UNIFORM, MixedStart, StartExperts
from learner.selection import CompiledPolicy, parse_policy

SPEC = parse_policy("ada_normal_hedge_grid:scope=both")
IDS = ("a", "b", "c")
EQUAL = np.full(3, 1 / 3)


def windows(best: int, count: int = 30) -> NDArray[np.float64]:
    return np.tile(np.where(np.arange(3) == best, 0.1, 0.8), (count, 1))


def served(
    experts: StartExperts,
    carried: CompiledPolicy | None,
    best: int,
    *,
    shared: NDArray[np.float64] = EQUAL,
    prompt: list[int] | None = None,
) -> MixedStart:
    """Serve a request that one drafter is best in, and teach the experts."""
    start = experts.start(IDS, carried, shared, prompt or [])
    losses = windows(best)
    start.policy.learn_windows(losses)
    experts.learned(start, losses)
    return start


def test_all_are_trusted_alike_at_first_and_a_new_stream_starts_from_their_mean() -> None:
    shared = np.array([0.8, 0.1, 0.1])
    start = StartExperts(SPEC).start(IDS, None, shared, [1, 2])
    np.testing.assert_allclose(start.prior, 0.5 * shared + 0.5 / 3)
    np.testing.assert_allclose(start.policy.probabilities(), start.prior)


def test_a_carried_state_is_moved_and_not_changed() -> None:
    carried = SPEC.build(3)
    carried.learn_windows(windows(1))
    before = carried.table.copy()
    start = StartExperts(SPEC).start(IDS, carried, EQUAL, [])
    np.testing.assert_array_equal(carried.table, before)
    np.testing.assert_allclose(start.policy.probabilities(), start.prior)
    np.testing.assert_allclose(start.prior, 0.25 * before[0] + 0.75 * EQUAL)
    np.testing.assert_allclose(start.policy.table.sum(axis=1), 1.0)


def test_where_streams_go_on_as_they_were_the_state_is_kept() -> None:
    experts, carried = StartExperts(SPEC), None
    for _ in range(20):
        carried = served(experts, carried, 2).policy
    assert experts.mixture.weights[STREAM] > 0.45
    assert experts.mixture.weights[UNIFORM] < 0.01
    assert experts.start(IDS, carried, EQUAL, []).prior[2] > 0.9


def test_where_prompts_tell_the_text_the_router_is_followed() -> None:
    experts, carried = StartExperts(SPEC), None
    for turn in range(40):
        carried = served(experts, carried, turn % 3, prompt=[turn % 3] * 9).policy
    assert experts.mixture.weights.argmax() == ROUTER
    assert experts.start(IDS, carried, EQUAL, [1] * 9).prior[1] > 0.8


def test_where_prompts_mislead_the_router_is_not_followed() -> None:
    dice, experts, carried = np.random.default_rng(0), StartExperts(SPEC), None
    for turn in range(60):
        prompt = [int(dice.integers(3))] * 9
        carried = served(experts, carried, turn // 20, prompt=prompt).policy
    assert experts.mixture.weights.argmax() == STREAM


def test_where_the_domain_is_right_about_new_streams_it_is_followed() -> None:
    experts = StartExperts(SPEC)
    for turn in range(20):
        shared = np.where(np.arange(3) == turn % 3, 0.9, 0.05)
        served(experts, None, turn % 3, shared=shared)
    assert experts.mixture.weights[SHARED] > 0.45
    assert experts.start(IDS, None, np.array([0.05, 0.9, 0.05]), []).prior[1] > 0.85


def test_drafters_may_join_and_change_places() -> None:
    experts = StartExperts(SPEC)
    for turn in range(30):
        served(experts, None, turn % 2, prompt=[turn % 2] * 9)
    pool = ("new", "b", "a")
    start = experts.start(pool, None, EQUAL, [1] * 9)
    assert start.priors[ROUTER].argmax() == 1
    assert start.priors[ROUTER].sum() == pytest.approx(1.0)
    assert start.priors[ROUTER].min() > 0.0


def test_a_request_without_windows_teaches_nothing() -> None:
    experts = StartExperts(SPEC)
    before = experts.mixture
    experts.learned(experts.start(IDS, None, EQUAL, [1]), np.empty((0, 3)))
    assert experts.mixture is before
