"""Loops over windows and rounds of arms: what the live learner and replay both run.

``cursor`` (1,) is the position of the next window that continues the ring ``begins``; a window
elsewhere restarts it.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from learner.price import arm_losses, pay, rate, restart
from learner.scoring_schedule import PROBABILITY, begin_round, end_round, note_window
from learner.selection.compiled import LEARN, TABLE, VECTOR, Kernel, compiled, pointer
from learner.selection.kernels import charge_sleeping, choose, masked_probabilities

CUBE = types.float64[:, :, ::1]
INDEX = types.int64[::1]
GRID = types.int64[:, ::1]

NUM_ROUND_FIELDS = 4
"""Of a walked round: position, arm (-1 = nobody could draft), length, windows scored."""


@compiled
def leading_drafter(probabilities: NDArray[np.float64], max_tokens: int) -> int:
    """Return the drafter of the most probable arm, counted from 1; 0 = no speculation."""
    return int((np.argmax(probabilities) + max_tokens - 1) // max_tokens)


@compiled
def arms_awake(
    drafter_is_awake: NDArray[np.bool_], max_tokens: int, out: NDArray[np.bool_]
) -> None:
    """Write which arms can be played, (A,): those of the drafters awake, and no speculation."""
    out[0] = True
    for drafter in range(drafter_is_awake.size):
        first = 1 + drafter * max_tokens
        out[first : first + max_tokens] = drafter_is_awake[drafter]


def _learn_windows(
    learn: Any,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    probability: NDArray[np.float64],
    realised: NDArray[np.float64],
    num_levels: NDArray[np.int64],
    starts: NDArray[np.int64],
    seconds: NDArray[np.float64],
    scale: NDArray[np.float64],
    price: NDArray[np.float64],
    schedule: NDArray[np.float64],
    tallies: NDArray[np.float64],
    begins: NDArray[np.float64],
    cursor: NDArray[np.int64],
) -> None:
    losses = np.empty(seconds.size)
    lengths = np.empty(seconds.size)
    shares = np.empty(seconds.size)
    for window in range(starts.size):
        if starts[window] != cursor[0]:
            restart(begins, starts[window])
        cursor[0] = starts[window] + 1
        arm_losses(
            probability[window],
            realised[window],
            num_levels[window],
            starts[window],
            begins,
            seconds,
            rate(price),
            scale,
            losses,
            lengths,
            shares,
        )
        leader = leading_drafter(table[0], begins.shape[1] - 1)
        note_window(schedule, tallies, shares, lengths, leader)
        charge_sleeping(losses, table[0])
        learn(table, numbers, losses)


LEARN_WINDOWS = types.void(
    types.FunctionType(LEARN),
    *(TABLE, VECTOR, CUBE, CUBE, INDEX, INDEX),
    *(VECTOR, VECTOR, VECTOR, VECTOR, TABLE, TABLE, INDEX),
)


@cache
def learn_windows() -> Kernel:
    """Return the compiled loop over scored windows in order.

    It takes a policy's kernel, table and numbers; the windows' probability and realised
    acceptance, each (W, N, K_max), levels (W,) and starts (W,); and seconds (A,), scale, price,
    schedule, tallies, begins and cursor, of which the last four and the policy change in place.
    """
    return pointer(_learn_windows, LEARN_WINDOWS)


def _end_round(
    table: NDArray[np.float64],
    seconds: NDArray[np.float64],
    price: NDArray[np.float64],
    schedule: NDArray[np.float64],
    tallies: NDArray[np.float64],
    max_tokens: int,
    arm: int,
    length: int,
) -> None:
    pay(price, float(length), seconds[arm])
    end_round(schedule, tallies, arm, float(length), leading_drafter(table[0], max_tokens))


finish_round = compiled(_end_round)
"""Pay for a round and let the alarm hear its length; price and schedule change in place."""


@compiled
def emitted_tokens(accepted: NDArray[np.int16], arm: int, max_tokens: int) -> int:
    """Return what a round with an arm emits, bonus included, where (N,) would be accepted."""
    if arm == 0:
        return 1
    return min(int(accepted[(arm - 1) // max_tokens]), (arm - 1) % max_tokens + 1) + 1


@compiled
def cover_windows(
    starts: NDArray[np.int64], first: int, end: int, scores: bool, is_scored: NDArray[np.bool_]
) -> int:
    """Write whether a round scores the windows from ``first`` that start before ``end``.

    Returns the next window.
    """
    while first < starts.size and starts[first] < end:
        is_scored[first] = scores
        first += 1
    return first


def _walk(
    learn_windows: Any,
    learn: Any,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    probability: NDArray[np.float64],
    realised: NDArray[np.float64],
    num_levels: NDArray[np.int64],
    starts: NDArray[np.int64],
    ready_at: NDArray[np.int64],
    block: int,
    accepted: NDArray[np.int16],
    is_idle: NDArray[np.bool_],
    seconds: NDArray[np.float64],
    scoring_seconds: float,
    scale: NDArray[np.float64],
    price: NDArray[np.float64],
    schedule: NDArray[np.float64],
    tallies: NDArray[np.float64],
    begins: NDArray[np.float64],
    cursor: NDArray[np.int64],
    coins: NDArray[np.float64],
    score_coins: NDArray[np.float64],
    mode: int,
    last: NDArray[np.float64],
    rounds: NDArray[np.int64],
    probabilities: NDArray[np.float64],
) -> int:
    num_positions = accepted.shape[0]
    num_windows = starts.size
    max_tokens = begins.shape[1] - 1
    chances = np.empty(seconds.size)
    is_awake = np.empty(seconds.size, dtype=np.bool_)
    is_scored = np.zeros(num_windows, dtype=np.bool_)
    previous = int(last[0])
    position = num_learned = num_ready = num_begun = num_rounds = 0
    while True:
        at_end = position >= num_positions
        while num_ready < num_windows and (at_end or ready_at[num_ready] <= position):
            num_ready += 1
        if at_end or num_ready - num_learned >= block:
            while num_learned < num_ready:
                at, num_learned = num_learned, num_learned + 1
                if is_scored[at]:
                    learn_windows(
                        learn,
                        table,
                        numbers,
                        probability[at : at + 1],
                        realised[at : at + 1],
                        num_levels[at : at + 1],
                        starts[at : at + 1],
                        seconds,
                        scale,
                        price,
                        schedule,
                        tallies,
                        begins,
                        cursor,
                    )
        if at_end:
            break
        num_begun = cover_windows(starts, num_begun, position, False, is_scored)
        has_window = num_begun < num_windows and starts[num_begun] == position
        if not has_window:
            if is_idle[position]:
                rounds[num_rounds] = (position, -1, 1, 0)
                num_rounds += 1
            position += 1
            continue
        arms_awake(accepted[position] >= 0, max_tokens, is_awake)
        masked_probabilities(table[0], is_awake, chances)
        arm = choose(mode, chances, last[1:], previous, coins[num_rounds])
        last[1:] = chances
        previous = arm
        share = rate(price) * scoring_seconds
        scores = begin_round(schedule, share, score_coins[num_rounds])
        probabilities[num_rounds, 0] = chances[arm]
        probabilities[num_rounds, 1] = schedule[PROBABILITY]
        length = emitted_tokens(accepted[position], arm, max_tokens)
        length = min(length, num_positions - position)
        first, num_begun = (
            num_begun,
            cover_windows(starts, num_begun, position + length, scores, is_scored),
        )
        rounds[num_rounds] = (position, arm, length, scores * (num_begun - first))
        num_rounds += 1
        finish_round(table, seconds, price, schedule, tallies, max_tokens, arm, length)
        position += length
    last[0] = previous
    return num_rounds


@cache
def walk() -> Kernel:
    """Return the compiled walk of one request; see ``learner.priced_walk``."""
    return pointer(
        _walk,
        types.int64(
            types.FunctionType(LEARN_WINDOWS),
            types.FunctionType(LEARN),
            *(TABLE, VECTOR, CUBE, CUBE, INDEX, INDEX, INDEX, types.int64),
            *(types.int16[:, ::1], types.boolean[::1], VECTOR, types.float64),
            *(VECTOR, VECTOR, VECTOR, TABLE, TABLE, INDEX),
            *(VECTOR, VECTOR, types.int64, VECTOR, GRID, TABLE),
        ),
    )
