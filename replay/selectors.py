"""Selectors for re-runs: a named policy started anew, or the logged one from the logged prior."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.feedback import charge_sleeping
from learner.measures import acceptance_length_loss, expected_acceptance_length
from learner.selection import Policy, policy_from_name
from replay.ports import RequestSelector, SelectorFactory
from replay.requests import RequestTrace

SMALLEST_PRIOR = 1e-9
"""Prior of a drafter that joined after its request had started: a policy wants more than 0."""


class PolicySelector:
    """A policy that learns the exact length loss of every completed window.

    Drafters asleep are not selected, and are charged what the others lost together.
    """

    def __init__(self, policy: Policy, num_speculative_tokens: int) -> None:
        self._policy = policy
        self._num_speculative_tokens = num_speculative_tokens

    def probabilities(self, is_awake: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the policy's probabilities shared among those awake, shape (N,)."""
        awake = self._policy.probabilities() * is_awake
        awake = awake if awake.sum() > 0.0 else is_awake.astype(np.float64)
        return np.asarray(awake / awake.sum(), dtype=np.float64)

    def learn(
        self,
        acceptance_probability: NDArray[np.float16],
        realised_acceptance: NDArray[np.float16],
        num_levels: NDArray[np.int16],
    ) -> None:
        """Feed the windows' losses one by one; a window that scored nobody teaches nothing."""
        lengths = expected_acceptance_length(
            acceptance_probability, realised_acceptance, num_levels=num_levels
        )
        for losses in acceptance_length_loss(lengths, self._num_speculative_tokens):
            if not np.isnan(losses).all():
                self._policy.learn(charge_sleeping(losses, self._policy.probabilities()))


def selector_from_name(name: str) -> SelectorFactory:
    """Return a factory that starts the named policy anew, from uniform, for every request."""

    def make(request: RequestTrace) -> RequestSelector:
        ids = request.drafter_ids
        policy = policy_from_name(name, len(ids), drafter_ids=ids)
        return PolicySelector(policy, request.num_speculative_tokens)

    return make


def logged_selector(request: RequestTrace) -> RequestSelector:
    """Remake the worker's own selector: the logged policy from the logged prior.

    Raises:
        ValueError: If no policy has that name.
    """
    ids = request.drafter_ids
    prior = np.maximum(request.prior_probabilities, SMALLEST_PRIOR)
    policy = policy_from_name(request.policy_name, len(ids), prior=prior, drafter_ids=ids)
    return PolicySelector(policy, request.num_speculative_tokens)
