"""Loops over windows and rounds that call a policy's kernels: the one way a policy runs.

The live learner follows windows as they complete, replay walks whole requests. Both end in the
same compiled ``learn``, so they cannot disagree.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from learner.selection.compiled import (
    LEARN,
    LEARN_ROUND,
    TABLE,
    VECTOR,
    Kernel,
    address,
    compiled,
    pointer,
)

SAMPLE, ARGMAX, STICKY = 0, 1, 2
"""How a drafter is chosen from probabilities."""

ASLEEP = -1
"""In ``accepted``: this drafter cannot draft here."""


@compiled
def charge_sleeping(losses: NDArray[np.float64], probabilities: NDArray[np.float64]) -> None:
    """Replace NaN losses by what the awake ones lost together, in place; 0 if all sleep."""
    mass = 0.0
    charged = 0.0
    total = 0.0
    num_awake = 0
    for index in range(losses.size):
        if not np.isnan(losses[index]):
            mass += probabilities[index]
            charged += probabilities[index] * losses[index]
            total += losses[index]
            num_awake += 1
    if num_awake == losses.size:
        return
    if mass > 0.0:
        charge = min(charged / mass, 1.0)
    elif num_awake > 0:
        charge = total / num_awake
    else:
        charge = 0.0
    for index in range(losses.size):
        if np.isnan(losses[index]):
            losses[index] = charge


@compiled
def masked_probabilities(
    probabilities: NDArray[np.float64], is_awake: NDArray[np.bool_], out: NDArray[np.float64]
) -> None:
    """Write the probabilities of the awake, sum 1; equal shares if all mass is asleep."""
    total = 0.0
    num_awake = 0
    for index in range(out.size):
        out[index] = probabilities[index] if is_awake[index] else 0.0
        total += out[index]
        num_awake += is_awake[index]
    for index in range(out.size):
        if total > 0.0:
            out[index] /= total
        else:
            out[index] = 1.0 / num_awake if is_awake[index] else 0.0


@compiled
def sharpen_to_best(probabilities: NDArray[np.float64]) -> None:
    """Share all mass equally among the largest, in place."""
    largest = probabilities.max()
    num_largest = 0
    for index in range(probabilities.size):
        num_largest += probabilities[index] == largest
    for index in range(probabilities.size):
        probabilities[index] = 1.0 / num_largest if probabilities[index] == largest else 0.0


@compiled
def draw(probabilities: NDArray[np.float64], coin: float) -> int:
    """Return the index that ``coin`` in [0, 1) falls on; never one of probability 0."""
    total = 0.0
    for index in range(probabilities.size):
        total += probabilities[index]
    reached = 0.0
    last = 0
    for index in range(probabilities.size):
        if probabilities[index] > 0.0:
            reached += probabilities[index]
            last = index
            if coin * total < reached:
                return index
    return last


@compiled
def draw_sticky(
    probabilities: NDArray[np.float64],
    previous: NDArray[np.float64],
    previous_index: int,
    coin: float,
) -> int:
    """Keep the previous drafter as often as the marginals allow, else draw from what grew.

    The maximal coupling of the previous and the present distribution: the marginals are exactly
    ``probabilities``, and a switch is as rare as it can be (total variation distance). The
    idea, for weights that only fall, is the shrinking dartboard of Geulen, Voecking and
    Winkler, "Regret minimization for online buffering problems" (2010).
    """
    keep = min(1.0, probabilities[previous_index] / previous[previous_index])
    if coin < keep:
        return previous_index
    grown = np.maximum(probabilities - previous, 0.0)
    if not grown.sum() > 0.0:
        return draw(probabilities, coin)
    return draw(grown, (coin - keep) / (1.0 - keep))


@compiled
def choose(
    mode: int,
    probabilities: NDArray[np.float64],
    previous: NDArray[np.float64],
    previous_index: int,
    coin: float,
) -> int:
    """Choose a drafter from ``probabilities``, which ARGMAX sharpens in place.

    Args:
        mode: ``SAMPLE``, ``ARGMAX`` (ties drawn) or ``STICKY``.
        probabilities: Of the awake, shape (N,), sum 1.
        previous: Of the last choice, shape (N,); unread where ``previous_index`` is -1.
        previous_index: The drafter chosen last, -1 for none.
        coin: Uniform in [0, 1).
    """
    if mode == ARGMAX:
        sharpen_to_best(probabilities)
    elif mode == STICKY and previous_index >= 0 and previous[previous_index] > 0.0:
        return draw_sticky(probabilities, previous, previous_index, coin)
    return draw(probabilities, coin)


@compiled
def find_awake(accepted: NDArray[np.int16], is_awake: NDArray[np.bool_]) -> bool:
    """Write who can draft at a position, (N,), and return whether anybody can."""
    any_awake = False
    for index in range(accepted.size):
        is_awake[index] = accepted[index] > ASLEEP
        any_awake |= is_awake[index]
    return any_awake


@compiled
def learn_next(
    learn: Any,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    losses: NDArray[np.float64],
    first: int,
    last: int,
    buffer: NDArray[np.float64],
) -> int:
    """Learn the windows ``first`` to ``last``, exclusive, and return which comes next."""
    for window in range(first, last):
        buffer[:] = losses[window]
        charge_sleeping(buffer, table[0])
        learn(table, numbers, buffer)
    return max(first, last)


def _follow(
    learn: Any,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    losses: NDArray[np.float64],
    after: NDArray[np.float64],
) -> None:
    buffer = np.empty(losses.shape[1])
    for window in range(losses.shape[0]):
        learn_next(learn, table, numbers, losses, window, window + 1, buffer)
        after[window] = table[0]


def _walk(
    learn: Any,
    learn_round: Any,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    losses: NDArray[np.float64],
    ready_at: NDArray[np.int64],
    block: int,
    accepted: NDArray[np.int16],
    agreement_loss: NDArray[np.float64],
    num_levels: int,
    is_idle: NDArray[np.bool_],
    coins: NDArray[np.float64],
    mode: int,
    last: NDArray[np.float64],
    rounds: NDArray[np.int64],
    probabilities: NDArray[np.float64],
) -> int:
    num_positions, num_drafters = accepted.shape
    num_windows = losses.shape[0]
    buffer = np.empty(num_drafters)
    is_awake = np.empty(num_drafters, dtype=np.bool_)
    previous_index = int(last[0])
    position = num_learned = num_ready = num_rounds = 0
    while position < num_positions:
        if not find_awake(accepted[position], is_awake):
            if is_idle[position]:
                rounds[num_rounds] = (position, -1, 1)
                num_rounds += 1
            position += 1
            continue
        while num_ready < num_windows and ready_at[num_ready] <= position:
            num_ready += 1
        if num_ready - num_learned >= block:
            num_learned = learn_next(learn, table, numbers, losses, num_learned, num_ready, buffer)
        masked_probabilities(table[0], is_awake, buffer)
        index = choose(mode, buffer, last[1:], previous_index, coins[num_rounds])
        last[1:] = buffer
        previous_index = index
        length = min(int(accepted[position, index]) + 1, num_positions - position)
        rounds[num_rounds] = (position, index, length)
        probabilities[num_rounds] = buffer[index]
        num_rounds += 1
        length_loss = 1.0 - (accepted[position, index] + 1.0) / (num_levels + 1.0)
        learn_round(
            table, numbers, index, buffer[index], length_loss, agreement_loss[position, index]
        )
        position += length
    # A request's end completes its last windows; the next request starts from them.
    learn_next(learn, table, numbers, losses, num_learned, num_windows, buffer)
    last[0] = previous_index
    return num_rounds


def learn_nothing(table: NDArray[np.float64], numbers: NDArray[np.float64], losses: Any) -> None:
    """Take a window and stay: a bandit does not see it."""


def learn_nothing_of_rounds(
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    index: int,
    probability: float,
    length_loss: float,
    agreement_loss: float,
) -> None:
    """Take a round and stay: the windows tell more."""


@cache
def _compiled_follow() -> Kernel:
    learn = types.FunctionType(LEARN)
    return pointer(_follow, types.void(learn, TABLE, VECTOR, TABLE, TABLE))


@cache
def _follower(learn: Kernel) -> Kernel:
    return partial(_compiled_follow(), address(learn, LEARN))


@cache
def _compiled_walk() -> Kernel:
    signature = types.int64(
        types.FunctionType(LEARN),
        types.FunctionType(LEARN_ROUND),
        TABLE,
        VECTOR,
        TABLE,
        types.int64[::1],
        types.int64,
        types.int16[:, ::1],
        TABLE,
        types.int64,
        types.boolean[::1],
        VECTOR,
        types.int64,
        VECTOR,
        types.int64[:, ::1],
        VECTOR,
    )
    return pointer(_walk, signature)


def follow(
    learn: Kernel,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    losses: NDArray[np.float64],
    after: NDArray[np.float64],
) -> None:
    """Learn windows in order, in place, and write the probabilities after each.

    Args:
        learn: A policy's kernel.
        table: Its rows.
        numbers: Its numbers.
        losses: Shape (W, N), float64; NaN = asleep.
        after: Shape (W, N), written.
    """
    _follower(learn)(table, numbers, losses, after)


def walk(
    learn: Kernel,
    learn_round: Kernel,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    *,
    losses: NDArray[np.float64],
    ready_at: NDArray[np.int64],
    block: int,
    accepted: NDArray[np.int16],
    agreement_loss: NDArray[np.float64],
    num_levels: int,
    is_idle: NDArray[np.bool_],
    coins: NDArray[np.float64],
    mode: int,
    last: NDArray[np.float64],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Decode a request of P positions on paper, learning as its rounds go; state in place.

    Args:
        learn: A policy's kernel of windows.
        learn_round: Its kernel of rounds.
        table: Its rows.
        numbers: Its numbers.
        losses: Of the windows in order, (W, N), float64; NaN = asleep.
        ready_at: Position from which on each window may be learned, (W,), not decreasing. All
            that are left are learned at the end.
        block: Windows that are learned at once, >= 1.
        accepted: Tokens each drafter would have had accepted from each position, (P, N);
            ``ASLEEP`` where it cannot draft.
        agreement_loss: 1 - mean acceptance probability of the block, (P, N), in [0, 1].
        num_levels: K, the scale of length losses.
        is_idle: Where nobody can draft but a round of one token is due, (P,).
        coins: Uniform in [0, 1), one per round, (P,).
        mode: How to choose; see ``choose``.
        last: The last choice, (1 + N,): its index or -1, and the probabilities it was drawn from;
            written.

    Returns:
        Per round its position, drafter (-1 = none) and length, int64 (R, 3), and the probability
        of its choice (R,); 1 where there was none.
    """
    num_positions = accepted.shape[0]
    rounds = np.empty((num_positions, 3), dtype=np.int64)
    probabilities = np.ones(num_positions)
    count = _compiled_walk()(
        address(learn, LEARN),
        address(learn_round, LEARN_ROUND),
        table,
        numbers,
        losses,
        ready_at,
        block,
        accepted,
        agreement_loss,
        num_levels,
        is_idle,
        coins,
        mode,
        last,
        rounds,
        probabilities,
    )
    return rounds[:count], probabilities[:count]
