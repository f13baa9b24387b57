"""The price of time: what a second is worth in tokens, and what every arm loses at that price.

Tokens per second is a ratio of sums. Its best arm is found without ever averaging ratios: with
the running rate θ = tokens / seconds as price, the arm that minimises the mean of θ C - y (C its
seconds, y its length) is the one whose ratio E[y] / E[C] is largest once θ is that ratio
(Dinkelbach, "On nonlinear fractional programming", 1967).

The mean goes over *rounds*, not over positions. A window starts at every position, but an arm's
rounds begin only where its own earlier ones ended: a long accepted stretch has many positions and
few rounds. So every arm is walked along, window by window: ``begins`` holds the chance that one
of its rounds begins at a position, and a window counts by that share. Under a greedy target the
shares are 0 or 1, and what an arm was charged adds up to θ x its seconds - its tokens exactly.
If all windows counted alike, long drafts would look better than they are.

Kernels share three arrays: ``price`` (memory, tokens, seconds), ``begins`` (A, K_max + 1), a ring
over positions, and ``scale`` (low, high).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.arms import ArmCosts
from learner.selection.compiled import compiled

MEMORY, TOKENS, SECONDS = range(3)
LOW, HIGH = range(2)

PRICE_MEMORY = 0.995
"""Per round: slower than the policy, so that losses change little under its feet."""

FIRST_ROUNDS = 20.0
"""Rounds of no speculation that a price starts from."""


def first_price(costs: ArmCosts, *, memory: float = PRICE_MEMORY) -> NDArray[np.float64]:
    """Return the price of a stream that has seen nothing, that of no speculation, (3,).

    Raises:
        ValueError: If the memory is outside (0, 1].
    """
    if not 0.0 < memory <= 1.0:
        raise ValueError(f"memory={memory} of the price outside (0, 1]")
    return np.array([memory, FIRST_ROUNDS, FIRST_ROUNDS * costs.verify_seconds[0]])


@compiled
def rate(price: NDArray[np.float64]) -> float:
    """Return θ, tokens per second."""
    return float(price[TOKENS] / price[SECONDS])


@compiled
def pay(price: NDArray[np.float64], length: float, seconds: float) -> None:
    """Add a round to the decayed sums, in place."""
    price[TOKENS] = price[MEMORY] * price[TOKENS] + length
    price[SECONDS] = price[MEMORY] * price[SECONDS] + seconds


def fresh_begins(num_arms: int, max_speculative_tokens: int) -> NDArray[np.float64]:
    """Return the ring of a request that has not begun, (A, K_max + 1)."""
    return np.zeros((num_arms, max_speculative_tokens + 1))


@compiled
def restart(begins: NDArray[np.float64], position: int) -> None:
    """Let a round of every arm begin at ``position``: after a request's start, or a gap."""
    begins[:] = 0.0
    begins[:, position % begins.shape[1]] = 1.0


@compiled
def walk_drafter(
    probability: NDArray[np.float64],
    realised: NDArray[np.float64],
    num_levels: int,
    slot: int,
    shares: NDArray[np.float64],
    begins: NDArray[np.float64],
    lengths: NDArray[np.float64],
) -> None:
    """Write the expected lengths of one drafter's arms and say where their next rounds begin.

    Args:
        probability: Of the drafter's levels, (K_max,).
        realised: Likewise.
        num_levels: Levels that exist; no arm is accepted beyond.
        slot: Of the window's position in the ring.
        shares: How far each of its arms has a round here, (K_max,).
        begins: Its arms' part of the ring, (K_max, K_max + 1); changed.
        lengths: (K_max,), written.
    """
    num_slots = begins.shape[1]
    reach = 1.0
    length = 1.0
    for level in range(num_slots - 1):
        gamma = 0.0
        accept = 0.0
        if level < num_levels:
            gamma = probability[level]
            accept = realised[level]
        missed = reach * (1.0 - accept)
        if missed > 0.0:
            # A miss at this level ends the round of every arm that drafts as far.
            after = (slot + level + 1) % num_slots
            for longer in range(level, num_slots - 1):
                begins[longer, after] += shares[longer] * missed
        length += reach * gamma
        reach *= accept
        begins[level, (slot + level + 2) % num_slots] += shares[level] * reach
        lengths[level] = length


@compiled
def arm_losses(
    probability: NDArray[np.float64],
    realised: NDArray[np.float64],
    num_levels: int,
    position: int,
    begins: NDArray[np.float64],
    seconds: NDArray[np.float64],
    theta: float,
    scale: NDArray[np.float64],
    losses: NDArray[np.float64],
    lengths: NDArray[np.float64],
    shares: NDArray[np.float64],
) -> None:
    """Write what every arm loses in one window, share x (θ C - y), mapped to [0, 1].

    Args:
        probability: Of the window, (K_max, N), transposed to (N, K_max); NaN = not scored.
        realised: Likewise.
        num_levels: Levels that exist, in 1..K_max.
        position: Where the window starts.
        begins: The ring; its slot of ``position`` is used up.
        seconds: Of every arm's round, (A,).
        theta: The price.
        scale: (low, high), tokens that become 0 and 1.
        losses: (A,), written; NaN = asleep.
        lengths: Expected lengths, (A,), written; NaN likewise.
        shares: Chance that a round of the arm begins here, (A,), written.
    """
    num_slots = begins.shape[1]
    max_tokens = num_slots - 1
    slot = position % num_slots
    following = (position + 1) % num_slots
    shares[:] = begins[:, slot]
    begins[:, slot] = 0.0
    begins[0, following] += shares[0]
    lengths[0] = 1.0
    for drafter in range(probability.shape[0]):
        first = 1 + drafter * max_tokens
        last = first + max_tokens
        if np.isnan(realised[drafter, 0]):
            # Asleep it would have emitted one token.
            lengths[first:last] = np.nan
            begins[first:last, following] += shares[first:last]
        else:
            walk_drafter(
                probability[drafter],
                realised[drafter],
                num_levels,
                slot,
                shares[first:last],
                begins[first:last],
                lengths[first:last],
            )
    for arm in range(losses.size):
        tokens = shares[arm] * (theta * seconds[arm] - lengths[arm])
        loss = (tokens - scale[LOW]) / (scale[HIGH] - scale[LOW])
        # Negated, so that NaN stays.
        losses[arm] = 0.0 if loss < 0.0 else (1.0 if loss > 1.0 else loss)
