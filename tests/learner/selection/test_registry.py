"""Names, specifications and states become policies, or a refusal that lists what is known."""

from __future__ import annotations

import numpy as np
import pytest

from learner.selection import (
    DEFAULT_POLICY,
    PolicyState,
    parse_policy,
    policy_from_name,
    policy_from_state,
    policy_names,
)


def test_a_fixed_policy_is_found_by_drafter_id_or_by_index() -> None:
    by_id = policy_from_name("fixed:code", 2, drafter_ids=["lookup", "code"])
    by_index = policy_from_name("fixed:1", 2)
    np.testing.assert_array_equal(by_id.probabilities(), [0.0, 1.0])
    np.testing.assert_array_equal(by_index.probabilities(), [0.0, 1.0])


def test_a_fixed_policy_stays() -> None:
    policy = policy_from_name("fixed:0", 2)
    policy.learn_windows(np.tile([1.0, 0.0], (100, 1)))
    np.testing.assert_array_equal(policy.probabilities(), [1.0, 0.0])


@pytest.mark.parametrize("name", (*policy_names(), "fixed:0"))
def test_a_specification_reads_back_what_it_writes(name: str) -> None:
    assert str(parse_policy(name)) == name
    assert parse_policy(str(parse_policy(name))) == parse_policy(name)


def test_options_and_parameters_are_read_and_defaults_left_out() -> None:
    text = "fixed_share:share=0.02,learning_rate=1.0,scope=request,choice=argmax"
    spec = parse_policy(text)
    assert (spec.scope, spec.choice, spec.loss) == ("request", "argmax", "first")
    assert str(spec) == "fixed_share:share=0.02,scope=request"
    assert parse_policy(str(spec)) == spec
    np.testing.assert_array_equal(spec.build(2).numbers, [1.0, 0.02])


def test_policies_that_need_the_number_of_tokens_are_told() -> None:
    for name in ("exp3spec", "ucbspec"):
        told = parse_policy(name).build(3, num_speculative_tokens=4)
        written = parse_policy(f"{name}:num_speculative_tokens=4").build(3)
        np.testing.assert_array_equal(told.numbers, written.numbers)
    assert parse_policy("hedge").build(3, num_speculative_tokens=4).num_drafters == 3


def test_the_default_tracks_along_the_stream() -> None:
    spec = parse_policy(DEFAULT_POLICY)
    assert (spec.scope, spec.choice, spec.loss) == ("stream", "argmax", "first")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hegde", r"unknown policy 'hegde', expected one of: fixed:<drafter>, .*hedge, .*normal_h"),
        ("hedge:rate=1", r"'hedge:rate=1': unknown key 'rate', .*: learning_rate, scope, choice"),
        ("hedge:learning_rate=x", r"learning_rate='x' is no number"),
        ("hedge:scope=tenant", r"scope='tenant', expected request or stream or both"),
        ("hedge:choice", r"choice='', expected sample or argmax or sticky"),
        ("fixed_share:share=1", r"policy 'fixed_share': share=1\.0 outside \(0, 1"),
        ("fixed_share:learning_rate=nan", r"learning_rate=nan outside"),
        ("hedge:learning_rate=-1", r"'hedge': learning_rate=-1\.0, expected >= 0"),
        ("ada_normal_hedge_grid:memory=0", r"memory=0\.0 outside \(0, 1\]"),
        ("discounted_follow_the_leader:discount=1.5", r"discount=1\.5 outside \(0, 1\]"),
    ],
)
def test_invalid_specification_says_what_is_known(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_policy(text)


def test_invalid_fixed_drafter_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'fixed:maths' names no drafter.*: lookup, code"):
        policy_from_name("fixed:maths", 2, drafter_ids=["lookup", "code"])


def test_invalid_state_lists_the_known_policies() -> None:
    with pytest.raises(ValueError, match=r"'oracle'.*fixed, .*hedge, .*normal_hedge"):
        policy_from_state(PolicyState(name="oracle", version=1, arrays={}))


def test_an_objective_of_seconds_is_read_and_written() -> None:
    text = "ada_normal_hedge_grid:objective=seconds"
    assert parse_policy(text).objective == "seconds"
    assert str(parse_policy(text)) == text
    assert parse_policy("ada_normal_hedge_grid").objective == "tokens"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("exp3spec:scope=stream,objective=seconds", "learns rounds alone"),
        ("hedge:objective=seconds", "expected scope=stream"),
        ("hedge:objective=money", "objective='money'"),
        ("ada_normal_hedge_grid:scope=both,objective=seconds", "expected scope=stream"),
    ],
)
def test_invalid_objectives_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_policy(text)


@pytest.mark.parametrize("name", ["ada_normal_hedge_grid", "fixed_share", "mixing_past_posteriors"])
def test_a_policy_of_beliefs_moves_towards_others_and_stays_a_distribution(name: str) -> None:
    spec = parse_policy(f"{name}:scope=both")
    assert str(spec) == f"{name}:scope=both"
    policy = spec.build(3)
    policy.learn_windows(np.tile([0.1, 0.9, 0.9], (20, 1)))
    before = policy.probabilities()
    policy.move_towards(np.array([0.0, 0.0, 1.0]), 0.4)
    np.testing.assert_allclose(policy.probabilities(), 0.6 * before + [0.0, 0.0, 0.4])
    np.testing.assert_allclose(policy.table.sum(axis=1), 1.0)
    policy.learn_windows(np.tile([0.9, 0.9, 0.1], (30, 1)))
    assert policy.probabilities().argmax() == 2


def test_invalid_scope_both_names_the_policies_that_can() -> None:
    able = "ada_normal_hedge_grid, fixed_share, mixing_past_posteriors"
    with pytest.raises(ValueError, match=f"'hedge:scope=both': .* possible with: {able}"):
        parse_policy("hedge:scope=both")
