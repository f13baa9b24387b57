"""A policy's state on its way: from one pool to another, in published policies and in events.

Travelling, a state is two arrays: the table's rows one after the other, and the numbers. The
policy's specification, beside them as text, says how they are read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from learner.selection.base import CompiledPolicy
from learner.selection.policy import PolicyState
from learner.selection.registry import POLICIES, PolicySpec

NEWCOMER_SHARE = 0.05
"""Probability set aside for drafters that a policy does not know yet."""


def copied(policy: CompiledPolicy) -> CompiledPolicy:
    """Return a policy that goes on from the same state, apart from this one."""
    twin = type(policy).__new__(type(policy))
    twin.table, twin.numbers = policy.table.copy(), policy.numbers.copy()
    return twin


def over_pool(
    policy: CompiledPolicy, known_ids: Sequence[str], drafter_ids: Sequence[str]
) -> CompiledPolicy:
    """Return a copy of a policy over another pool, bit for bit if the pool is the same.

    A drafter is known by its id alone: with new weights it keeps its mass. Newcomers share
    ``NEWCOMER_SHARE`` of it.

    Args:
        policy: Over ``known_ids``, in their order.
        known_ids: Ids of its drafters.
        drafter_ids: Ids of the new pool, at least one.
    """
    if list(known_ids) == list(drafter_ids):
        return copied(policy)
    id_to_place = {drafter_id: place for place, drafter_id in enumerate(known_ids)}
    places = [id_to_place.get(drafter_id, -1) for drafter_id in drafter_ids]
    return policy.with_drafters(places, share=NEWCOMER_SHARE / max(places.count(-1), 1))


def packed(policy: CompiledPolicy | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (table, numbers), both flat, as they travel; both empty for None."""
    if policy is None:
        return np.empty(0), np.empty(0)
    return policy.table.ravel().copy(), policy.numbers.copy()


def unpacked(
    spec: PolicySpec,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    num_drafters: int,
) -> CompiledPolicy:
    """Return the policy that ``packed`` was given.

    Raises:
        ValueError: If the arrays are no state of this policy over so many drafters: another build
            made them.
    """
    kind = POLICIES.get(spec.name)
    if kind is None:
        raise ValueError(f"policy {str(spec)!r} carries no state, found one of {table.size} values")
    if not num_drafters or table.size % num_drafters:
        raise ValueError(
            f"state of {spec.name!r} has {table.size} values, expected rows of {num_drafters}"
        )
    arrays = {"table": table.reshape(-1, num_drafters), "numbers": numbers}
    return kind.from_state(PolicyState(name=kind.name, version=kind.version, arrays=arrays))
