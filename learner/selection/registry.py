"""Policies by name, and the specification of a policy as one line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from numpy.typing import ArrayLike

from learner.selection import kernels
from learner.selection.ada_normal_hedge import AdaNormalHedge
from learner.selection.ada_normal_hedge_grid import AdaNormalHedgeGrid
from learner.selection.base import Choice, CompiledPolicy, Loss, Objective, Scope
from learner.selection.exp3spec import Exp3Spec
from learner.selection.fixed import Fixed
from learner.selection.fixed_share import FixedShare
from learner.selection.hedge import Hedge
from learner.selection.leader import DiscountedFollowTheLeader, FollowTheLeader
from learner.selection.metasd_ucb import MetaSdUcb
from learner.selection.mixing_past_posteriors import MixingPastPosteriors
from learner.selection.normal_hedge import NormalHedge
from learner.selection.policy import PolicyState
from learner.selection.squint import Squint
from learner.selection.ucb import Ucb
from learner.selection.ucbspec import UcbSpec

DEFAULT_POLICY = AdaNormalHedgeGrid.name

POLICIES: Mapping[str, type[CompiledPolicy]] = {
    policy.name: policy
    for policy in (
        AdaNormalHedge,
        AdaNormalHedgeGrid,
        DiscountedFollowTheLeader,
        Exp3Spec,
        FixedShare,
        FollowTheLeader,
        Hedge,
        MetaSdUcb,
        MixingPastPosteriors,
        NormalHedge,
        Squint,
        Ucb,
        UcbSpec,
    )
}

OPTIONS: Mapping[str, tuple[str, ...]] = {
    "scope": get_args(Scope),
    "choice": get_args(Choice),
    "loss": get_args(Loss),
    "objective": get_args(Objective),
}


def policy_names() -> tuple[str, ...]:
    """Return the names of the policies that learn; ``fixed:<drafter>`` is understood beside."""
    return tuple(sorted(POLICIES))


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicySpec:
    """A policy with everything it needs beside the pool.

    Attributes:
        name: One of ``policy_names()``, or ``fixed``.
        drafter: The drafter of ``fixed``: its id, or its index where ids are unknown.
        parameters: Parameters that differ from the policy's own.
        scope: Start every request afresh from the prior; or carry the state along the stream; or
            do that and, at the start of each request, move it towards what a router and other
            streams say (``learner.request_start``).
        choice: Draw from the probabilities, take the largest, or draw with as few switches as
            the same marginals allow.
        loss: What it learns of a window: its length, level 1 alone, or half of each.
        objective: Tokens per verification, chosen among the drafters; or tokens per second, chosen
            among arms of (drafter, K) with what they cost (``learner.arm_learner``). The latter
            has its own loss and goes along a stream.
    """

    name: str
    drafter: str = ""
    parameters: tuple[tuple[str, float], ...] = ()
    scope: Scope
    choice: Choice
    loss: Loss
    objective: Objective = "tokens"

    def __str__(self) -> str:
        """Return the text that ``parse_policy`` reads back, without what is default."""
        if self.name == Fixed.name:
            return f"{self.name}:{self.drafter}"
        policy = POLICIES[self.name]
        options = [f"{key}={value!r}" for key, value in self.parameters]
        options += [
            f"{option}={getattr(self, option)}"
            for option in OPTIONS
            if getattr(self, option) != getattr(policy, option)
        ]
        return f"{self.name}:{','.join(options)}" if options else self.name

    def build(
        self,
        num_drafters: int,
        *,
        prior: ArrayLike | None = None,
        drafter_ids: Sequence[str] | None = None,
        num_speculative_tokens: int | None = None,
    ) -> CompiledPolicy:
        """Make a fresh policy.

        Args:
            num_drafters: Number of drafters N.
            prior: Probabilities to start from, shape (N,), each > 0; None = uniform. Unread by
                ``fixed``.
            drafter_ids: Ids of the drafters, in order.
            num_speculative_tokens: K, for the policies that have it as a parameter, unless the
                specification gives one.

        Raises:
            ValueError: If the drafter is unknown, the prior no distribution, or a parameter wrong.
        """
        if self.name == Fixed.name:
            return Fixed(num_drafters, self._drafter_index(num_drafters, drafter_ids))
        policy = POLICIES[self.name]
        parameters = dict(self.parameters)
        if num_speculative_tokens is not None and "num_speculative_tokens" in policy.parameters:
            parameters.setdefault("num_speculative_tokens", float(num_speculative_tokens))
        return policy(num_drafters, prior=prior, **parameters)

    def _drafter_index(self, num_drafters: int, drafter_ids: Sequence[str] | None) -> int:
        ids: Sequence[Any] = [str(i) for i in range(num_drafters)]
        ids = ids if drafter_ids is None else drafter_ids
        if self.drafter not in ids:
            raise ValueError(
                f"policy {str(self)!r} names no drafter, expected one of: {', '.join(ids)}"
            )
        return ids.index(self.drafter)


def parse_policy(text: str) -> PolicySpec:
    """Read ``name``, ``name:key=value,...`` or ``fixed:<drafter>``.

    Keys are the policy's parameters and ``scope``, ``choice``, ``loss`` and ``objective``.

    Raises:
        ValueError: If the policy, a key or a value is unknown, with what is known.
    """
    name, _, rest = text.partition(":")
    if name == Fixed.name:
        return PolicySpec(name=name, drafter=rest, scope="request", choice="sample", loss="length")
    if name not in POLICIES:
        known = ", ".join((f"{Fixed.name}:<drafter>", *policy_names()))
        raise ValueError(f"unknown policy {name!r}, expected one of: {known}")
    policy = POLICIES[name]
    options: dict[str, Any] = {option: getattr(policy, option) for option in OPTIONS}
    parameters: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key in OPTIONS:
            options[key] = _option(text, key, value)
        else:
            parameters[key] = _parameter(text, policy, key, value)
    _refuse_seconds(text, policy, options)
    _refuse_both(text, policy, options)
    kept = tuple((k, v) for k, v in parameters.items() if v != policy.parameters[k])
    return PolicySpec(name=name, parameters=kept, **options)


def _refuse_seconds(text: str, policy: type[CompiledPolicy], options: Mapping[str, str]) -> None:
    """Refuse an objective of seconds for a policy that cannot learn arms from windows."""
    if options["objective"] != "seconds":
        return
    if policy.kernel is kernels.learn_nothing:
        raise ValueError(f"policy {text!r}: objective=seconds, but it learns rounds alone")
    if options["scope"] != "stream":
        raise ValueError(
            f"policy {text!r}: objective=seconds with scope={options['scope']}, expected "
            "scope=stream: the price of time is learned along a stream"
        )


def _refuse_both(text: str, policy: type[CompiledPolicy], options: Mapping[str, str]) -> None:
    """Refuse scope ``both`` for a policy whose state is no belief that could be moved."""
    if options["scope"] == "both" and not policy.posteriors:
        able = ", ".join(name for name, one in sorted(POLICIES.items()) if one.posteriors)
        raise ValueError(f"policy {text!r}: scope=both, but it keeps sums; possible with: {able}")


def _option(text: str, key: str, value: str) -> str:
    if value not in OPTIONS[key]:
        raise ValueError(f"policy {text!r}: {key}={value!r}, expected {' or '.join(OPTIONS[key])}")
    return value


def _parameter(text: str, policy: type[CompiledPolicy], key: str, value: str) -> float:
    if key not in policy.parameters:
        known = ", ".join((*policy.parameters, *OPTIONS))
        raise ValueError(f"policy {text!r}: unknown key {key!r}, expected one of: {known}")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"policy {text!r}: {key}={value!r} is no number") from None
    policy.check_parameter(key, number)
    return number


def policy_from_name(
    name: str,
    num_drafters: int,
    *,
    prior: ArrayLike | None = None,
    drafter_ids: Sequence[str] | None = None,
) -> CompiledPolicy:
    """Make a fresh policy from its specification; see ``PolicySpec.build``."""
    return parse_policy(name).build(num_drafters, prior=prior, drafter_ids=drafter_ids)


def policy_from_state(state: PolicyState) -> CompiledPolicy:
    """Continue a policy from its state.

    Raises:
        ValueError: If no policy has that name or layout version.
    """
    policies: dict[str, type[CompiledPolicy]] = {**POLICIES, Fixed.name: Fixed}
    if state.name not in policies:
        known = ", ".join(sorted(policies))
        raise ValueError(f"state of unknown policy {state.name!r}, expected one of: {known}")
    return policies[state.name].from_state(state)
