"""Re-running a log: its own rounds from its windows, and any policy over the same text.

The windows say what every drafter would have proposed from every verified position, and the
verified text does not depend on who drafted it. So a request can be decoded again on paper: start
at its first position, choose a drafter, jump by the acceptance length of the window that starts
there, learn the windows which that jump completed, choose again. Where acceptance follows from
the text (greedy target, one-hot drafts) this is exact. With speculative sampling a level is
accepted if a coin of its position falls below the realised acceptance; every drafter and every
policy sees the same coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from learner.measures import acceptance_length_loss, expected_acceptance_length
from learner.selection import Policy, policy_from_name, select
from replay.ports import RequestSelector, SelectorFactory
from replay.requests import RequestTrace
from schemas.events import NO_DRAFTER, ScoredWindows

PROBABILITY_TOLERANCE = 1e-5
"""Events carry selection probabilities as float32."""


class PolicySelector:
    """A policy that learns the exact length loss of every completed window.

    A drafter that was not scored is charged what no drafter would have earned: one token.
    """

    def __init__(self, policy: Policy, num_speculative_tokens: int) -> None:
        self._policy = policy
        self._num_speculative_tokens = num_speculative_tokens

    def probabilities(self) -> NDArray[np.float64]:
        """Return the policy's probabilities, shape (N,)."""
        return self._policy.probabilities()

    def learn(self, windows: ScoredWindows) -> None:
        """Feed the windows' losses one by one."""
        lengths = expected_acceptance_length(
            windows.acceptance_probability,
            windows.realised_acceptance,
            num_levels=windows.num_levels,
        )
        lengths = np.where(np.isnan(lengths), 1.0, lengths)
        for losses in acceptance_length_loss(lengths, self._num_speculative_tokens):
            self._policy.learn(losses)


