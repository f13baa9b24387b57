"""Regret of what was played, round by round, against a comparator, in loss and in tokens.

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
one's, summed over the same rounds. The rounds start where the played drafters made them start; a
policy's own rounds, and so its true mean acceptance length, are those of ``replay.rerun.walk``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from learner.measures import acceptance_length_loss
from replay.trace import NO_WINDOW, Trace
from schemas.events import NO_DRAFTER

DRAWS_AT_ONCE = 2_000_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ComparableRounds:
    """The T rounds that can be compared, in order.

    Attributes:
        losses: Length loss per drafter, (T, N), in [0, 1].
        lengths: Expected acceptance length per drafter, (T, N), in [1, K + 1].
        played_losses, played_lengths: The same of what was played, (T,).
        request, stream: Index of each round's request and stream, (T,).
        token: Tokens that the log had emitted before each round, (T,).
        num_left_out: Rounds of the log with a draft that cannot be compared. A round without
            draft and without window (the prompt's own pass, the last token) chose nothing.
        num_unscored: Rounds in which a drafter was not scored and counts as none, (N,).
    """

    losses: NDArray[np.float64]
    lengths: NDArray[np.float64]
    played_losses: NDArray[np.float64]
    played_lengths: NDArray[np.float64]
    request: NDArray[np.int64]
    stream: NDArray[np.int64]
    token: NDArray[np.int64]
    num_left_out: int
    num_unscored: NDArray[np.int64]

    @property
    def num_rounds(self) -> int:
        """Number of comparable rounds T."""
        return self.played_losses.size

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
            losses=self.losses[rows],
            lengths=self.lengths[rows],
            played_losses=self.played_losses[rows],
            played_lengths=self.played_lengths[rows],
            request=self.request[rows],
            stream=self.stream[rows],
            token=self.token[rows],
        )


def comparable_rounds(trace: Trace) -> ComparableRounds:
    """Select the rounds that can be compared and the lengths of all drafters in them."""
    rounds, windows = trace.rounds, trace.windows
    chosen = np.flatnonzero(rounds.window != NO_WINDOW)
    lengths = windows.exact_length[rounds.window[chosen]].astype(np.float64)
    played = _played(lengths, rounds.drafter[chosen])
    is_scored = ~np.isnan(played)
    chosen, lengths, played = chosen[is_scored], lengths[is_scored], played[is_scored]
    num_unscored = np.isnan(lengths).sum(axis=0)
    lengths = np.where(np.isnan(lengths), 1.0, lengths)
    depth = windows.num_speculative_tokens[rounds.window[chosen]]
    request = rounds.request[chosen].astype(np.int64)
    num_drafted = int(np.count_nonzero(rounds.num_draft_tokens))
    return ComparableRounds(
        losses=_losses(lengths, depth),
        lengths=lengths,
        played_losses=_losses(played[:, None], depth)[:, 0],
        played_lengths=played,
        request=request,
        stream=trace.request_stream[request].astype(np.int64),
        token=rounds.token[chosen],
        num_left_out=num_drafted - int(np.count_nonzero(rounds.num_draft_tokens[chosen])),
        num_unscored=num_unscored,
    )


def _played(lengths: NDArray[np.float64], drafter: NDArray[np.int16]) -> NDArray[np.float64]:
    """Return the length of what was played, (T,); 1 without drafter."""
    with_none = np.hstack([lengths, np.ones((lengths.shape[0], 1))])
    return with_none[np.arange(drafter.size), np.where(drafter == NO_DRAFTER, -1, drafter)]


def _losses(lengths: NDArray[np.float64], depth: NDArray[np.int16]) -> NDArray[np.float64]:
    losses = np.empty_like(lengths)
    for num_speculative_tokens in np.unique(depth):
        rows = depth == num_speculative_tokens
        losses[rows] = acceptance_length_loss(lengths[rows], int(num_speculative_tokens))
    return losses


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Regret:
    """Per round, (T,): positive where the comparator was better. Its sums are the regret."""

    loss: NDArray[np.float64]
    tokens: NDArray[np.float64]


def regret(rounds: ComparableRounds, comparators: NDArray[np.int64]) -> Regret:
    """Compare what was played with a sequence of drafter indices, shape (T,).

    Against ``comparators.best_fixed`` its sum is the static regret, against a switching sequence
    the dynamic regret.

    Raises:
        ValueError: If the sequence has another length than the rounds.
    """
    if comparators.shape != (rounds.num_rounds,):
        raise ValueError(f"{comparators.shape} comparators for {rounds.num_rounds} rounds")
    row = np.arange(rounds.num_rounds)
    return Regret(
        loss=rounds.played_losses - rounds.losses[row, comparators],
        tokens=rounds.lengths[row, comparators] - rounds.played_lengths,
    )


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
        num_resamples: Resampled series.

    Returns:
        None with fewer than two whole blocks: there is no interval to speak of.
    """
    total = differences.size
    length = max(1, block_length or math.ceil(math.cbrt(total)))
    if total < 2 * length:
        return None
    num_blocks = math.ceil(total / length)
    summed = np.concatenate([[0.0], np.cumsum(np.concatenate([differences, differences[:length]]))])
    block_sums = summed[length : length + total] - summed[:total]
    at_once = max(1, DRAWS_AT_ONCE // num_blocks)
    sums = [
        block_sums[
            generator.integers(0, total, (min(at_once, num_resamples - done), num_blocks))
        ].sum(axis=1)
        for done in range(0, num_resamples, at_once)
    ]
    # The last block usually sticks out beyond T; the scale takes that back.
    resampled = np.concatenate(sums) * (total / (num_blocks * length))
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(value=float(differences.sum()), low=float(low), high=float(high))
