"""Arms on their way: packed, logged and unpacked they are the same."""

from __future__ import annotations

import numpy as np
import pytest

from learner.arm_learner import ArmLearner
from learner.arm_selector import ArmSelector, packed_arms, unpacked_arms
from learner.selection import DEFAULT_POLICY, parse_policy
from schemas.events import NO_DRAFTER
from tests.learner.token_traces import flat_costs

SPEC = parse_policy(f"{DEFAULT_POLICY}:objective=seconds")
ALL = np.ones(3, dtype=np.bool_)


def taught(num_windows: int = 30) -> ArmLearner:
    """Return a learner of three drafters with K up to 4, of which the second is right."""
    learner = ArmLearner(SPEC, flat_costs([0.01, 0.02, 0.3], 4, slope=0.05, scoring=0.01))
    scores = np.tile([0.1, 0.9, 0.5], (num_windows, 4, 1))
    learner.learn(scores, scores, np.full(num_windows, 4), np.arange(5, 5 + num_windows))
    learner.end_round(3, 2)
    return learner


def test_a_state_survives_packing_bit_for_bit() -> None:
    learner = taught()
    table, numbers = packed_arms(learner)
    assert table.size % 3 == 0
    found = unpacked_arms(SPEC, table, numbers, 3, 4)
    for name, values in learner.state().items():
        np.testing.assert_array_equal(values, found.state()[name])
    np.testing.assert_array_equal(learner.seconds, found.seconds)
    np.testing.assert_array_equal(learner.scale, found.scale)


def test_invalid_states_are_refused_with_their_sizes() -> None:
    table, numbers = packed_arms(taught())
    with pytest.raises(ValueError, match=f"{table.size} and {numbers.size} values"):
        unpacked_arms(SPEC, table, numbers, 2, 4)


def test_a_decision_is_an_arm_and_following_it_finds_the_same() -> None:
    selector, follower = ArmSelector(taught()), ArmSelector(taught())
    rng = np.random.default_rng(0)
    for _ in range(5):
        decision = selector.decide(ALL, rng)
        found, chances = follower.follow(ALL, decision.drafter_index)
        assert chances.sum() == pytest.approx(1.0)
        assert found.num_speculative_tokens == decision.num_speculative_tokens
        assert found.probability == decision.probability
        assert found.score_probability == decision.score_probability
        for one, made in ((selector, decision), (follower, found)):
            one.end_round(made, made.num_speculative_tokens, 1, 2)


def test_asleep_drafters_are_never_decided_on() -> None:
    selector = ArmSelector(taught())
    decision = selector.decide(np.array([True, False, False]), np.random.default_rng(0))
    assert decision.drafter_index in (0, NO_DRAFTER)


def test_windows_without_their_starts_are_refused() -> None:
    scores = np.zeros((1, 4, 3), np.float16)
    with pytest.raises(ValueError, match="without their starts"):
        ArmSelector(taught()).learn(scores, scores, np.array([4], np.int16))