def selector_from_name(name: str) -> SelectorFactory:
    """Return a factory that starts the named policy anew, without prior, for every request."""

    def make(request: RequestTrace) -> RequestSelector:
        ids = request.drafter_ids
        policy = policy_from_name(name, len(ids), drafter_ids=ids)
        return PolicySelector(policy, request.num_speculative_tokens)

    return make


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
    - ``num_emitted_tokens``: accepted + 1; the last round may end earlier.
    - ``first_position``: where the round before ended.
    """
    rounds = request.rounds
    accepted, is_checked = _rebuilt_accepted(request)
    emitted = rounds.num_accepted_tokens.astype(np.int64) + 1
    emitted[-1:] = np.minimum(emitted[-1:], rounds.num_emitted_tokens[-1:])
    position = rounds.first_position.astype(np.int64).copy()
    position[1:] = (rounds.first_position + rounds.num_emitted_tokens)[:-1]
    if not request.is_complete:
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
    """Return accepted tokens per round from the windows, and where there was one to read."""
    rounds, windows = request.rounds, request.windows
    accepted = rounds.num_accepted_tokens.astype(np.int64)
    is_idle = (rounds.drafter_index == NO_DRAFTER) | (rounds.num_draft_tokens == 0)
    row = np.searchsorted(windows.start, rounds.first_position)
    is_there = np.append(windows.start, -1)[row] == rounds.first_position
    played = np.flatnonzero(is_there & ~is_idle)
    levels = windows.realised_acceptance[row[played], :, rounds.drafter_index[played]]
    is_scored = ~np.isnan(levels[:, :1]).any(axis=1)
    played, levels = played[is_scored], levels[is_scored]
    threshold = levels >= 1.0 if request.is_deterministic else levels > 0.0
    possible = np.cumprod(threshold, axis=1).sum(axis=1)
    possible = np.minimum(possible, rounds.num_draft_tokens[played])
    if not request.is_deterministic:
        possible = np.minimum(possible, accepted[played])
    rebuilt = accepted.copy()
    rebuilt[played] = possible
    rebuilt[is_idle] = 0
    is_checked = is_idle.copy()
    is_checked[played] = True
    return rebuilt, is_checked


def _disagreements(
    request: RequestTrace,
    quantity: str,
    logged: NDArray[np.generic],
    rebuilt: NDArray[np.generic],
    tolerance: float = 0.0,
) -> list[Disagreement]:
    differs = np.abs(logged.astype(np.float64) - rebuilt.astype(np.float64)) > tolerance
    return [
        Disagreement(
            stream=request.stream,
            request_id=request.request_id,
            round_index=int(index),
            quantity=quantity,
            logged=float(logged[index]),
            rebuilt=float(rebuilt[index]),
        )
        for index in np.flatnonzero(differs)
    ]


def followed_probabilities(request: RequestTrace, selector: RequestSelector) -> NDArray[np.float64]:
    """Let a selector follow the logged rounds and return what it would have chosen, (R, N).

    Row r holds its probabilities before round r, after it has learned every window that the
    rounds before had completed, as a worker that scores after every round does.
    """
    rounds = request.rounds
    queue = _WindowQueue(request.windows)
    probabilities = np.empty((rounds.first_position.size, len(request.drafter_ids)))
    for index, position in enumerate(rounds.first_position):
        queue.deliver(selector, int(position))
        probabilities[index] = selector.probabilities()
    return probabilities


def verify_logged_selection(
    request: RequestTrace,
    selector: RequestSelector,
    *,
    tolerance: float = PROBABILITY_TOLERANCE,
) -> tuple[Disagreement, ...]:
    """Report the rounds whose logged selection probability is not the selector's.

    Rounds without drafter were not selected by it and are left out.
    """
    rounds = request.rounds
    followed = followed_probabilities(request, selector)
    index = np.arange(rounds.drafter_index.size)
    rebuilt = followed[index, np.maximum(rounds.drafter_index, 0)]
    logged = rounds.selection_probability.astype(np.float64)
    rebuilt = np.where(rounds.drafter_index == NO_DRAFTER, logged, rebuilt)
    found = _disagreements(request, "selection_probability", logged, rebuilt, tolerance)
    return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Walk:
    """One policy's way through one or more requests.

    Attributes:
        num_requests: Requests walked.
        num_rounds: Verifications it would have taken.
        num_tokens: Tokens it would have emitted in them.
        num_unscored_rounds: Rounds in which the chosen drafter was not scored and drafted nothing.
        num_cut_requests: Requests left where the log has no window (cut, or not all scored).
    """

    num_requests: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    num_unscored_rounds: int = 0
    num_cut_requests: int = 0

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


def walk(request: RequestTrace, selector: RequestSelector, generator: np.random.Generator) -> Walk:
    """Decode a request again, on paper, with another selector.

    The coins of all positions are drawn first, so that generators of equal seeds give every
    policy the same coins. ``walk`` stops, and marks the request as cut, at the first position
    without a window.
    """
    accepted, is_scored = _accepted_levels(request, generator)
    position_to_row = _position_to_row(request)
    queue = _WindowQueue(request.windows)
    position, num_rounds, num_unscored = request.first_position, 0, 0
    while position < request.end_position:
        row = position_to_row[position - request.first_position]
        if row < 0:
            break
        queue.deliver(selector, position)
        drafter, _ = select(selector.probabilities(), generator)
        num_unscored += not is_scored[row, drafter]
        num_rounds += 1
        position = min(position + int(accepted[row, drafter]) + 1, request.end_position)
    return Walk(
        num_requests=1,
        num_rounds=num_rounds,
        num_tokens=position - request.first_position,
        num_unscored_rounds=num_unscored,
        num_cut_requests=int(position < request.end_position),
    )


def _accepted_levels(
    request: RequestTrace, generator: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return accepted tokens of every window and drafter, (W, N), and which were scored."""
    windows = request.windows
    num_positions = request.end_position - request.first_position
    coins = generator.random(num_positions + request.num_speculative_tokens)
    level = np.arange(request.num_speculative_tokens)
    coin = coins[(windows.start - request.first_position)[:, None] + level]
    # NaN compares as False: neither a missing level nor an unscored drafter is accepted.
    is_accepted = coin[:, :, None] < windows.realised_acceptance
    accepted = np.cumprod(is_accepted, axis=1, dtype=np.int64).sum(axis=1)
    is_scored = np.asarray(~np.isnan(windows.realised_acceptance[:, :1]).any(axis=1))
    return accepted, is_scored


def _position_to_row(request: RequestTrace) -> NDArray[np.int64]:
    rows = np.full(request.end_position - request.first_position, -1, dtype=np.int64)
    rows[request.windows.start - request.first_position] = np.arange(request.windows.start.size)
    return rows


class _WindowQueue:
    """Delivers each window once, in order of start, when all its levels are verified."""

    def __init__(self, windows: ScoredWindows) -> None:
        self._windows = windows
        # A window that overtakes an earlier start waits for it: learners see starts in order.
        self._complete_at = np.maximum.accumulate(windows.start + windows.num_levels)
        self._next = 0

    def deliver(self, selector: RequestSelector, position: int) -> None:
        """Let ``selector`` learn what is complete when ``position`` is the next to be written."""
        ready = int(np.searchsorted(self._complete_at, position, side="right"))
        if ready > self._next:
            selector.learn(_rows(self._windows, slice(self._next, ready)))
            self._next = ready


def _rows(windows: ScoredWindows, rows: slice) -> ScoredWindows:
    return ScoredWindows(
        start=windows.start[rows],
        num_levels=windows.num_levels[rows],
        acceptance_probability=windows.acceptance_probability[rows],
        realised_acceptance=windows.realised_acceptance[rows],
    )


def walk_all(
    requests: Sequence[RequestTrace], make_selector: SelectorFactory, generator: np.random.Generator
) -> Walk:
    """Walk every request with a fresh selector and add up; requests without drafters are cut."""
    total = Walk()
    for request in requests:
        total += walk(request, make_selector(request), generator)
    return total
