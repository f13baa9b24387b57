"""Names and states become policies, or a refusal that lists what is known."""

from __future__ import annotations

import numpy as np
import pytest

from learner.selection import PolicyState, policy_from_name, policy_from_state


def test_a_fixed_policy_is_found_by_drafter_id_or_by_index() -> None:
    by_id = policy_from_name("fixed:code", 2, drafter_ids=["lookup", "code"])
    by_index = policy_from_name("fixed:1", 2)
    np.testing.assert_array_equal(by_id.probabilities(), [0.0, 1.0])
    np.testing.assert_array_equal(by_index.probabilities(), [0.0, 1.0])


def test_a_fixed_policy_stays() -> None:
    policy = policy_from_name("fixed:0", 2)
    for _ in range(100):
        policy.learn(np.array([1.0, 0.0]))
    np.testing.assert_array_equal(policy.probabilities(), [1.0, 0.0])


def test_invalid_policy_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'hegde'.*fixed:<drafter>, hedge, normal_hedge"):
        policy_from_name("hegde", 3)


def test_invalid_fixed_drafter_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fixed:maths' names no drafter.*: lookup, code"):
        policy_from_name("fixed:maths", 2, drafter_ids=["lookup", "code"])


def test_invalid_state_lists_the_known_policies() -> None:
    with pytest.raises(ValueError, match=r"'oracle'.*fixed, hedge, normal_hedge"):
        policy_from_state(PolicyState(name="oracle", version=1, arrays={}))
