"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from learner.selection.fixed import Fixed
from learner.selection.hedge import Hedge
from learner.selection.normal_hedge import NormalHedge
from learner.selection.policy import Policy, PolicyState

_NAME_TO_LEARNING_POLICY: Mapping[str, Callable[..., Policy]] = {
    Hedge.name: Hedge,
    NormalHedge.name: NormalHedge,
}
_NAME_TO_RESTORE: Mapping[str, Callable[[PolicyState], Policy]] = {
    Fixed.name: Fixed.from_state,
    Hedge.name: Hedge.from_state,
    NormalHedge.name: NormalHedge.from_state,
}


def policy_names() -> tuple[str, ...]:
    """Return the names of the policies that learn; ``fixed:<drafter>`` is understood beside."""
    return tuple(sorted(_NAME_TO_LEARNING_POLICY))


def policy_from_name(
    name: str,
    num_drafters: int,
    *,
    prior: ArrayLike | None = None,
    drafter_ids: Sequence[str] | None = None,
) -> Policy:
    """Make a fresh policy.

    Args:
        name: One of ``policy_names()``, or ``fixed:<drafter>`` with a drafter's id, or its index
            where ``drafter_ids`` is None.
        num_drafters: Number of drafters N.
        prior: Probabilities to start from, shape (N,), each > 0; None = uniform. Unread by
            ``fixed``.
        drafter_ids: Ids of the drafters, in order.

    Raises:
        ValueError: If the name or its drafter is unknown, or the prior is no distribution.
    """
    kind, _, drafter = name.partition(":")
    if kind == Fixed.name:
        return Fixed(num_drafters, _drafter_index(name, drafter, num_drafters, drafter_ids))
    if name not in _NAME_TO_LEARNING_POLICY:
        known = ", ".join((f"{Fixed.name}:<drafter>", *policy_names()))
        raise ValueError(f"unknown policy {name!r}, expected one of: {known}")
    return _NAME_TO_LEARNING_POLICY[name](num_drafters, prior=prior)


def policy_from_state(state: PolicyState) -> Policy:
    """Continue a policy from its state.

    Raises:
        ValueError: If no policy has that name or layout version.
    """
    if state.name not in _NAME_TO_RESTORE:
        known = ", ".join(sorted(_NAME_TO_RESTORE))
        raise ValueError(f"state of unknown policy {state.name!r}, expected one of: {known}")
    return _NAME_TO_RESTORE[state.name](state)


def _drafter_index(
    name: str, drafter: str, num_drafters: int, drafter_ids: Sequence[str] | None
) -> int:
    ids: Sequence[Any] = [str(i) for i in range(num_drafters)]
    ids = ids if drafter_ids is None else drafter_ids
    if drafter not in ids:
        raise ValueError(f"policy {name!r} names no drafter, expected one of: {', '.join(ids)}")
    return ids.index(drafter)
