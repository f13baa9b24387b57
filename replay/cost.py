"""What rounds cost, measured in the log: seconds per drafted token, verification and window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay.requests import RequestTrace
from schemas.events import NO_DRAFTER

ENOUGH_ROUNDS = 30
"""Verifications of one size whose mean is taken as it is; rarer sizes follow the line."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredCost:
    """Mean seconds; NaN = never measured.

    Attributes:
        draft_seconds: Per drafted token, (N,).
        verify_seconds: Per verification by number of drafted tokens, (K + 1,).
        score_seconds: Per scored window, all its drafters together.
    """

    draft_seconds: NDArray[np.float64]
    verify_seconds: NDArray[np.float64]
    score_seconds: float


class CostMeter:
    """Adds up the seconds of rounds; drafters are numbered over the whole log."""

    def __init__(self) -> None:
        self._draft = np.zeros((2, 0))
        self._verify = np.zeros((2, 1))
        self._score = np.zeros(2)

    def add(self, request: RequestTrace, place: NDArray[np.int64]) -> None:
        """Add the rounds of a request whose drafters have these numbers in the log, (N,)."""
        rounds = request.rounds
        drafted = rounds.num_draft_tokens.astype(np.int64)
        self._verify = _grown(self._verify, int(drafted.max(initial=0)) + 1)
        size = self._verify.shape[1]
        self._verify += [
            np.bincount(drafted, rounds.verify_seconds, size),
            np.bincount(drafted, minlength=size),
        ]
        has_drafter = rounds.drafter_index != NO_DRAFTER
        drafter = place[rounds.drafter_index[has_drafter]]
        self._draft = _grown(self._draft, int(place.max(initial=-1)) + 1)
        size = self._draft.shape[1]
        self._draft += [
            np.bincount(drafter, rounds.draft_seconds[has_drafter], size),
            np.bincount(drafter, drafted[has_drafter], size),
        ]
        self._score += rounds.score_seconds.sum(dtype=np.float64), request.windows.start.size

    def measured(self, num_drafters: int, num_speculative_tokens: int) -> MeasuredCost:
        """Return the means for N drafters and up to K drafted tokens."""
        score_seconds, num_windows = self._score
        return MeasuredCost(
            draft_seconds=_ratios(_grown(self._draft, num_drafters)),
            verify_seconds=_by_size(_grown(self._verify, num_speculative_tokens + 1)),
            score_seconds=float(score_seconds / num_windows) if num_windows else np.nan,
        )


def _grown(sums: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    """Return sums (2, ...) with zeros appended up to ``size`` columns."""
    missing = size - sums.shape[1]
    return np.hstack([sums, np.zeros((2, missing))]) if missing > 0 else sums


def _ratios(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    seconds, counts = sums
    return np.asarray(np.where(counts > 0, seconds / np.maximum(counts, 1.0), np.nan))


def _by_size(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return mean seconds by drafted tokens; sizes that are rare lie on the line through all."""
    means, counts = _ratios(sums), sums[1]
    known = np.flatnonzero(counts)
    if not known.size:
        return means
    slope = 0.0
    if known.size > 1:
        spread = known - np.average(known, weights=counts[known])
        slope = float(np.average(spread * means[known], weights=counts[known]))
        slope = max(0.0, slope / float(np.average(spread**2, weights=counts[known])))
    at = np.average(known, weights=counts[known])
    line = np.average(means[known], weights=counts[known]) + slope * (np.arange(counts.size) - at)
    return np.where(counts >= ENOUGH_ROUNDS, means, np.maximum(line, 0.0))
