"""Regret of what was played, round by round, against a comparator: in loss, tokens and seconds.

**The rounds.** A round is compared through the window that starts at its first position. Its
played loss is that window's length loss for the drafter that was played, its comparator's loss
the same window's for the comparator's drafter: both are expectations on the same verified text,
so the difference carries no luck of the draw. A round whose window is not in the log (not
complete when the log ended, or not scored), or whose played drafter was not scored there, is left
out for all alike, and counted.

**No drafter.** A round without drafter, and a drafter that was not scored in a round (not in the
pool yet, skipped), count as one token per round: that is what serving without it would give.

**Regret.** Cumulative loss of what was played minus that of the comparator, positive where the
comparator was better. In tokens: the comparator's expected acceptance length minus the played
one's, summed over the same rounds. In seconds: what the played rounds cost more than the
comparator's, by the cost measured in the log, plus the tokens that it would have emitted
more, each worth the seconds per token of the compared rounds. The rounds start where the played
drafters made them start; a policy's own rounds, and so its true mean acceptance length, are those
of ``replay.walks``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.cost import MeasuredCost
from replay.trace import NO_WINDOW, Trace
from schemas.events import NO_DRAFTER

MAX_BLOCKS = 1000
"""Blocks that a resampled series is made of, at most: longer series get longer blocks."""

DRAWS_AT_ONCE = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComparableRounds:
    """The T rounds that can be compared, in order.

    Attributes:
        lengths: Expected acceptance length per drafter, float32 (T, N), in [1, K + 1].
        played_lengths: The same of what was played, float32 (T,).
        drafter: What was played, int16 (T,), or ``NO_DRAFTER``.
        num_draft_tokens: Tokens that it drafted, int16 (T,).
        num_levels: Tokens that any drafter could have drafted, int16 (T,).
        depth: K of each round, int16 (T,).
        request, stream: Index of each round's request and stream, int32 (T,).
        token: Tokens that the log had emitted before each round, int64 (T,).
        num_left_out: Rounds of the log with a draft that cannot be compared. A round without
            draft and without window (the prompt's own pass, the last token) chose nothing.
        num_unscored: Rounds in which a drafter was not scored and counts as none, (N,).
    """

    lengths: NDArray[np.float32]
    played_lengths: NDArray[np.float32]
    drafter: NDArray[np.int16]
    num_draft_tokens: NDArray[np.int16]
    num_levels: NDArray[np.int16]
    depth: NDArray[np.int16]
    request: NDArray[np.int32]
    stream: NDArray[np.int32]
    token: NDArray[np.int64]
    num_left_out: int
    num_unscored: NDArray[np.int64]

    @property
    def num_rounds(self) -> int:
        """Number of comparable rounds T."""
        return self.played_lengths.size

    @property
    def losses(self) -> NDArray[np.float64]:
        """Length loss per drafter, (T, N), in [0, 1]; computed at every call, as it is large."""
        return _losses(self.lengths, self.depth[:, None])

    @property
    def played_losses(self) -> NDArray[np.float64]:
        """Length loss of what was played, (T,)."""
        return _losses(self.played_lengths, self.depth)

    def of_stream(self, stream: int) -> ComparableRounds:
        """Return the rounds of one stream; the counts stay those of the log."""
        return self._taken(np.flatnonzero(self.stream == stream))

    def by_stream(self) -> Iterator[tuple[int, ComparableRounds]]:
        """Yield every stream that has rounds, with them, in one sort."""
        order = np.argsort(self.stream, kind="stable")
        streams, first = np.unique(self.stream[order], return_index=True)
        for stream, rows in zip(streams, np.split(order, first[1:]), strict=False):
            yield int(stream), self._taken(rows)

    def _taken(self, rows: NDArray[np.int64]) -> ComparableRounds:
        return replace(
            self,
            lengths=self.lengths[rows],
            played_lengths=self.played_lengths[rows],
            drafter=self.drafter[rows],
            num_draft_tokens=self.num_draft_tokens[rows],
            num_levels=self.num_levels[rows],
            depth=self.depth[rows],
            request=self.request[rows],
            stream=self.stream[rows],
            token=self.token[rows],
        )


def comparable_rounds(trace: Trace) -> ComparableRounds:
    """Select the rounds that can be compared and the lengths of all drafters in them."""
    rounds = trace.rounds
    played = _played(rounds.lengths, rounds.drafter)
    chosen = np.flatnonzero((rounds.depth != NO_WINDOW) & ~np.isnan(played))
    lengths = rounds.lengths[chosen]
    is_unscored = np.isnan(lengths)
    lengths[is_unscored] = 1.0
    request = rounds.request[chosen]
    num_drafted = int(np.count_nonzero(rounds.num_draft_tokens))
    return ComparableRounds(
        lengths=lengths,
        played_lengths=played[chosen],
        drafter=rounds.drafter[chosen],
        num_draft_tokens=rounds.num_draft_tokens[chosen],
        num_levels=rounds.num_levels[chosen],
        depth=rounds.depth[chosen],
        request=request,
        stream=trace.request_stream[request],
        token=rounds.token[chosen],
        num_left_out=num_drafted - int(np.count_nonzero(rounds.num_draft_tokens[chosen])),
        num_unscored=is_unscored.sum(axis=0),
    )


def _played(lengths: NDArray[np.float32], drafter: NDArray[np.int16]) -> NDArray[np.float32]:
    """Return the length of what was played, (R,); 1 without drafter."""
    if not lengths.shape[1]:
        return np.ones(drafter.size, dtype=np.float32)
    found = lengths[np.arange(drafter.size), np.maximum(drafter, 0)]
    return np.where(drafter == NO_DRAFTER, np.float32(1.0), found)


def _losses(lengths: NDArray[np.float32], depth: NDArray[np.int16]) -> NDArray[np.float64]:
    # In place: with millions of rounds each temporary array counts.
    losses = lengths.astype(np.float64)
    losses /= -(depth + 1.0)
    losses += 1.0
    return losses


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Regret:
    """Per round, (T,): positive where the comparator was better. Its sums are the regret.

    ``seconds`` is None if the cost of some round of either was never measured.
    """

    loss: NDArray[np.float64]
    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64] | None


def regret(
    rounds: ComparableRounds,
    comparators: NDArray[np.integer[Any]],
    cost: MeasuredCost | None = None,
) -> Regret:
    """Compare what was played with a sequence of drafter indices, shape (T,).

    Against ``comparators.best_fixed`` its sum is the static regret, against a switching sequence
    the dynamic regret.

    Raises:
        ValueError: If the sequence has another length than the rounds.
    """
    if comparators.shape != (rounds.num_rounds,):
        raise ValueError(f"{comparators.shape} comparators for {rounds.num_rounds} rounds")
    lengths = rounds.lengths[np.arange(rounds.num_rounds), comparators]
    tokens = lengths.astype(np.float64) - rounds.played_lengths
    return Regret(
        loss=tokens / (rounds.depth + 1.0),
        tokens=tokens,
        seconds=None if cost is None else _seconds(rounds, comparators, tokens, cost),
    )


def _seconds(
    rounds: ComparableRounds,
    comparators: NDArray[np.integer[Any]],
    tokens: NDArray[np.float64],
    cost: MeasuredCost,
) -> NDArray[np.float64] | None:
    played = round_seconds(cost, rounds.drafter, rounds.num_draft_tokens)
    compared = round_seconds(cost, comparators, rounds.num_levels)
    price = played.sum() / max(float(rounds.played_lengths.sum(dtype=np.float64)), 1.0)
    found = played - compared + price * tokens
    return found if np.isfinite(found).all() else None


def round_seconds(
    cost: MeasuredCost, drafter: NDArray[np.integer[Any]], num_draft_tokens: NDArray[np.int16]
) -> NDArray[np.float64]:
    """Return the mean seconds to draft and verify such rounds, (T,); NaN = never measured.

    Scoring is left out: it costs the same whoever drafts.
    """
    per_token = np.append(cost.draft_seconds, 0.0)[drafter]
    # Nothing drafted costs nothing, also where a drafter's cost was never measured.
    draft = np.where(num_draft_tokens > 0, per_token * num_draft_tokens, 0.0)
    return np.asarray(draft + cost.verify_seconds[num_draft_tokens])


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A sum with its 95 % interval."""

    value: float
    low: float
    high: float


def block_bootstrap_interval(
    differences: NDArray[np.float64],
    generator: np.random.Generator,
    *,
    block_length: int | None = None,
    num_resamples: int = 1000,
) -> Interval | None:
    """Return the sum of a dependent series with its 95 % percentile interval.

    Circular block bootstrap: blocks of consecutive rounds are drawn with replacement, so that
    dependence within a block survives. The comparator behind the differences is held fixed: the
    interval covers the text one happens to have seen, not the choice of the comparator.

    Args:
        differences: Shape (T,), in order.
        generator: The dice.
        block_length: Rounds per block, at least about the rounds of a request; None = T^(1/3).
            It is raised where more than ``MAX_BLOCKS`` blocks would be drawn.
        num_resamples: Resampled series.

    Returns:
        None with fewer than two whole blocks: there is no interval to speak of.
    """
    total = differences.size
    length = max(1, block_length or math.ceil(math.cbrt(total)), math.ceil(total / MAX_BLOCKS))
    if total < 2 * length:
        return None
    num_blocks = math.ceil(total / length)
    summed = np.concatenate([[0.0], np.cumsum(np.concatenate([differences, differences[:length]]))])
    at_once = max(1, DRAWS_AT_ONCE // num_blocks)
    sums = []
    for done in range(0, num_resamples, at_once):
        shape = (min(at_once, num_resamples - done), num_blocks)
        start = generator.integers(0, total, shape)
        sums.append((summed[start + length] - summed[start]).sum(axis=1))
    # The last block usually sticks out beyond T; the scale takes that back.
    resampled = np.concatenate(sums) * (total / (num_blocks * length))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(value=float(differences.sum()), low=float(low), high=float(high))
