"""A policy's state travels without loss, and pools may change on the way."""

from __future__ import annotations

import numpy as np
import pytest

from learner.carried import NEWCOMER_SHARE, copied, over_pool, packed, unpacked
from learner.selection import CompiledPolicy, parse_policy, policy_names

IDS = ["a", "b", "c"]


def experienced(name: str, num_drafters: int = 3) -> CompiledPolicy:
    """Return a policy that has seen the first drafter do well."""
    policy = parse_policy(name).build(num_drafters)
    losses = np.random.default_rng(0).random((50, num_drafters))
    losses[:, 0] *= 0.2
    policy.learn_windows(losses)
    return policy


def goes_on_alike(one: CompiledPolicy, other: CompiledPolicy) -> bool:
    """Learn the same further windows with both and compare every bit."""
    losses = np.random.default_rng(1).random((5, one.num_drafters))
    after = [policy.learn_windows(losses) for policy in (one, other)]
    return np.array_equal(after[0], after[1]) and np.array_equal(one.table, other.table)


@pytest.mark.parametrize("name", policy_names())
def test_a_state_that_travelled_goes_on_bit_for_bit(name: str) -> None:
    policy = experienced(name)
    table, numbers = packed(policy)
    assert (table.ndim, numbers.ndim) == (1, 1)
    assert goes_on_alike(policy, unpacked(parse_policy(name), table, numbers, 3))


@pytest.mark.parametrize("name", policy_names())
def test_over_the_same_pool_nothing_changes_and_the_copy_is_apart(name: str) -> None:
    policy = experienced(name)
    before = policy.table.copy()
    same = over_pool(policy, IDS, IDS)
    assert np.array_equal(same.table, before)
    same.learn_windows(np.random.default_rng(2).random((3, 3)))
    assert np.array_equal(policy.table, before)
    assert goes_on_alike(copied(policy), policy)


@pytest.mark.parametrize("name", ["ada_normal_hedge_grid", "fixed_share"])
def test_in_another_order_every_drafter_keeps_its_chance(name: str) -> None:
    policy = experienced(name)
    moved = over_pool(policy, IDS, ["c", "a", "b"])
    np.testing.assert_allclose(moved.probabilities(), policy.probabilities()[[2, 0, 1]])


def test_newcomers_share_what_is_set_aside_and_those_who_left_take_nothing() -> None:
    policy = experienced("fixed_share")
    found = over_pool(policy, IDS, ["x", "b", "a", "y"]).probabilities()
    np.testing.assert_allclose(found[[0, 3]], NEWCOMER_SHARE / 2)
    _, b, c = policy.probabilities()
    kept = (1 - NEWCOMER_SHARE) / (1 - c)
    assert found[1] == pytest.approx(b * kept)
    assert found.sum() == pytest.approx(1.0)


def test_no_policy_travels_as_nothing() -> None:
    assert [array.size for array in packed(None)] == [0, 0]


def test_invalid_states_of_other_shapes_are_refused_with_both() -> None:
    spec = parse_policy("fixed_share")
    table, numbers = packed(experienced("fixed_share"))
    with pytest.raises(ValueError, match="state of 'fixed_share' has 5 values, expected rows of 3"):
        unpacked(spec, table[:5], numbers, 3)
    with pytest.raises(ValueError, match=r"table of shape \(6, 1\)"):
        unpacked(spec, table, numbers, 1)
    with pytest.raises(ValueError, match="carries no state"):
        unpacked(parse_policy("fixed:a"), table, numbers, 3)
