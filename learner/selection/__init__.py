"""Selection policies: one file per policy behind the contract of ``policy``."""

from __future__ import annotations

from learner.selection.draw import select
from learner.selection.policy import Policy, PolicyState
from learner.selection.registry import policy_from_name, policy_from_state, policy_names

__all__ = [
    "Policy",
    "PolicyState",
    "policy_from_name",
    "policy_from_state",
    "policy_names",
    "select",
]
