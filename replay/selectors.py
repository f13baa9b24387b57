"""Selectors for re-runs: a named policy started anew, or the worker's own from the log."""

from __future__ import annotations

import numpy as np

from learner.carried import unpacked
from learner.request_selector import RequestSelector
from learner.selection import CompiledPolicy, PolicySpec, parse_policy
from replay.ports import SelectorFactory
from replay.requests import RequestTrace

SMALLEST_PRIOR = 1e-9
"""Prior of a drafter that joined after its request had started: a policy wants more than 0."""


def selector_from_name(name: str) -> SelectorFactory:
    """Return a factory that starts the named policy anew, from uniform, for every request."""

    def make(request: RequestTrace) -> RequestSelector:
        ids = request.drafter_ids
        return RequestSelector.fresh(
            name, len(ids), request.num_speculative_tokens, drafter_ids=ids
        )

    return make


def logged_selector(request: RequestTrace) -> RequestSelector:
    """Remake the worker's own selector: the logged policy from the logged state or prior.

    Raises:
        ValueError: If no policy has that name, or the state is not one of its own.
    """
    spec = parse_policy(request.policy_name)
    policy = _logged_policy(request, spec)
    return RequestSelector(spec, policy, request.num_speculative_tokens)


def _logged_policy(request: RequestTrace, spec: PolicySpec) -> CompiledPolicy:
    ids = request.drafter_ids
    if request.policy_table.size == 0:
        prior = np.maximum(request.prior_probabilities, SMALLEST_PRIOR)
        return spec.build(len(ids), prior=prior, drafter_ids=ids)
    num_started = request.num_started_drafters
    policy = unpacked(spec, request.policy_table, request.policy_numbers, num_started)
    if num_started == len(ids):
        return policy
    places = [*range(num_started), *[-1] * (len(ids) - num_started)]
    return policy.with_drafters(places, share=SMALLEST_PRIOR)
