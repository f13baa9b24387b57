"""What a published policy says of the heads of a stream, before a request of it was seen here.

The learner publishes, per drafter, its mean loss over the stream's scored windows, less the mean
of all drafters there (``learner.prior``). The loss is ``1 - length / (K + 1)``, and one who drafts
nothing has length 1: the difference between the two is thus the head's mean number of accepted
tokens. The chance of a level is the one with which every level would give that number.
"""

from __future__ import annotations

import numpy as np

from schemas.events import PolicyPublished

MOST_OBSERVATIONS = 16.0
"""Observations that a published mean counts as, at most: this process sees what it serves."""

EXCESS, WINDOWS = "excess_loss", "num_windows"


def published_chances(policy: PolicyPublished, none_id: str) -> dict[str, tuple[float, float]]:
    """Return per drafter (chance of a level, observations it counts as); empty if not told.

    Args:
        policy: Of one stream.
        none_id: The drafter that proposes nothing.
    """
    shape = (len(policy.drafters),)
    excess, windows = (policy.accumulators.get(name) for name in (EXCESS, WINDOWS))
    ids = [one.drafter_id for one in policy.drafters]
    if excess is None or windows is None or excess.shape != shape or windows.shape != shape:
        return {}
    if none_id not in ids or windows[ids.index(none_id)] <= 0.0:
        return {}
    means = excess / np.maximum(windows, 1e-9)
    saved = means[ids.index(none_id)] - means
    return {
        one: (
            level_chance(float(saved[i] * (num_levels + 1)), int(num_levels)),
            min(float(windows[i]), MOST_OBSERVATIONS),
        )
        for i, (one, num_levels) in enumerate(zip(ids, policy.num_speculative_tokens, strict=True))
        if windows[i] > 0.0 and num_levels > 0
    }


def level_chance(num_accepted: float, num_levels: int) -> float:
    """Return the chance r of every level with ``r + r^2 + .. + r^K`` accepted tokens, in [0, 1]."""
    low, high = 0.0, 1.0
    powers = np.arange(1, num_levels + 1)
    for _ in range(40):
        middle = 0.5 * (low + high)
        if (middle**powers).sum() < num_accepted:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)
