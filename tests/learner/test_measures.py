"""Measures against exact enumeration of small trees."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.measures import (
    NO_PROPOSAL,
    Estimator,
    acceptance_length_loss,
    acceptance_loss,
    acceptance_rate,
    expected_acceptance_length,
    greedy_acceptance,
    hybrid_loss,
    mean_acceptance_length,
    one_hot_acceptance,
    realised_one_hot_acceptance,
    realised_sampling_acceptance,
    sampling_acceptance,
    walked_acceptance_length,
)

VOCABULARY = 3
LEVELS = 3

Distribution = NDArray[np.float64]
Conditional = Callable[[tuple[int, ...]], Distribution]
"""Next-token distribution after a path of tokens."""


def random_conditional(seed: int, *, concentration: float) -> Conditional:
    generator = np.random.default_rng(seed)
    path_to_probs = {
        path: generator.dirichlet(np.full(VOCABULARY, concentration))
        for depth in range(LEVELS)
        for path in product(range(VOCABULARY), repeat=depth)
    }
    return lambda path: path_to_probs[path]


def specialist(target: Conditional) -> Conditional:
    """Equal the target on paths that begin with token 0, useless elsewhere."""
    useless = np.array([0.0, 0.0, 1.0])
    return lambda path: target(path) if path[:1] in ((), (0,)) else useless


def sharpened(conditional: Conditional) -> Conditional:
    """Put all mass on the most probable token: a drafter that is sure of one token."""
    return lambda path: np.asarray(np.eye(VOCABULARY)[int(np.argmax(conditional(path)))])


def reduced(conditional: Conditional) -> Conditional:
    """Propose the first two tokens only, as a drafter with a reduced vocabulary does."""

    def probs(path: tuple[int, ...]) -> Distribution:
        kept = conditional(path) * np.array([1.0, 1.0, 0.0])
        return np.asarray(kept / kept.sum())

    return probs


def true_length(target: Conditional, drafter: Conditional, path: tuple[int, ...] = ()) -> float:
    """Play every draft against verification: 1 + Σ_x min(p, q)(x) x (what follows x)."""
    if len(path) == LEVELS:
        return 1.0
    accepted = np.minimum(target(path), drafter(path))
    follow = [true_length(target, drafter, (*path, token)) for token in range(VOCABULARY)]
    return 1.0 + float(accepted @ np.array(follow))


def mean_estimate(target: Conditional, drafter: Conditional, estimator: Estimator) -> float:
    """Average the estimator over all texts of the target, weighted by their probability."""
    mean = 0.0
    for text in product(range(VOCABULARY), repeat=LEVELS):
        contexts = [text[:level] for level in range(LEVELS)]
        target_probs = np.stack([target(context) for context in contexts])
        draft_probs = np.stack([drafter(context) for context in contexts])
        weight = float(np.prod(target_probs[np.arange(LEVELS), list(text)]))
        if weight == 0.0:
            continue
        length = expected_acceptance_length(
            sampling_acceptance(target_probs, draft_probs)[:, None],
            realised_sampling_acceptance(target_probs, draft_probs, np.array(text))[:, None],
            estimator=estimator,
        )
        mean += weight * float(length[0])
    return mean


TARGET = random_conditional(1, concentration=0.7)
DRAFTERS: dict[str, Conditional] = {
    "itself": TARGET,
    "unrelated": random_conditional(2, concentration=0.7),
    "specialist": specialist(TARGET),
    "one_hot": sharpened(random_conditional(3, concentration=1.0)),
    "one_hot_of_target": sharpened(TARGET),
    "reduced_vocabulary": reduced(TARGET),
}


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("target_seed", [1, 4, 5])
def test_the_exact_estimator_equals_enumeration(name: str, target_seed: int) -> None:
    target = random_conditional(target_seed, concentration=0.7)
    assert mean_estimate(target, DRAFTERS[name], "exact") == pytest.approx(
        true_length(target, DRAFTERS[name]), abs=1e-12
    )


def test_the_published_estimator_is_biased_for_a_specialist() -> None:
    drafter = DRAFTERS["specialist"]
    truth = true_length(TARGET, drafter)
    assert abs(mean_estimate(TARGET, drafter, "published") - truth) > 0.01


def test_the_two_token_example_is_off_by_a_quarter() -> None:
    """p = (.5, .5), q = (1, 0); after the first token the drafter is perfect, else useless."""
    acceptance = np.array([[[0.5], [1.0]], [[0.5], [0.0]]])
    realised = np.array([[[1.0], [1.0]], [[0.0], [0.0]]])
    exact = expected_acceptance_length(acceptance, realised).mean()
    published = expected_acceptance_length(acceptance, realised, estimator="published").mean()
    assert (float(exact), float(published)) == (2.0, 1.75)


def test_under_a_greedy_target_both_estimators_count_the_matching_prefix() -> None:
    generator = np.random.default_rng(0)
    target_tokens = generator.integers(0, 3, size=(50, LEVELS, 1))
    proposals = generator.integers(-1, 3, size=(50, LEVELS, 4))
    matches = greedy_acceptance(proposals, np.broadcast_to(target_tokens, proposals.shape))
    exact = expected_acceptance_length(matches, matches)
    published = expected_acceptance_length(matches, matches, estimator="published")
    prefix = np.cumprod(matches, axis=1).sum(axis=1)
    np.testing.assert_array_equal(exact, 1 + prefix)
    np.testing.assert_array_equal(published, exact)


def test_one_hot_acceptance_is_sampling_acceptance_of_a_one_hot_drafter() -> None:
    generator = np.random.default_rng(0)
    target_probs = generator.dirichlet(np.ones(5), size=20)
    proposed = generator.integers(0, 5, size=20)
    emitted = generator.integers(0, 5, size=20)
    draft_probs = np.eye(5)[proposed]
    np.testing.assert_allclose(
        one_hot_acceptance(target_probs, proposed), sampling_acceptance(target_probs, draft_probs)
    )
    np.testing.assert_array_equal(
        realised_one_hot_acceptance(proposed, emitted),
        realised_sampling_acceptance(target_probs, draft_probs, emitted),
    )


def test_no_proposal_is_never_accepted() -> None:
    nothing = np.array([NO_PROPOSAL])
    assert one_hot_acceptance(np.array([[0.1, 0.9]]), nothing) == 0.0
    assert realised_one_hot_acceptance(nothing, np.array([1])) == 0.0
    assert greedy_acceptance(nothing, nothing) == 0.0


def test_the_longest_possible_window_has_length_levels_plus_one() -> None:
    ones = np.ones((2, 4, 3))
    np.testing.assert_array_equal(expected_acceptance_length(ones, ones), np.full((2, 3), 5.0))


def test_a_window_of_no_levels_has_length_one() -> None:
    empty = np.ones((2, 0, 3))
    np.testing.assert_array_equal(expected_acceptance_length(empty, empty), np.ones((2, 3)))


@pytest.mark.parametrize("estimator", ["exact", "published"])
def test_a_shortened_window_equals_the_window_cut_off(estimator: Estimator) -> None:
    generator = np.random.default_rng(0)
    acceptance, realised = generator.random((2, 6, 4, 3))
    num_levels = np.array([0, 1, 2, 3, 4, 4], dtype=np.int16)
    for window in range(6):
        acceptance[window, num_levels[window] :] = np.nan
        realised[window, num_levels[window] :] = np.nan
    lengths = expected_acceptance_length(
        acceptance, realised, num_levels=num_levels, estimator=estimator
    )
    for window, count in enumerate(num_levels):
        cut = expected_acceptance_length(
            acceptance[window, :count], realised[window, :count], estimator=estimator
        )
        np.testing.assert_allclose(lengths[window], cut)


def test_a_drafter_that_was_not_scored_is_nan_and_leaves_the_others_alone() -> None:
    acceptance = np.full((1, 2, 3), 0.5, dtype=np.float16)
    acceptance[0, 1, 1] = np.nan
    length = expected_acceptance_length(acceptance, acceptance)
    np.testing.assert_array_equal(np.isnan(length), [[False, True, False]])
    np.testing.assert_array_equal(length[0, [0, 2]], [1.75, 1.75])


def test_losses_are_small_when_drafts_are_long() -> None:
    np.testing.assert_allclose(acceptance_length_loss(np.array([1.0, 3.0, 5.0]), 4), [0.8, 0.4, 0])
    np.testing.assert_allclose(acceptance_loss(np.array([[[0.25, 1.0], [0.0, 0.0]]])), [[0.75, 0]])
    mixed = hybrid_loss(np.array([0.8]), np.array([0.4]), weight=0.25)
    np.testing.assert_allclose(mixed, [0.5])


def test_counts_give_rates_and_no_sample_gives_none() -> None:
    assert mean_acceptance_length(4, 2) == 3.0
    assert acceptance_rate(6, 12) == 0.5
    assert mean_acceptance_length(0, 0) is None
    assert acceptance_rate(0, 0) is None


def test_walking_counts_only_the_windows_in_which_a_round_begins() -> None:
    """Rounds begin at 5, 8 and 9; the short windows between are never entered."""
    lengths = np.array([3.0, 1.0, 1.0, 1.0, 2.0, 1.0])
    assert walked_acceptance_length(np.arange(5, 11), lengths) == 2.0


def test_walking_without_a_scored_window_gives_none() -> None:
    assert walked_acceptance_length(np.arange(2), np.full(2, np.nan)) is None
    assert walked_acceptance_length(np.arange(0), np.empty(0)) is None


def test_invalid_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 2\)"):
        expected_acceptance_length(np.ones((2, 3)), np.ones((2, 2)))


def test_invalid_level_counts_are_refused() -> None:
    with pytest.raises(ValueError, match=r"range 1\.\.5.*range 0\.\.4"):
        expected_acceptance_length(
            np.ones((2, 4, 3)), np.ones((2, 4, 3)), num_levels=np.array([1, 5])
        )


def test_invalid_emitted_token_is_refused() -> None:
    with pytest.raises(ValueError, match=r"token 1 at \(0,\) has target probability 0\.0"):
        realised_sampling_acceptance(np.array([[1.0, 0.0]]), np.array([[0.5, 0.5]]), np.array([1]))


def test_invalid_mixing_weight_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight=1\.5"):
        hybrid_loss(np.zeros(1), np.zeros(1), weight=1.5)
