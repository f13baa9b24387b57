"""Who drafts for each row, and how much: expected tokens against the seconds they cost.

At the running rate θ (tokens per second) a second is worth θ tokens, so a draft of K tokens by
drafter i is worth ``Σ_{k<=K} reach_k - θ (token K + draft seconds)``, where ``reach_k`` is the
chance that its first k tokens are all accepted. The longest worthwhile draft is found level by
level, as ``reach`` falls and the price does not; "no speculation" is worth 0. With the running
rate as price the best choice is the one with the largest ratio of tokens to seconds (Dinkelbach
1967; ``learner.price``).

Axes: B rows, D drafters, K levels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inference.vllm_plugin.step_costs import StepCost


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
        return 0.05
    return cost.token * rate


def pays_to_begin(values: NDArray[np.float64], cost: StepCost | None, rate: float) -> bool:
    """Tell whether the drafts of all rows together earn what drafting at all costs."""
    first = 0.0 if cost is None else cost.first * rate
    return bool(values.sum() > first)
