"""The published priors of all streams, as the worker starts its requests from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from schemas.events import PolicyPublished

NEWCOMER_SHARE = 0.05
"""Probability shared by drafters of the pool that the policy does not know yet."""


class StreamPriors:
    """The newest policy of every stream."""

    def __init__(self) -> None:
        self._stream_to_policy: dict[str, PolicyPublished] = {}

    def update(self, policy: PolicyPublished) -> None:
        """Keep a policy unless a newer one of its stream is known."""
        known = self._stream_to_policy.get(policy.stream)
        if known is None or policy.version > known.version:
            self._stream_to_policy[policy.stream] = policy

    def of(self, stream: str, drafter_ids: Sequence[str]) -> tuple[NDArray[np.float64], int]:
        """Return (prior over ``drafter_ids``, policy version); uniform and 0 for a new stream.

        Every entry is positive: drafters that the policy does not know share
        ``NEWCOMER_SHARE``, and drafters it knows but the pool has not are left out.
        """
        uniform = np.full(len(drafter_ids), 1.0 / len(drafter_ids))
        policy = self._stream_to_policy.get(stream)
        if policy is None:
            return uniform, 0
        known = {
            drafter.drafter_id: float(probability)
            for drafter, probability in zip(
                policy.drafters, policy.selection_probabilities, strict=True
            )
        }
        prior = np.array([known.get(drafter_id, 0.0) for drafter_id in drafter_ids])
        if not prior.sum() > 0.0:
            return uniform, policy.version
        is_new = prior <= 0.0
        share = NEWCOMER_SHARE if is_new.any() else 0.0
        prior *= (1.0 - share) / prior.sum()
        prior[is_new] = share / max(int(is_new.sum()), 1)
        return prior, policy.version
