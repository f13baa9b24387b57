"""Streams of requests on which the selection benchmark compares, and hindsight's play on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.selection import PolicySpec
from learner.selection.compiled import compiled
from learner.walk import Coins, PreparedTrace, Walker, WindowTrace, prepare


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectionStream:
    """Requests in the order in which they are served.

    Attributes:
        drafter_ids: N of them.
        requests: Prepared, all over the same drafters.
        groups: Domain of each request, (Q,); -1 where it has several.
        parts: Domain of every position, (P,) per request.
    """

    drafter_ids: tuple[str, ...]
    requests: Sequence[PreparedTrace]
    groups: NDArray[np.int64]
    parts: Sequence[NDArray[np.int64]]

    @property
    def num_tokens(self) -> int:
        """Tokens of all requests, each at least a round's share: P summed."""
        return sum(_num_tokens(request) for request in self.requests)


def _num_tokens(request: PreparedTrace) -> int:
    """Positions that some round covers: those where somebody can draft or a round was due."""
    is_covered = (request.accepted >= 0).any(axis=1) | request.is_idle
    return int(is_covered.sum())


def selection_stream(
    drafter_ids: Sequence[str],
    traces: Sequence[WindowTrace],
    parts: Sequence[NDArray[np.int64]],
    generator: np.random.Generator,
) -> SelectionStream:
    """Prepare traces, each with its own coins."""
    requests = [
        prepare(trace, Coins.toss(generator, trace.num_positions, trace.num_speculative_tokens))
        for trace in traces
    ]
    groups = [int(part[0]) if len(part) and np.all(part == part[0]) else -1 for part in parts]
    return SelectionStream(
        drafter_ids=tuple(drafter_ids),
        requests=requests,
        groups=np.array(groups, dtype=np.int64),
        parts=parts,
    )


@dataclass(frozen=True, slots=True)
class Played:
    """What was played on a stream.

    Attributes:
        num_tokens: Emitted in each request, (Q,).
        num_rounds: Verifications of each request, (Q,).
    """

    num_tokens: NDArray[np.int64]
    num_rounds: NDArray[np.int64]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per verification, bonus included."""
        return float(self.num_tokens.sum() / self.num_rounds.sum())


def play(stream: SelectionStream, spec: PolicySpec) -> Played:
    """Let a policy walk a stream."""
    walker = Walker(
        spec,
        len(stream.drafter_ids),
        drafter_ids=stream.drafter_ids,
        num_speculative_tokens=stream.requests[0].num_speculative_tokens if stream.requests else 0,
    )
    walks = [walker.walk(request) for request in stream.requests]
    return Played(
        np.array([walked.num_tokens for walked in walks]),
        np.array([len(walked.length) for walked in walks]),
    )


def play_each(stream: SelectionStream) -> NDArray[np.int64]:
    """Return the rounds of every request with every drafter alone, (Q, N)."""
    return np.stack([_rounds_of_each(r.accepted, r.is_idle) for r in stream.requests])


def play_parts(stream: SelectionStream, best_of_part: NDArray[np.int64]) -> Played:
    """Play in each part of a request the drafter that ``best_of_part`` (D,) has for it."""
    return play_choices(stream, [best_of_part[part] for part in stream.parts])


def play_choices(stream: SelectionStream, choices: Sequence[NDArray[np.int64]]) -> Played:
    """Play the drafter that is given for every position, (P,) per request."""
    rounds = [
        _rounds_of_choices(request.accepted, request.is_idle, chosen)
        for request, chosen in zip(stream.requests, choices, strict=True)
    ]
    return Played(np.array([_num_tokens(r) for r in stream.requests]), np.array(rounds))


@compiled
def _rounds_of_choices(
    accepted: NDArray[np.int16], is_idle: NDArray[np.bool_], choices: NDArray[np.int64]
) -> int:
    """Count rounds; a chosen drafter that sleeps while others do not gives rounds of one token."""
    position = 0
    num_rounds = 0
    while position < accepted.shape[0]:
        if accepted[position].max() >= 0:
            position += max(int(accepted[position, choices[position]]), 0) + 1
            num_rounds += 1
        else:
            num_rounds += is_idle[position]
            position += 1
    return num_rounds


@compiled
def _rounds_of_each(accepted: NDArray[np.int16], is_idle: NDArray[np.bool_]) -> NDArray[np.int64]:
    num_positions, num_drafters = accepted.shape
    rounds = np.zeros(num_drafters, dtype=np.int64)
    choices = np.empty(num_positions, dtype=np.int64)
    for drafter in range(num_drafters):
        choices[:] = drafter
        rounds[drafter] = _rounds_of_choices(accepted, is_idle, choices)
    return rounds
