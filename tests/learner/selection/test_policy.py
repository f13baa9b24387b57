"""What every policy keeps: a new one enrols itself through the registry."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection import PolicyState, RoundFeedback, policy_from_name, policy_from_state
from learner.selection.base import CompiledPolicy
from learner.selection.policy import PROBABILITY_TOLERANCE
from tests.learner.selection.teaching import (
    BANDITS,
    EVERY_POLICY,
    FORGETFUL,
    FULL_INFORMATION,
    feedback,
    make,
    taught,
)

EVERY_LEARNER = (*FULL_INFORMATION, *BANDITS)


def assert_same_state(left: CompiledPolicy, right: CompiledPolicy) -> None:
    mine, other = left.state(), right.state()
    assert (mine.name, mine.version) == (other.name, other.version)
    for key, values in mine.arrays.items():
        np.testing.assert_array_equal(values, other.arrays[key])


@pytest.fixture
def losses() -> NDArray[np.float64]:
    return np.random.default_rng(0).random((300, 4))


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_the_better_drafter_gains(name: str) -> None:
    policy = make(name, 3)
    before = policy.probabilities()[1]
    policy.learn(np.array([0.6, 0.2, 0.6]))
    assert policy.probabilities()[1] > before
    taught(policy, np.tile([0.6, 0.2, 0.6], (400, 1)))
    assert policy.probabilities()[1] > (0.97 if name in FORGETFUL else 0.99)


@pytest.mark.parametrize("name", BANDITS)
def test_a_bandit_plays_the_better_drafter_more(name: str) -> None:
    policy, played = make(name, 3), np.zeros(3)
    generator = np.random.default_rng(0)
    for _ in range(2000):
        probabilities = policy.probabilities()
        index = int(generator.choice(3, p=probabilities))
        played[index] += 1
        policy.learn_round(feedback(index, [0.9, 0.1, 0.9][index], probabilities[index]))
    assert played[1] > 1.2 * max(played[0], played[2])


@pytest.mark.parametrize("name", FULL_INFORMATION)
@pytest.mark.parametrize("loss", [0.0, 0.3, 1.0])
def test_equal_losses_leave_the_drafters_equal(name: str, loss: float) -> None:
    policy = taught(make(name, 7), np.full((1000, 7), loss))
    np.testing.assert_allclose(policy.probabilities(), np.full(7, 1 / 7), atol=1e-12)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_equal_losses_keep_the_prior(name: str) -> None:
    prior = [0.7, 0.1, 0.1, 0.1]
    policy = taught(make(name, 4, prior), np.full((50, 4), 0.4))
    np.testing.assert_allclose(policy.probabilities(), prior, atol=1e-12)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_an_unequal_prior_is_overcome(name: str) -> None:
    policy = taught(make(name, 2, [0.999, 0.001]), np.tile([0.6, 0.4], (3000, 1)))
    assert policy.probabilities()[1] > 0.9


@pytest.mark.parametrize("name", BANDITS)
def test_a_bandit_starts_without_the_prior_which_windows_taught(name: str) -> None:
    policy = make(name, 4, [0.7, 0.1, 0.1, 0.1])
    np.testing.assert_array_equal(policy.probabilities(), np.full(4, 0.25))


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_single_drafter_is_certain(name: str) -> None:
    policy = taught(make(name, 1), np.array([[0.0], [0.5], [1.0]]))
    np.testing.assert_allclose(policy.probabilities(), [1.0], atol=1e-12)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_probabilities_are_a_distribution_at_every_step(
    name: str, losses: NDArray[np.float64]
) -> None:
    policy = make(name)
    for row in losses:
        probabilities = taught(policy, row[None]).probabilities()
        assert probabilities.dtype == np.float64
        assert np.all(probabilities >= 0.0)
        assert abs(probabilities.sum() - 1.0) < 1e-12


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_the_order_of_the_drafters_does_not_matter(name: str, losses: NDArray[np.float64]) -> None:
    order, prior = [2, 0, 3, 1], np.array([0.4, 0.3, 0.2, 0.1])
    plain = taught(policy_from_name(name, 4, prior=prior), losses)
    permuted = taught(policy_from_name(name, 4, prior=prior[order]), losses[:, order])
    np.testing.assert_allclose(permuted.probabilities(), plain.probabilities()[order], atol=1e-9)


@pytest.mark.parametrize("name", BANDITS)
def test_the_order_of_the_drafters_does_not_matter_to_a_bandit(name: str) -> None:
    order = np.array([2, 0, 3, 1])
    place = np.argsort(order)
    plain, permuted = make(name), make(name)
    for index in np.random.default_rng(0).integers(0, 4, 100):
        probability = max(plain.probabilities()[index], 0.01)
        plain.learn_round(feedback(index, 0.2 * index, probability))
        permuted.learn_round(feedback(int(place[index]), 0.2 * index, probability))
        np.testing.assert_allclose(
            permuted.probabilities(), plain.probabilities()[order], atol=1e-12
        )


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_windows_one_by_one_and_together_leave_the_same_state(
    name: str, losses: NDArray[np.float64]
) -> None:
    together, one_by_one = make(name), make(name)
    after = together.learn_windows(losses)
    for row, probabilities in zip(losses, after, strict=True):
        one_by_one.learn(row)
        np.testing.assert_array_equal(one_by_one.probabilities(), probabilities)
    assert_same_state(one_by_one, together)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_policy_learns_from_its_own_kind_of_feedback_alone(
    name: str, losses: NDArray[np.float64]
) -> None:
    policy = make(name)
    if policy.learns_rounds:
        policy.learn_windows(losses)
    else:
        policy.learn_round(feedback(1, 0.0))
    assert_same_state(policy, make(name))


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_restored_policy_continues_bit_for_bit(name: str, losses: NDArray[np.float64]) -> None:
    policy = taught(make(name), losses[:150])
    restored = policy_from_state(policy.state())
    for row in losses[150:]:
        taught(policy, row[None])
        taught(restored, row[None])
        np.testing.assert_array_equal(restored.probabilities(), policy.probabilities())
    assert_same_state(policy, restored)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_state_is_finite_float64_and_a_copy(name: str, losses: NDArray[np.float64]) -> None:
    policy = taught(make(name), losses)
    before = policy.probabilities()
    for values in policy.state().arrays.values():
        assert values.dtype == np.float64
        assert np.isfinite(values).all()
        values[...] = 0.0
    policy.probabilities()[...] = 0.0
    np.testing.assert_array_equal(policy.probabilities(), before)


@pytest.mark.parametrize("name", (*FULL_INFORMATION, "fixed:0"))
def test_a_hundred_thousand_extreme_windows_stay_finite(name: str) -> None:
    extreme = np.random.default_rng(0).integers(0, 2, size=(100_000, 3)).astype(np.float64)
    extreme[:50_000, 0], extreme[50_000:, 1] = 0.0, 0.0
    probabilities = make(name, 3).learn_windows(extreme)
    assert np.isfinite(probabilities).all()
    assert np.abs(probabilities.sum(axis=1) - 1.0).max() < 1e-9


@pytest.mark.parametrize("name", BANDITS)
@pytest.mark.parametrize("probability", [1e-12, 1.0])
def test_rounds_of_tiny_probability_stay_finite(name: str, probability: float) -> None:
    policy = make(name, 3)
    for turn in range(3000):
        policy.learn_round(feedback(turn % 3, 1.0 - turn % 2, probability))
        probabilities = policy.probabilities()
        assert np.isfinite(probabilities).all()
        assert abs(probabilities.sum() - 1.0) < 1e-9


@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, -1e-9, 1.0 + 1e-9])
def test_invalid_losses_are_refused_and_change_nothing(
    name: str, bad: float, losses: NDArray[np.float64]
) -> None:
    policy = taught(make(name), losses)
    with pytest.raises(ValueError, match=r"losses\[1, 2\]=.* outside \[0, 1\]"):
        policy.learn_windows(np.array([[0.1, 0.2, 0.2, 0.3], [0.1, 0.2, bad, 0.3]]))
    assert_same_state(policy, taught(make(name), losses))


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_invalid_number_of_losses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"shape \(1, 3\), expected \(W, 4\)"):
        make(name).learn(np.zeros(3))


@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"drafter_index": 4}, r"drafter_index=4 outside 0\.\.3"),
        ({"drafter_index": -1}, r"drafter_index=-1 outside 0\.\.3"),
        ({"selection_probability": 0.0}, r"selection_probability=0\.0 outside \(0, 1\]"),
        ({"selection_probability": np.nan}, r"selection_probability=nan outside"),
        ({"length_loss": 1.1}, r"length_loss=1\.1 outside \[0, 1\]"),
        ({"agreement_loss": np.nan}, r"agreement_loss=nan outside \[0, 1\]"),
    ],
)
def test_invalid_rounds_are_refused_and_change_nothing(
    name: str, changed: dict[str, float], message: str
) -> None:
    policy = make(name)
    good = {"drafter_index": 1, "selection_probability": 1.0, "length_loss": 0.5}
    with pytest.raises(ValueError, match=message):
        policy.learn_round(RoundFeedback(**{"agreement_loss": 0.5, **good, **changed}))  # type: ignore[arg-type]
    assert_same_state(policy, make(name))


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_invalid_state_of_another_layout_is_refused(name: str) -> None:
    state = make(name).state()
    newer = PolicyState(name=state.name, version=state.version + 1, arrays=state.arrays)
    message = rf"version {state.version + 1}, expected .* version {state.version}"
    with pytest.raises(ValueError, match=message):
        policy_from_state(newer)


@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize("array", ["table", "numbers"])
def test_invalid_state_of_another_shape_is_refused(name: str, array: str) -> None:
    state = make(name).state()
    arrays = {**state.arrays, array: np.zeros((40, 40))}
    with pytest.raises(ValueError, match=r"has a table of shape"):
        policy_from_state(PolicyState(name=state.name, version=state.version, arrays=arrays))


@pytest.mark.parametrize("name", EVERY_LEARNER)
@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ([0.5, 0.5, 0.0, 0.0], r"prior\[2\]=0\.0, expected > 0"),
        ([0.5, 0.5, 0.5, 0.5], r"prior sums to 2\.0"),
        ([1.0], r"shape \(1,\)"),
        ([0.5, 0.5, np.nan, 0.1], r"prior\[2\]=nan"),
    ],
)
def test_invalid_priors_are_refused(name: str, prior: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(name, 4, prior)


@pytest.mark.parametrize("name", EVERY_LEARNER)
def test_a_prior_that_rounding_moved_is_repaired(name: str) -> None:
    off = np.full(4, 0.25) + 0.2 * PROBABILITY_TOLERANCE
    assert make(name, 4, list(off)).probabilities().sum() == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("name", EVERY_LEARNER)
def test_invalid_empty_pool_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_drafters=0"):
        make(name, 0)
