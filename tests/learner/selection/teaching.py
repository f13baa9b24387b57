"""Teaching a policy what it can learn: windows if it has full information, else rounds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.selection import CompiledPolicy, RoundFeedback, policy_from_name, policy_names, select

EVERY_POLICY = (*policy_names(), "fixed:0")
BANDITS = tuple(name for name in policy_names() if policy_from_name(name, 2).learns_rounds)
FULL_INFORMATION = tuple(name for name in policy_names() if name not in BANDITS)
FORGETFUL = ("ada_normal_hedge_grid", "fixed_share", "mixing_past_posteriors")
"""Policies that give every drafter back a share of its prior after each window."""


def make(name: str, num_drafters: int = 4, prior: list[float] | None = None) -> CompiledPolicy:
    return policy_from_name(name, num_drafters, prior=prior)


def taught(policy: CompiledPolicy, losses: NDArray[np.float64], seed: int = 0) -> CompiledPolicy:
    """Teach losses (T, N): a bandit draws a drafter per row and sees that one's loss alone."""
    if not policy.learns_rounds:
        policy.learn_windows(losses)
        return policy
    generator = np.random.default_rng(seed)
    for row in losses:
        index, probability = select(policy.probabilities(), generator)
        policy.learn_round(feedback(index, row[index], probability))
    return policy


def feedback(index: int, loss: float, probability: float = 1.0) -> RoundFeedback:
    return RoundFeedback(
        drafter_index=index,
        selection_probability=probability,
        length_loss=float(loss),
        agreement_loss=float(loss),
    )
