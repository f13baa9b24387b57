"""Selection inside one request: who drafts the next round, learned from completed windows.

The worker uses it live and replay uses the same one over a log, so they cannot disagree: what is
learned are the float16 numbers of the event, in the order and at the rounds that the event tells.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner import measures
from learner.feedback import charge_sleeping
from learner.selection import Policy, select


class RequestSelector:
    """One request's policy over the drafters of a pool.

    Args:
        policy: Fresh for this request, started from the stream's prior.
        num_speculative_tokens: K, the scale of losses.
    """

    def __init__(self, policy: Policy, num_speculative_tokens: int) -> None:
        self._policy = policy
        self._num_speculative_tokens = num_speculative_tokens

    def probabilities(self, is_awake: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the chance of every drafter, shape (N,); those asleep have none.

        If all the mass is on drafters that sleep, it goes to the others in equal shares.
        """
        awake = self._policy.probabilities() * is_awake
        total = awake.sum()
        if total > 0.0:
            return np.asarray(awake / total, dtype=np.float64)
        return np.asarray(is_awake / is_awake.sum(), dtype=np.float64)

    def choose(self, is_awake: NDArray[np.bool_], rng: np.random.Generator) -> tuple[int, float]:
        """Draw the drafter of the next round and return (index, probability)."""
        return select(self.probabilities(is_awake), rng)

    def learn(
        self,
        acceptance_probability: NDArray[np.float16],
        realised_acceptance: NDArray[np.float16],
        num_levels: NDArray[np.int16],
    ) -> None:
        """Learn completed windows in order of start, arrays (W, K, N) and (W,)."""
        lengths = measures.expected_acceptance_length(
            acceptance_probability, realised_acceptance, num_levels=num_levels
        )
        for losses in measures.acceptance_length_loss(lengths, self._num_speculative_tokens):
            if not np.isnan(losses).all():
                self._policy.learn(charge_sleeping(losses, self._policy.probabilities()))
