"""Re-running a log on itself: its rounds from its windows, its selection from its policy.

Other policies over the same text are walked by ``replay.walks``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.ports import FollowedSelector
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
    can_accept = levels >= 1.0 if request.is_deterministic else levels > 0.0
    # Cumulated in int64: the product of many levels must not wrap.
    accepted = np.cumprod(can_accept, axis=1, dtype=np.int64).sum(axis=1)
    drafted = rounds.num_draft_tokens[played]
    # Of a window whose drafter was replaced or failed inside it, only level 1 may be known.
    reached = np.minimum(drafted, windows.num_levels[row[played]])
    ended_at = np.pad(levels, ((0, 0), (0, 1)))[np.arange(played.size), accepted]
    is_scored = (accepted >= reached) | ~np.isnan(ended_at)
    played, accepted = played[is_scored], np.minimum(accepted, drafted)[is_scored]
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


def followed_probabilities(
    request: RequestTrace, selector: FollowedSelector
) -> NDArray[np.float64]:
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
    selector: FollowedSelector,
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


class _WindowQueue:
    """Lets a selector learn each window once, in order of start."""

    def __init__(self, windows: ScoredWindows, selector: FollowedSelector) -> None:
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
