"""What a request starts from: the newest policy of its stream, over the drafters there are."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inference.priors import NEWCOMER_SHARE, StreamPriors
from learner.selection import policy_from_name
from schemas.events import PolicyPublished
from tests.schemas.builders import make_policy

IDS = ["drafter-0", "drafter-1", "drafter-2"]


def policy(probabilities: list[float], *, version: int = 1, stream: str = "s") -> PolicyPublished:
    """Return a policy over ``drafter-0``, ``drafter-1``, ..."""
    made = make_policy(stream=stream, version=version, num_drafters=len(probabilities))
    return replace(made, selection_probabilities=np.array(probabilities))


def priors_of(*policies: PolicyPublished) -> StreamPriors:
    """Return priors that know these policies."""
    priors = StreamPriors()
    for one in policies:
        priors.update(one)
    return priors


def test_a_new_stream_starts_uniform_at_version_0() -> None:
    prior, version = priors_of().of("s", IDS)
    assert prior.tolist() == [1 / 3] * 3
    assert version == 0


def test_the_policy_of_the_stream_is_the_prior_in_the_order_of_the_pool() -> None:
    priors = priors_of(policy([0.7, 0.2, 0.1]), policy([0.1, 0.1, 0.8], stream="other"))
    prior, version = priors.of("s", ["drafter-2", "drafter-0", "drafter-1"])
    np.testing.assert_allclose(prior, [0.1, 0.7, 0.2])
    assert version == 1


def test_an_older_policy_does_not_replace_a_newer_one() -> None:
    priors = priors_of(policy([0.7, 0.2, 0.1], version=9), policy([0.1, 0.2, 0.7], version=8))
    prior, version = priors.of("s", IDS)
    assert version == 9
    assert prior[0] == pytest.approx(0.7)


def test_newcomers_share_what_is_set_aside_for_them() -> None:
    priors = priors_of(policy([0.75, 0.25]))
    prior, _ = priors.of("s", ["drafter-0", "new-a", "drafter-1", "new-b"])
    half = NEWCOMER_SHARE / 2
    kept = 1.0 - NEWCOMER_SHARE
    np.testing.assert_allclose(prior, [0.75 * kept, half, 0.25 * kept, half])


def test_drafters_that_have_left_take_nothing_with_them() -> None:
    prior, _ = priors_of(policy([0.5, 0.3, 0.2])).of("s", ["drafter-1", "drafter-2"])
    np.testing.assert_allclose(prior, [0.6, 0.4])


def test_a_policy_that_knows_nobody_of_the_pool_gives_a_uniform_prior() -> None:
    prior, version = priors_of(policy([0.5, 0.5], version=4)).of("s", ["x", "y"])
    assert prior.tolist() == [0.5, 0.5]
    assert version == 4


@pytest.mark.parametrize("probabilities", [[1.0, 0.0, 0.0], [1.0 - 1e-300, 1e-300, 5e-324]])
def test_every_prior_can_start_a_policy(probabilities: list[float]) -> None:
    prior, _ = priors_of(policy(probabilities)).of("s", IDS)
    assert (prior > 0.0).all()
    assert prior.sum() == pytest.approx(1.0)
    for name in ("hedge", "normal_hedge"):
        found = policy_from_name(name, 3, prior=prior).probabilities()
        np.testing.assert_allclose(found, prior, atol=1e-9)
