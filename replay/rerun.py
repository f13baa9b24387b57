"""Re-running a log: its own rounds from its windows, and any policy over the same text.

The windows say what every drafter would have proposed from every verified position, and the
verified text does not depend on who drafted it. So a request can be decoded again on paper: start
at its first position, choose a drafter, jump by the acceptance length of the window that starts
there, learn the windows which that jump completed, choose again. Where acceptance follows from
the text (greedy target, one-hot drafts) this is exact. With speculative sampling a level is
accepted if a coin of its position falls below the realised acceptance; every drafter and every
policy sees the same coins. A window scored by an unrolled head is exact too: it was scored as it
would have been drafted from its start.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.selection import select
from replay.ports import RequestSelector, SelectorFactory
from replay.requests import RequestTrace
from schemas.events import NO_DRAFTER, ScoredWindows

PROBABILITY_TOLERANCE = 1e-6
"""Events carry selection probabilities as float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """A logged number that the windows do not give."""

    stream: str
    request_id: str
    round_index: int
    quantity: str
    logged: float
    rebuilt: float

    def __str__(self) -> str:
        return (
            f"request {self.request_id} round {self.round_index}: {self.quantity} is "
            f"{self.logged:g} in the log, {self.rebuilt:g} from the windows"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundsCheck:
    """Result of rebuilding rounds.

    Attributes:
        num_rounds: Rounds of the request.
        num_checked: Rounds whose window is in the log and scored for the played drafter, and
            rounds without drafter.
        disagreements: Everything that differs.
    """

    num_rounds: int
    num_checked: int
    disagreements: tuple[Disagreement, ...]


def verify_logged_rounds(request: RequestTrace) -> RoundsCheck:
    """Rebuild the rounds of a request from its windows and report what differs.

    - ``num_accepted_tokens``: the levels accepted in a row by the played drafter in the window at
      the round's first position, as far as it drafted. With speculative sampling only an
      accepted level whose realised acceptance is 0 is a disagreement.
    - ``num_emitted_tokens``: accepted + 1. In the last round an accepted token may end the
      request; it then stands in the place of the bonus.
    - ``first_position``: where the round before ended.
    """
    rounds = request.rounds
    accepted, is_checked = _rebuilt_accepted(request)
    emitted = accepted + 1
    if request.is_complete and emitted.size:
        room = request.end_position - int(rounds.first_position[-1])
        emitted[-1] = min(int(emitted[-1]), room)
        if emitted[-1] == rounds.num_accepted_tokens[-1]:
            accepted[-1] = emitted[-1]
    position = rounds.first_position.astype(np.int64).copy()
    position[1:] = (rounds.first_position + rounds.num_emitted_tokens)[:-1]
    if not request.is_contiguous:
        # A missing segment leaves a hole between its neighbours.
        seams = np.flatnonzero(np.diff(request.round_segment)) + 1
        position[seams] = rounds.first_position[seams]
    disagreements = [
        *_disagreements(request, "num_accepted_tokens", rounds.num_accepted_tokens, accepted),
        *_disagreements(request, "num_emitted_tokens", rounds.num_emitted_tokens, emitted),
        *_disagreements(request, "first_position", rounds.first_position, position),
    ]
    return RoundsCheck(
        num_rounds=emitted.size,
        num_checked=int(is_checked.sum()),
        disagreements=tuple(sorted(disagreements, key=lambda found: found.round_index)),
    )


def _rebuilt_accepted(
    request: RequestTrace,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return accepted tokens per round from the windows, and where there was one to read.

    Where there was none, the logged number stands.
    """
    rounds, windows = request.rounds, request.windows
    rebuilt = rounds.num_accepted_tokens.astype(np.int64)
    is_checked = (rounds.drafter_index == NO_DRAFTER) | (rounds.num_draft_tokens == 0)
    row = np.searchsorted(windows.start, rounds.first_position)
    is_there = np.append(windows.start, -1)[row] == rounds.first_position
    played = np.flatnonzero(is_there & ~is_checked)
    levels = windows.realised_acceptance[row[played], :, rounds.drafter_index[played]]
    is_scored = ~np.isnan(levels[:, :1]).any(axis=1)
    played, levels = played[is_scored], levels[is_scored]
    can_accept = levels >= 1.0 if request.is_deterministic else levels > 0.0
    # Cumulated in int64: the product of many levels must not wrap.
    accepted = np.cumprod(can_accept, axis=1, dtype=np.int64).sum(axis=1)
    accepted = np.minimum(accepted, rounds.num_draft_tokens[played])
    if not request.is_deterministic:
        accepted = np.minimum(accepted, rebuilt[played])
    rebuilt[is_checked] = 0
    rebuilt[played] = accepted
    is_checked[played] = True
    return rebuilt, is_checked


def _disagreements(
    request: RequestTrace,
    quantity: str,
    logged: NDArray[Any],
    rebuilt: NDArray[Any],
    *,
    tolerance: float = 0.0,
) -> list[Disagreement]:
    # Negated, so that a NaN differs.
    agrees = np.abs(logged.astype(np.float64) - rebuilt.astype(np.float64)) <= tolerance
    return [
        Disagreement(
            stream=request.stream,
            request_id=request.request_id,
            round_index=int(index),
            quantity=quantity,
            logged=float(logged[index]),
            rebuilt=float(rebuilt[index]),
        )
        for index in np.flatnonzero(~agrees)
    ]


def followed_probabilities(request: RequestTrace, selector: RequestSelector) -> NDArray[np.float64]:
    """Let a selector follow the logged rounds and return what it would have chosen, (R, N).

    Row r holds its probabilities before round r, after it has learned the windows that the log
    says were learned after each round before. Where the log does not say who was awake, drafters
    that are not scored at the round's position count as asleep; if all are, the row is NaN.
    """
    rounds = request.rounds
    awake = _awake_by_round(request)
    queue = _WindowQueue(request.windows, selector)
    probabilities = np.full((rounds.first_position.size, len(request.drafter_ids)), np.nan)
    for index, is_awake in enumerate(awake):
        if is_awake.any():
            probabilities[index] = selector.probabilities(is_awake)
        if rounds.drafter_index[index] != NO_DRAFTER:
            selector.learn_round(
                int(rounds.drafter_index[index]),
                float(rounds.selection_probability[index]),
                int(rounds.num_draft_tokens[index]),
                int(rounds.num_accepted_tokens[index]),
            )
        queue.deliver(int(rounds.num_scored_windows[index]))
    return probabilities


def verify_logged_selection(
    request: RequestTrace,
    selector: RequestSelector,
    *,
    tolerance: float = PROBABILITY_TOLERANCE,
) -> tuple[Disagreement, ...]:
    """Report the rounds whose logged selection probability is not the selector's.

    Rounds without drafter were not selected by it and are left out. Only a contiguous request
    can agree: what a missing segment taught is not known.
    """
    rounds = request.rounds
    followed = followed_probabilities(request, selector)
    index = np.arange(rounds.drafter_index.size)
    rebuilt = followed[index, np.maximum(rounds.drafter_index, 0)]
    logged = rounds.selection_probability.astype(np.float64)
    rebuilt = np.where(rounds.drafter_index == NO_DRAFTER, logged, rebuilt)
    return tuple(
        _disagreements(request, "selection_probability", logged, rebuilt, tolerance=tolerance)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """One policy's way through one or more requests.

    Attributes:
        num_requests: Requests walked.
        num_rounds: Verifications it would have taken.
        num_tokens: Tokens it would have emitted in them.
        num_idle_rounds: Rounds of one token without drafter: the prompt's own pass, the last
            token of a request, and where every drafter is asleep.
        num_skipped_tokens: Tokens passed over, in no round, because the log has no window there
            (cut, not scored, or begun under weights that were replaced).
    """

    num_requests: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    num_idle_rounds: int = 0
    num_skipped_tokens: int = 0

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per verification, bonus included; None without a round."""
        return self.num_tokens / self.num_rounds if self.num_rounds else None

    def __add__(self, other: Walk) -> Walk:
        return Walk(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(Walk)
            }
        )


def walk(
    request: RequestTrace,
    selector: RequestSelector,
    generator: np.random.Generator,
    *,
    score_block: int | None = None,
) -> Walk:
    """Decode a request again, on paper, with another selector.

    The selector learns complete windows ``score_block`` at a time, None = as its worker did.

    The coins of all positions are drawn first, so that generators of equal seeds give every
    policy the same coins. At a position without window a logged round without drafter is taken as
    it is, the last token of a request costs one round, and anything else is skipped and counted.
    """
    accepted = _accepted_tokens(request, generator)
    rows, awake = _rows_by_position(request), _awake_by_position(request)
    is_idle = _idle_by_position(request)
    block = request.score_block if score_block is None else score_block
    queue = _WindowQueue(request.windows, selector)
    complete_at = _complete_at(request)
    num_positions = rows.size
    at = num_rounds = num_idle = num_skipped = 0
    while at < num_positions:
        row, is_awake = rows[at], awake[at]
        if row >= 0 and is_awake.any():
            ready = int(np.searchsorted(complete_at, at + request.first_position, side="right"))
            if ready - queue.num_delivered >= block:
                queue.deliver(ready - queue.num_delivered)
            drafter, _ = select(selector.probabilities(is_awake), generator)
            at += min(int(accepted[row, drafter]) + 1, num_positions - at)
            num_rounds += 1
        elif row >= 0 or is_idle[at]:
            at += 1
            num_rounds += 1
            num_idle += 1
        else:
            at += 1
            num_skipped += 1
    return Walk(
        num_requests=1,
        num_rounds=num_rounds,
        num_tokens=num_positions - num_skipped,
        num_idle_rounds=num_idle,
        num_skipped_tokens=num_skipped,
    )


def _accepted_tokens(request: RequestTrace, generator: np.random.Generator) -> NDArray[np.int64]:
    """Return the tokens that each window would have accepted of each drafter, (W, N)."""
    windows = request.windows
    num_positions = request.end_position - request.first_position
    level = np.arange(request.num_speculative_tokens)
    coins = generator.random(num_positions + level.size)
    coin = coins[np.maximum(windows.start - request.first_position, 0)[:, None] + level]
    # NaN compares as False: neither a missing level nor an unscored drafter is accepted.
    is_accepted = coin[:, :, None] < windows.realised_acceptance
    return np.asarray(np.cumprod(is_accepted, axis=1, dtype=np.int64).sum(axis=1))


def _rows_by_position(request: RequestTrace) -> NDArray[np.int64]:
    """Return the window that starts at each position, -1 for none."""
    at = request.windows.start - request.first_position
    rows = np.full(request.end_position - request.first_position, -1, dtype=np.int64)
    rows[at[at >= 0]] = np.flatnonzero(at >= 0)
    return rows


def _awake_by_position(request: RequestTrace) -> NDArray[np.bool_]:
    """Return which drafters are scored at each position, (P, N); all where nothing is scored."""
    rows = _rows_by_position(request)
    first_level = request.windows.realised_acceptance[:, :1]
    is_scored = np.asarray(~np.isnan(first_level).any(axis=1))
    awake = np.ones((rows.size, len(request.drafter_ids)), dtype=np.bool_)
    awake[rows >= 0] = is_scored[rows[rows >= 0]]
    return awake


def _awake_by_round(request: RequestTrace) -> NDArray[np.bool_]:
    """Return which drafters could be selected in each round, (R, N)."""
    if request.awake is not None:
        return request.awake
    rounds = request.rounds
    awake = _awake_by_position(request)[rounds.first_position - request.first_position]
    played = np.flatnonzero(rounds.drafter_index != NO_DRAFTER)
    # It may have failed in this very round; when it was selected it was awake.
    awake[played, rounds.drafter_index[played]] = True
    return awake


def _idle_by_position(request: RequestTrace) -> NDArray[np.bool_]:
    """Return where a round of one token without drafter is what any policy would have had."""
    is_idle = np.zeros(request.end_position - request.first_position, dtype=np.bool_)
    without = request.rounds.drafter_index == NO_DRAFTER
    is_idle[request.rounds.first_position[without] - request.first_position] = True
    if request.is_complete:
        is_idle[-1:] = True
    return is_idle


def _complete_at(request: RequestTrace) -> NDArray[np.int64]:
    """Return the next position to be written from which on each window is complete, (W,).

    A window of K levels is complete when the position after it is verified too: only then is it
    known that the request does not end inside it. A shorter window lies at the end of its
    request, so no choice comes after it.
    """
    windows = request.windows
    complete_at = windows.start.astype(np.int64) + windows.num_levels + 1
    is_short = windows.num_levels < request.window_num_speculative_tokens
    complete_at[is_short] = np.iinfo(np.int64).max
    # A window that overtakes an earlier start waits for it: learners see starts in order.
    return np.maximum.accumulate(complete_at)


class _WindowQueue:
    """Lets a selector learn each window once, in order of start."""

    def __init__(self, windows: ScoredWindows, selector: RequestSelector) -> None:
        self._windows = windows
        self._selector = selector
        self.num_delivered = 0

    def deliver(self, count: int) -> None:
        """Teach the next ``count`` windows, as far as there are any."""
        rows = slice(self.num_delivered, self.num_delivered + count)
        windows = self._windows
        if windows.start[rows].size:
            self._selector.learn(
                windows.acceptance_probability[rows],
                windows.realised_acceptance[rows],
                windows.num_levels[rows],
            )
            self.num_delivered += windows.start[rows].size


def walk_all(
    requests: Iterable[RequestTrace],
    make_selector: SelectorFactory,
    generator: np.random.Generator,
    *,
    score_block: int | None = None,
) -> Walk:
    """Walk every request that has drafters with a fresh selector, and add up."""
    total = Walk()
    for request in requests:
        if request.drafter_ids:
            selector = make_selector(request)
            total += walk(request, selector, generator, score_block=score_block)
    return total
