"""Selectors for re-runs: a named policy started anew, or the logged one from the logged prior."""

from __future__ import annotations

import numpy as np

from learner.request_selector import RequestSelector
from learner.selection import policy_from_name
from replay.ports import SelectorFactory
from replay.requests import RequestTrace

SMALLEST_PRIOR = 1e-9
"""Prior of a drafter that joined after its request had started: a policy wants more than 0."""


def selector_from_name(name: str) -> SelectorFactory:
    """Return a factory that starts the named policy anew, from uniform, for every request."""

    def make(request: RequestTrace) -> RequestSelector:
        ids = request.drafter_ids
        policy = policy_from_name(name, len(ids), drafter_ids=ids)
        return RequestSelector(policy, request.num_speculative_tokens)

    return make


def logged_selector(request: RequestTrace) -> RequestSelector:
    """Remake the worker's own selector: the logged policy from the logged prior.

    Raises:
        ValueError: If no policy has that name.
    """
    ids = request.drafter_ids
    prior = np.maximum(request.prior_probabilities, SMALLEST_PRIOR)
    policy = policy_from_name(request.policy_name, len(ids), prior=prior, drafter_ids=ids)
    return RequestSelector(policy, request.num_speculative_tokens)
