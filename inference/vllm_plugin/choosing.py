"""Who drafts for each row, and how much: expected tokens against the seconds they cost.

At the running rate θ (tokens per second) a second is worth θ tokens, so a draft of K tokens by
drafter i is worth ``Σ_{k<=K} reach_k - θ (token K + draft seconds)``, where ``reach_k`` is the
chance that its first k tokens are all accepted. The longest worthwhile draft is found level by
level, as ``reach`` falls and the price does not; "no speculation" is worth 0. With the running
rate as price the best choice is the one with the largest ratio of tokens to seconds (Dinkelbach
1967; ``learner.price``). That says who drafts in each row. How much all rows draft is decided for
them together, since seconds rise with the tokens of the whole step, and not evenly.

Axes: B rows, D drafters, K levels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference.vllm_plugin.step_costs import StepCost

ASSUMED_PRICE = 0.05
"""Tokens that a drafted token costs, before steps were measured."""


def worthwhile(
    chances: NDArray[np.float64], room: NDArray[np.int64], price: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return (levels to draft, what they are worth in tokens), each (B, D).

    Args:
        chances: (B, D, K), chance of each level given those before; 0 where there is none.
        room: (B,), most levels of each row.
        price: Tokens that a drafted token costs, > 0.
    """
    reach = np.cumprod(chances, axis=2)
    levels = np.arange(chances.shape[2])
    pays = (reach > price) & (levels < room[:, None, None])
    gains = np.where(pays, reach - price, 0.0)
    return pays.sum(axis=2), gains.sum(axis=2)


def token_price(cost: StepCost | None, rate: float) -> float:
    """Return what a drafted token costs, in tokens; without measurements, a twentieth."""
    if cost is None or rate <= 0.0:
        return ASSUMED_PRICE
    return cost.token * rate


def pays_to_begin(values: NDArray[np.float64], cost: StepCost | None, rate: float) -> bool:
    """Tell whether the drafts of all rows together earn what drafting at all costs."""
    first = 0.0 if cost is None else cost.first * rate
    return bool(values.sum() > first)


def shared_out(reach: NDArray[np.float64], cost: StepCost | None, rate: float) -> NDArray[np.int64]:
    """Return how many tokens each row drafts, (B,), if the step is to earn the most.

    The surest tokens of all rows come first, and so many of them are drafted that what they are
    expected to bring exceeds what the longer step would have brought by the most.

    Args:
        reach: (B, K), chance that a row's first k tokens are all accepted, falling along a row;
            0 where there are none.
        cost: Of a step; None before it was measured.
        rate: Tokens per second.
    """
    surest_first = np.argsort(-reach, axis=None, kind="stable")
    sure = reach.ravel()[surest_first]
    if cost is None or rate <= 0.0:
        toll = ASSUMED_PRICE * np.arange(1, sure.size + 1)
    else:
        sure = sure[: len(cost.extra)]
        toll = rate * cost.extra[: sure.size]
    worth = np.cumsum(sure) - toll
    count = int(worth.argmax()) + 1 if worth.max() > 0.0 else 0
    is_drafted = np.zeros(reach.size, dtype=np.bool_)
    is_drafted[surest_first[:count]] = True
    levels: NDArray[np.int64] = (is_drafted.reshape(reach.shape) & (reach > 0.0)).sum(axis=1)
    return levels
