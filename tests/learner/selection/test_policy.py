"""What every policy keeps: a new one enrols itself through the registry."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection import Policy, PolicyState, policy_from_name, policy_from_state, policy_names

EVERY_POLICY = (*policy_names(), "fixed:0")


def make(name: str, num_drafters: int = 4, prior: list[float] | None = None) -> Policy:
    return policy_from_name(name, num_drafters, prior=prior)


def taught(policy: Policy, losses: NDArray[np.float64]) -> Policy:
    for row in losses:
        policy.learn(row)
    return policy


@pytest.fixture
def losses() -> NDArray[np.float64]:
    return np.random.default_rng(0).random((300, 4))


@pytest.mark.parametrize("name", policy_names())
def test_the_better_drafter_gains(name: str) -> None:
    policy = make(name, 3)
    before = policy.probabilities()[1]
    policy.learn(np.array([0.6, 0.2, 0.6]))
    after = policy.probabilities()[1]
    assert after > before
    taught(policy, np.tile([0.6, 0.2, 0.6], (400, 1)))
    assert policy.probabilities()[1] > 0.99


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("loss", [0.0, 0.3, 1.0])
def test_equal_losses_leave_the_drafters_equal(name: str, loss: float) -> None:
    policy = taught(make(name, 7), np.full((1000, 7), loss))
    np.testing.assert_allclose(policy.probabilities(), np.full(7, 1 / 7), atol=1e-12)


@pytest.mark.parametrize("name", policy_names())
def test_equal_losses_keep_the_prior(name: str) -> None:
    prior = [0.7, 0.1, 0.1, 0.1]
    policy = taught(make(name, 4, prior), np.full((50, 4), 0.4))
    np.testing.assert_allclose(policy.probabilities(), prior, atol=1e-12)


@pytest.mark.parametrize("name", policy_names())
def test_an_unequal_prior_is_overcome(name: str) -> None:
    policy = taught(make(name, 2, [0.999, 0.001]), np.tile([0.6, 0.4], (3000, 1)))
    assert policy.probabilities()[1] > 0.9


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_single_drafter_is_certain(name: str) -> None:
    policy = taught(make(name, 1), np.array([[0.0], [0.5], [1.0]]))
    np.testing.assert_array_equal(policy.probabilities(), [1.0])


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_probabilities_are_a_distribution_at_every_step(
    name: str, losses: NDArray[np.float64]
) -> None:
    policy = make(name)
    for row in losses:
        policy.learn(row)
        probabilities = policy.probabilities()
        assert probabilities.dtype == np.float64
        assert np.all(probabilities >= 0.0)
        assert abs(probabilities.sum() - 1.0) < 1e-12


@pytest.mark.parametrize("name", policy_names())
def test_the_order_of_the_drafters_does_not_matter(name: str, losses: NDArray[np.float64]) -> None:
    order, prior = [2, 0, 3, 1], np.array([0.4, 0.3, 0.2, 0.1])
    plain = taught(policy_from_name(name, 4, prior=prior), losses)
    permuted = taught(policy_from_name(name, 4, prior=prior[order]), losses[:, order])
    np.testing.assert_allclose(permuted.probabilities(), plain.probabilities()[order], atol=1e-9)


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_restored_policy_continues_bit_for_bit(name: str, losses: NDArray[np.float64]) -> None:
    policy = taught(make(name), losses[:150])
    restored = policy_from_state(policy.state())
    for row in losses[150:]:
        policy.learn(row)
        restored.learn(row)
        np.testing.assert_array_equal(restored.probabilities(), policy.probabilities())
    final, again = policy.state(), restored.state()
    assert (final.name, final.version) == (again.name, again.version)
    for key, values in final.arrays.items():
        np.testing.assert_array_equal(again.arrays[key], values)


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


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_a_hundred_thousand_extreme_rounds_stay_finite(name: str) -> None:
    policy = make(name, 3)
    extreme = np.random.default_rng(0).integers(0, 2, size=(100_000, 3)).astype(np.float64)
    extreme[:50_000, 0], extreme[50_000:, 1] = 0.0, 0.0
    probabilities = taught(policy, extreme).probabilities()
    assert np.isfinite(probabilities).all()
    assert abs(probabilities.sum() - 1.0) < 1e-12


@pytest.mark.parametrize("name", EVERY_POLICY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1e-9, 1.0 + 1e-9])
def test_invalid_losses_are_refused_and_change_nothing(
    name: str, bad: float, losses: NDArray[np.float64]
) -> None:
    policy = taught(make(name), losses)
    before = policy.probabilities()
    with pytest.raises(ValueError, match=r"losses\[2\]=.* outside \[0, 1\]"):
        policy.learn(np.array([0.1, 0.2, bad, 0.3]))
    np.testing.assert_array_equal(policy.probabilities(), before)
    for key, values in policy.state().arrays.items():
        np.testing.assert_array_equal(values, taught(make(name), losses).state().arrays[key])


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_invalid_number_of_losses_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"shape \(3,\), expected \(4,\)"):
        make(name).learn(np.zeros(3))


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_invalid_state_of_another_layout_is_refused(name: str) -> None:
    state = make(name).state()
    newer = PolicyState(name=state.name, version=state.version + 1, arrays=state.arrays)
    with pytest.raises(ValueError, match=r"version 2, expected .* version 1"):
        policy_from_state(newer)


@pytest.mark.parametrize("name", policy_names())
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


@pytest.mark.parametrize("name", policy_names())
def test_invalid_empty_pool_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_drafters=0"):
        make(name, 0)
