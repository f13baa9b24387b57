"""The pool of learners for late feedback: who plays when, its bound, and what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from learner.selection import policy_from_name
from learner.selection.bold import BoldPool
from tests.learner.selection.play import Play, in_time, late, play_windows
from tests.learner.selection.teaching import BANDITS, FULL_INFORMATION, feedback


def played_by_pool(name: str, losses: np.ndarray, delay: int, seed: int = 0) -> Play:
    """Every round is one decision, whose feedback arrives ``delay`` rounds late."""
    num_rounds, num_drafters = losses.shape
    pool = BoldPool(lambda: policy_from_name(name, num_drafters))
    generator = np.random.default_rng(seed)
    probabilities, drawn = np.empty_like(losses), np.zeros(num_rounds, dtype=np.int64)
    for turn in range(num_rounds):
        probabilities[turn] = pool.choose(str(turn))
        drawn[turn] = generator.choice(num_drafters, p=probabilities[turn])
        told = turn - delay
        if told >= 0 and name in BANDITS:
            index = drawn[told]
            chance = probabilities[told, index]
            pool.learn(str(told), feedback(int(index), losses[told, index], chance))
        elif told >= 0:
            pool.learn(str(told), losses[told])
    assert pool.num_learners == min(delay + 1, num_rounds)
    assert pool.num_pending == min(delay, num_rounds)
    return Play(losses=losses, probabilities=probabilities, final=probabilities[-1], drawn=drawn)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_each_learner_plays_its_share_of_the_rounds_as_if_alone(name: str) -> None:
    losses = np.random.default_rng(0).random((90, 4))
    played = played_by_pool(name, losses, delay=6)
    for turn in range(7):
        share = losses[turn::7]
        alone = play_windows(policy_from_name(name, 4), share, in_time(len(share)))
        np.testing.assert_array_equal(played.probabilities[turn::7], alone.probabilities)


@pytest.mark.parametrize("delay", [0, 1, 16, 100])
def test_the_regret_of_a_pool_of_hedges_keeps_its_bound(delay: int) -> None:
    for seed in range(10):
        losses = np.random.default_rng(seed).integers(0, 2, (400, 8)).astype(np.float64)
        losses[100 * (seed % 4) :, seed % 8] *= 0.5
        bound = (
            1.07
            * np.sqrt((delay + 1) * np.ceil(400 / (delay + 1)) * np.log(8))
            * np.sqrt(delay + 1)
        )
        assert played_by_pool("hedge", losses, delay).regrets.max() <= bound


@pytest.mark.parametrize("delay", [0, 16])
def test_the_regret_of_a_pool_of_exp3_keeps_its_bound(delay: int) -> None:
    losses = np.where(np.arange(4) == 2, 0.2, 0.8) * np.ones((600, 1))
    bound = 2.0 * (delay + 1) * np.sqrt(np.ceil(600 / (delay + 1)) * 4 * np.log(4))
    regrets = [played_by_pool("exp3spec", losses, delay, seed).regrets.max() for seed in range(5)]
    assert 0.0 < float(np.mean(regrets)) <= bound


def test_one_learner_fed_late_does_better_than_the_pool_where_one_drafter_is_best() -> None:
    losses = np.random.default_rng(0).random((600, 8))
    losses[:, 3] *= 0.5
    one = play_windows(policy_from_name("normal_hedge", 8), losses, late(np.full(600, 16)))
    pool = played_by_pool("normal_hedge", losses, delay=16)
    assert one.regrets.max() < 0.5 * pool.regrets.max()


def test_feedback_may_arrive_in_any_order() -> None:
    pool = BoldPool(lambda: policy_from_name("hedge", 2))
    for decision_id in "abc":
        pool.choose(decision_id)
    pool.learn("b", np.array([1.0, 0.0]))
    assert (pool.num_learners, pool.num_pending) == (3, 2)
    assert pool.choose("d")[1] > 0.5
    assert (pool.num_learners, pool.num_pending) == (3, 3)


def test_invalid_decisions_are_refused() -> None:
    pool = BoldPool(lambda: policy_from_name("hedge", 2))
    pool.choose("a")
    with pytest.raises(ValueError, match="'a' is already pending"):
        pool.choose("a")
    with pytest.raises(ValueError, match="'b' is not pending: unknown or already learned"):
        pool.learn("b", np.zeros(2))
    pool.learn("a", np.zeros(2))
    with pytest.raises(ValueError, match="'a' is not pending"):
        pool.learn("a", np.zeros(2))


def test_invalid_feedback_leaves_the_decision_pending() -> None:
    pool = BoldPool(lambda: policy_from_name("hedge", 2))
    pool.choose("a")
    with pytest.raises(ValueError, match="expected"):
        pool.learn("a", np.zeros(3))
    assert pool.num_pending == 1
