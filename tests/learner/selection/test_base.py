"""Drafters that come, go and sleep, under every policy."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection import CompiledPolicy, policy_from_name
from learner.selection.fixed import Fixed
from tests.learner.selection.teaching import (
    BANDITS,
    FORGETFUL,
    FULL_INFORMATION,
    feedback,
    make,
    taught,
)

EVERY_LEARNER = (*FULL_INFORMATION, *BANDITS)
LEADERS = ("discounted_follow_the_leader", "follow_the_leader")
"""A newcomer ties with their leader, so that the prior decides."""

SLOW = ("hedge", "squint")
"""Their newcomers rise at a rate that has fallen with the windows so far."""

SHARE = 0.05


@pytest.fixture
def losses() -> NDArray[np.float64]:
    """Drafter 2 is the best of four."""
    losses = np.random.default_rng(0).random((300, 4))
    losses[:, 2] *= 0.6
    return losses


def assert_distribution(policy: CompiledPolicy) -> None:
    for row in policy.table[:2]:
        assert np.all(row >= 0.0)
        assert abs(row.sum() - 1.0) < 1e-12
    assert np.all(policy.table[1] > 0.0)


@pytest.mark.parametrize("name", EVERY_LEARNER)
@pytest.mark.parametrize("seed", range(8))
def test_any_pool_after_any_other_leaves_a_distribution_that_learns(name: str, seed: int) -> None:
    generator = np.random.default_rng(seed)
    policy = make(name, 4)
    for turn in range(12):
        taught(
            policy, generator.random((int(generator.integers(0, 30)), policy.num_drafters)), turn
        )
        kept = generator.permutation(policy.num_drafters)
        kept = kept[: generator.integers(0, len(kept) + 1)]
        places = np.concatenate([kept, np.full(generator.integers(0, 4), -1)])
        if len(places):
            policy = policy.with_drafters(generator.permutation(places).tolist(), share=SHARE)
            assert policy.num_drafters == len(places)
            assert_distribution(policy)
    taught(policy, generator.random((20, policy.num_drafters)))
    assert_distribution(policy)


@pytest.mark.parametrize("name", EVERY_LEARNER)
def test_the_same_pool_goes_on_as_before_and_the_old_policy_is_left_alone(
    name: str, losses: NDArray[np.float64]
) -> None:
    policy = taught(make(name), losses)
    before = policy.probabilities()
    same = policy.with_drafters([0, 1, 2, 3], share=SHARE)
    np.testing.assert_allclose(same.table, policy.table, atol=1e-12)
    taught(same, losses)
    np.testing.assert_array_equal(policy.probabilities(), before)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_another_order_is_the_same_pool(name: str, losses: NDArray[np.float64]) -> None:
    order = [2, 0, 3, 1]
    policy = taught(make(name), losses)
    other = policy.with_drafters(order, share=SHARE)
    np.testing.assert_allclose(other.table[0], policy.table[0][order], atol=1e-12)
    taught(policy, losses)
    taught(other, losses[:, order])
    np.testing.assert_allclose(other.table[0], policy.table[0][order], atol=1e-9)


@pytest.mark.parametrize("name", (*FULL_INFORMATION, "exp3spec"))
def test_a_newcomer_enters_with_its_share_and_the_others_keep_their_ratios(
    name: str, losses: NDArray[np.float64]
) -> None:
    policy = taught(make(name), losses)
    before = policy.probabilities()
    after = policy.with_drafters([0, 1, -1, 2, 3], share=SHARE).probabilities()
    if name in LEADERS:
        np.testing.assert_allclose(after[[2, 3]], np.array([0.05, 0.2375]) / 0.2875)
        return
    assert after[2] == pytest.approx(SHARE)
    np.testing.assert_allclose(after[[0, 1, 3, 4]], (1.0 - SHARE) * before, atol=1e-12)


@pytest.mark.parametrize("name", ["ucb", "ucbspec", "metasd_ucb"])
def test_an_index_policy_plays_a_newcomer_at_once(name: str, losses: NDArray[np.float64]) -> None:
    policy = taught(make(name), losses).with_drafters([0, -1, 1, 2, 3], share=SHARE)
    np.testing.assert_array_equal(policy.probabilities(), [0.0, 1.0, 0.0, 0.0, 0.0])
    policy.learn_round(feedback(1, 1.0))
    policy.learn_round(feedback(1, 1.0))
    assert policy.table[2, 1] == 2.0


@pytest.mark.parametrize("name", ["fixed_share", "hedge", "mixing_past_posteriors"])
def test_the_share_of_a_newcomer_lasts_while_all_do_alike(
    name: str, losses: NDArray[np.float64]
) -> None:
    policy = taught(make(name), losses).with_drafters([0, 1, 2, 3, -1], share=SHARE)
    policy.learn_windows(np.full((20, 5), 0.4))
    assert policy.probabilities()[4] == pytest.approx(SHARE, rel=0.05)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_a_better_newcomer_leads_within_a_few_windows(
    name: str, losses: NDArray[np.float64]
) -> None:
    """Mean losses 0.1 against 0.3, after 300 windows without it: 20 windows, or 100."""
    policy = taught(make(name), losses).with_drafters([0, 1, 2, -1, 3], share=SHARE)
    later = np.random.default_rng(1).random((1000, 5))
    later[:, 2] *= 0.6
    later[:, 3] *= 0.2
    leading = policy.learn_windows(later).argmax(axis=1)
    assert np.all(leading[100 if name in SLOW else 20 :] == 3)


@pytest.mark.parametrize("name", BANDITS)
def test_a_better_newcomer_is_found_by_bandits(name: str) -> None:
    """Thousands of rounds for EXP3, whose estimates of the others stand."""
    means = np.array([0.8, 0.9, 0.7])
    generator = np.random.default_rng(0)
    policy = taught(make(name, 3), np.tile(means, (200, 1))).with_drafters(
        [0, 1, 2, -1], share=0.05
    )
    played = np.zeros(4)
    for _ in range(4000):
        index = int(generator.choice(4, p=policy.probabilities()))
        played[index] += 1
        loss = [*means, 0.1][index]
        policy.learn_round(feedback(index, loss, policy.probabilities()[index]))
    assert np.argmax(played) == 3


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_the_leader_leaves_cleanly(name: str, losses: NDArray[np.float64]) -> None:
    """What stays keeps its ratios, and where all mass left, the next best leads."""
    losses[:, 1] *= 0.5
    losses[:, 2] *= 0.5
    policy = taught(make(name), losses)
    before = policy.probabilities()[[0, 1, 3]]
    without = policy.with_drafters([0, 1, 3], share=SHARE)
    assert_distribution(without)
    if before.sum() > 0.0:
        # The learners of the grid share what left each for itself.
        tolerance = 0.05 if name == "ada_normal_hedge_grid" else 1e-9
        np.testing.assert_allclose(without.table[0], before / before.sum(), atol=tolerance)
    without.learn_windows(losses[:100][:, [0, 1, 3]])
    assert np.argmax(without.probabilities()) == 1


@pytest.mark.parametrize("name", EVERY_LEARNER)
def test_a_drafter_that_returns_begins_afresh(name: str, losses: NDArray[np.float64]) -> None:
    """Leaving and returning is the same as another drafter in its place."""
    policy = taught(make(name), losses)
    without = policy.with_drafters([0, 1, 3], share=SHARE)
    returned = without.with_drafters([0, 1, -1, 2], share=SHARE)
    replaced = policy.with_drafters([0, 1, -1, 3], share=SHARE)
    np.testing.assert_allclose(returned.probabilities(), replaced.probabilities(), atol=1e-9)


@pytest.mark.parametrize("name", EVERY_LEARNER)
def test_a_pool_of_newcomers_alone_is_uniform(name: str, losses: NDArray[np.float64]) -> None:
    policy = taught(make(name), losses).with_drafters([-1, -1], share=SHARE)
    np.testing.assert_allclose(policy.probabilities(), [0.5, 0.5])


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_a_sleeper_is_charged_what_the_awake_lost(name: str, losses: NDArray[np.float64]) -> None:
    asleep, charged = taught(make(name), losses[:50]), taught(make(name), losses[:50])
    weights = asleep.probabilities()[[0, 1, 3]]
    if weights.sum() == 0.0:
        weights = np.ones(3)
    charge = float(weights @ losses[50, [0, 1, 3]] / weights.sum())
    window = losses[50].copy()
    window[2] = charge
    charged.learn(window)
    window[2] = np.nan
    asleep.learn(window)
    np.testing.assert_allclose(asleep.table, charged.table, atol=1e-12)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_sleeping_moves_no_relative_weight_while_the_awake_do_alike(name: str) -> None:
    prior = [0.4, 0.3, 0.2, 0.1]
    windows = np.full((200, 4), 0.4)
    windows[:, 0] = np.nan
    policy = taught(make(name, 4, prior), windows)
    np.testing.assert_allclose(policy.probabilities(), prior, atol=1e-9)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_a_sleeper_never_rises_against_the_best_of_the_awake(
    name: str, losses: NDArray[np.float64]
) -> None:
    windows = losses.copy()
    windows[:, 0] = np.nan
    policy = taught(make(name), windows)
    probabilities = policy.probabilities()
    assert probabilities[2] > 0.5
    assert probabilities[0] <= probabilities[2]


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_windows_in_which_all_sleep_change_nothing_but_what_forgetting_does(
    name: str, losses: NDArray[np.float64]
) -> None:
    policy = taught(make(name), losses)
    leader = int(np.argmax(policy.probabilities()))
    policy.learn_windows(np.full((5, 4), np.nan))
    after = policy.probabilities()
    assert int(np.argmax(after)) == leader
    if name not in FORGETFUL:
        assert after[leader] > 0.99 * taught(make(name), losses).probabilities()[leader]


def test_a_fixed_policy_stays_with_its_drafter_in_another_pool() -> None:
    moved = policy_from_name("fixed:1", 3).with_drafters([2, -1, 1], share=SHARE)
    assert isinstance(moved, Fixed)
    np.testing.assert_array_equal(moved.probabilities(), [0.0, 0.0, 1.0])
    with pytest.raises(ValueError, match="its drafter 1 left"):
        policy_from_name("fixed:1", 3).with_drafters([0, 2], share=SHARE)


@pytest.mark.parametrize(
    ("places", "share", "message"),
    [
        ([], 0.1, "the new pool has no drafter"),
        ([0, 4], 0.1, r"places=\[0, 4\], expected each of 0\.\.3 once"),
        ([1, 1], 0.1, r"places=\[1, 1\], expected each of 0\.\.3 once"),
        ([0, -1], 0.0, r"share=0\.0 outside \(0, 1\)"),
        ([0, -1], 1.0, r"share=1\.0 outside \(0, 1\)"),
    ],
)
def test_invalid_pools_are_refused(places: list[int], share: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("hedge").with_drafters(places, share=share)
