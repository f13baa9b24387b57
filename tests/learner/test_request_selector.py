"""Selection inside a request: sleeping drafters, and losses as the event has them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from learner.request_selector import RequestSelector
from learner.selection import policy_from_name

ALL = np.ones(3, dtype=np.bool_)
POLICIES = pytest.mark.parametrize("policy", ["hedge", "normal_hedge"])


def selector(policy: str, prior: list[float] | None = None) -> RequestSelector:
    """Return a selector of three drafters with K = 4."""
    return RequestSelector(policy_from_name(policy, 3, prior=prior), 4)


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
