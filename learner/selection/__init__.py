"""Selection policies: one file per policy behind the contract of ``policy``."""

from __future__ import annotations

from learner.selection.base import CompiledPolicy
from learner.selection.draw import select
from learner.selection.policy import Policy, PolicyState, RoundFeedback
from learner.selection.registry import (
    DEFAULT_POLICY,
    PolicySpec,
    parse_policy,
    policy_from_name,
    policy_from_state,
    policy_names,
)

__all__ = [
    "DEFAULT_POLICY",
    "CompiledPolicy",
    "Policy",
    "PolicySpec",
    "PolicyState",
    "RoundFeedback",
    "parse_policy",
    "policy_from_name",
    "policy_from_state",
    "policy_names",
    "select",
]
