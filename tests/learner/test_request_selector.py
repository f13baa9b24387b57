"""Selection inside a request: sleeping drafters, and losses as the event has them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.measures import policy_losses
from learner.request_selector import RequestSelector, round_feedback
from learner.selection import policy_from_name
from learner.selection.base import Loss
from learner.selection.kernels import charge_sleeping

ALL = np.ones(3, dtype=np.bool_)
POLICIES = pytest.mark.parametrize("policy", ["hedge", "normal_hedge"])


def selector(policy: str, prior: list[float] | None = None) -> RequestSelector:
    """Return a selector of three drafters with K = 4."""
    return RequestSelector.fresh(policy, 3, 4, prior=prior)


def learn(one: RequestSelector, accepted: list[float], *, num_windows: int = 1) -> None:
    """Learn windows in which each drafter has every level accepted, or none, or is unscored."""
    scores = np.broadcast_to(np.array(accepted, np.float16), (num_windows, 4, 3))
    one.learn(scores, scores, np.full(num_windows, 4, np.int16))


@POLICIES
def test_it_starts_from_the_prior(policy: str) -> None:
    one = selector(policy, [0.7, 0.2, 0.1])
    np.testing.assert_allclose(one.probabilities(ALL), [0.7, 0.2, 0.1])


@POLICIES
def test_the_drafter_whose_drafts_are_accepted_is_selected(policy: str) -> None:
    one = selector(policy)
    learn(one, [0.0, 1.0, 0.0], num_windows=60)
    assert one.probabilities(ALL)[1] > 0.9


@POLICIES
def test_a_sleeping_drafter_is_never_selected_and_the_others_keep_their_ratio(policy: str) -> None:
    one = selector(policy, [0.6, 0.3, 0.1])
    awake = np.array([False, True, True])
    np.testing.assert_allclose(one.probabilities(awake), [0.0, 0.75, 0.25])
    rng = np.random.default_rng(1)
    counts = Counter(one.choose(awake, rng)[0] for _ in range(200))
    assert set(counts) == {1, 2}


def test_all_mass_on_a_sleeping_drafter_goes_to_the_others_in_equal_shares() -> None:
    one = selector("fixed:0")
    found = one.probabilities(np.array([False, True, True]))
    assert found.tolist() == [0.0, 0.5, 0.5]


@POLICIES
def test_a_drafter_that_was_not_scored_neither_wins_nor_loses(policy: str) -> None:
    one = selector(policy)
    learn(one, [float("nan"), 1.0, 0.0], num_windows=5)
    found = one.probabilities(ALL)
    assert found[1] > found[0] >= found[2]
    assert found.sum() == pytest.approx(1.0)


@POLICIES
def test_a_window_that_nobody_was_scored_on_teaches_nothing(policy: str) -> None:
    one = selector(policy, [0.5, 0.3, 0.2])
    learn(one, [float("nan")] * 3, num_windows=3)
    np.testing.assert_allclose(one.probabilities(ALL), [0.5, 0.3, 0.2])


@POLICIES
def test_the_chosen_probability_is_the_one_it_was_chosen_with(policy: str) -> None:
    one = selector(policy)
    rng = np.random.default_rng(2)
    for accepted in ([1.0, 0.0, 0.5], [0.0, 1.0, 0.5], [0.0, 0.0, 0.5]):
        expected = one.probabilities(ALL)
        index, probability = one.choose(ALL, rng)
        assert probability == expected[index]
        learn(one, accepted)


def test_windows_learned_at_once_or_one_by_one_give_the_same() -> None:
    rng = np.random.default_rng(3)
    scores = rng.random((7, 4, 3)).astype(np.float16)
    levels = np.array([4, 4, 4, 4, 3, 2, 1], np.int16)
    scores[np.arange(4) >= levels[:, None]] = np.nan
    together, alone = selector("hedge"), selector("hedge")
    together.learn(scores, scores, levels)
    for window in range(7):
        one = slice(window, window + 1)
        alone.learn(scores[one], scores[one], levels[one])
    assert together.probabilities(ALL).tolist() == alone.probabilities(ALL).tolist()


@pytest.mark.parametrize("policy", ["fixed_share", "ada_normal_hedge_grid"])
def test_argmax_takes_the_largest_for_certain_and_draws_among_equals(policy: str) -> None:
    one = selector(policy)
    rng = np.random.default_rng(4)
    assert one.probabilities(ALL).tolist() == [1 / 3] * 3
    counts = Counter(one.choose(ALL, rng) for _ in range(300))
    assert all(counts[index, 1 / 3] > 60 for index in range(3))
    learn(one, [0.0, 1.0, 0.5])
    assert one.probabilities(ALL).tolist() == [0.0, 1.0, 0.0]
    assert one.choose(np.array([True, False, True]), rng) == (2, 1.0)


def test_sticky_draws_have_the_same_chances_and_hardly_switch() -> None:
    rng = np.random.default_rng(5)
    sticky = selector("hedge:choice=sticky", [0.5, 0.3, 0.2])
    chosen = [sticky.choose(ALL, rng) for _ in range(200)]
    assert len(set(chosen)) == 1, "while nothing is learned there is no reason to switch"
    starts = [selector("hedge:choice=sticky", [0.5, 0.3, 0.2]).choose(ALL, rng) for _ in range(600)]
    counts = Counter(index for index, _ in starts)
    np.testing.assert_allclose([counts[i] / 600 for i in range(3)], [0.5, 0.3, 0.2], atol=0.07)
    assert all(probability == [0.5, 0.3, 0.2][index] for index, probability in starts)


def test_a_sticky_draw_leaves_a_drafter_that_falls_asleep() -> None:
    rng = np.random.default_rng(6)
    one = selector("hedge:choice=sticky", [0.6, 0.3, 0.1])
    index, _ = one.choose(ALL, rng)
    awake = np.arange(3) != index
    assert one.choose(awake, rng)[0] != index


@pytest.mark.parametrize("loss", ["first", "length", "hybrid"])
def test_the_loss_reads_level_1_or_the_whole_window_or_half_of_each(loss: Loss) -> None:
    probability = np.array([[[0.5, 1.0], [0.5, 0.5]]], np.float16)
    realised = np.array([[[1.0, 0.0], [1.0, 1.0]]], np.float16)
    levels = np.array([2], np.int16)
    found = policy_losses(probability, realised, levels, loss=loss, num_speculative_tokens=2)
    by_hand = {
        "first": [0.5, 0.0],
        "length": [1 - (1 + 0.5 + 0.5) / 3, 1 - (1 + 1.0 + 0.0) / 3],
    }
    by_hand["hybrid"] = [
        0.5 * (a + b) for a, b in zip(by_hand["first"], by_hand["length"], strict=True)
    ]
    np.testing.assert_allclose(found, [by_hand[loss]])


def test_level_1_is_learned_of_windows_that_are_not_scored_to_their_end() -> None:
    first, whole = selector("hedge:loss=first"), selector("hedge")
    scores = np.full((1, 4, 3), np.nan, np.float16)
    scores[0, 0] = [1.0, 0.0, 0.0]
    for one in (first, whole):
        one.learn(scores, scores, np.array([4], np.int16))
    assert first.probabilities(ALL)[0] > 1 / 3
    np.testing.assert_allclose(whole.probabilities(ALL), [1 / 3] * 3)


def test_a_bandit_learns_rounds_and_no_windows_and_the_others_the_reverse() -> None:
    bandit, hedge = selector("exp3spec"), selector("hedge")
    for one in (bandit, hedge):
        one.learn_round(0, 1 / 3, 4, 0)
    assert bandit.probabilities(ALL)[0] != pytest.approx(1 / 3)
    assert hedge.probabilities(ALL).tolist() == [1 / 3] * 3
    before = bandit.probabilities(ALL)
    learn(bandit, [0.0, 1.0, 0.0], num_windows=5)
    assert bandit.probabilities(ALL).tolist() == before.tolist()


@pytest.mark.parametrize(
    ("drafted", "accepted", "length_loss", "agreement_loss"),
    [(4, 4, 0.0, 0.0), (4, 2, 0.4, 1 / 3), (4, 0, 0.8, 1.0), (2, 2, 0.4, 0.0), (0, 0, 0.8, 1.0)],
)
def test_a_round_tells_its_length_and_the_share_of_what_it_reached(
    drafted: int, accepted: int, length_loss: float, agreement_loss: float
) -> None:
    found = round_feedback(1, 0.25, drafted, accepted, num_speculative_tokens=4)
    assert (found.drafter_index, found.selection_probability) == (1, 0.25)
    assert found.length_loss == pytest.approx(length_loss)
    assert found.agreement_loss == pytest.approx(agreement_loss)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**16), num_asleep=st.integers(0, 5))
@pytest.mark.parametrize("name", ["hedge", "normal_hedge", "ada_normal_hedge_grid"])
def test_a_sleeping_drafter_keeps_its_weight_relative_to_the_rest(
    name: str, seed: int, num_asleep: int
) -> None:
    generator = np.random.default_rng(seed)
    policy = policy_from_name(name, 5)
    policy.learn_windows(generator.random((20, 5)))
    losses = generator.random(5)
    losses[:num_asleep] = np.nan
    probabilities = policy.probabilities()
    charge_sleeping(losses, probabilities)
    assert np.all((losses >= 0.0) & (losses <= 1.0))
    if probabilities[num_asleep:].sum() > 1e-9:
        np.testing.assert_allclose(losses[:num_asleep], probabilities @ losses, atol=1e-6)


def test_sleepers_are_charged_the_plain_mean_when_nobody_awake_has_weight() -> None:
    losses = np.array([np.nan, 0.2, 0.6])
    charge_sleeping(losses, np.array([1.0, 0.0, 0.0]))
    np.testing.assert_allclose(losses, [0.4, 0.2, 0.6])
