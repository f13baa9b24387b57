"""Whether drafters are accepted as often as their scores say, level by level.

A score at level k says how often verification would accept the drafter's k-th token. The rounds in
which a drafter was really chosen tell how often it did. The two must agree up to chance; they do
not if a drafter is scored on other inputs than it drafts from, as a head that unrolls from its
own states may be, or a tree whose branches are pruned as it grows.

Axes: R rounds, N drafters, K levels.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.events import NO_DRAFTER, FinishReason, VerificationEvent

logger = logging.getLogger(__name__)

ALARM_Z = 4.0
MIN_ROUNDS = 100.0
HALF_LIFE_ROUNDS = 2000.0
_INTERVAL_Z = 1.96
_NO_VARIANCE = 1.0
"""Added to a variance: where scores are certain (greedy), one rounding is not yet an alarm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What was predicted and what happened, per drafter and level, each of shape (N, K).

    Attributes:
        predicted: Acceptance probabilities summed over the rounds that reached the level.
        realised: Rounds in which the level was accepted.
        variance: Of ``realised`` if the predictions are right.
        num_rounds: Rounds that reached the level.
    """

    predicted: NDArray[np.float64]
    realised: NDArray[np.float64]
    variance: NDArray[np.float64]
    num_rounds: NDArray[np.float64]

    @classmethod
    def empty(cls, num_drafters: int, num_levels: int) -> Calibration:
        """Return the calibration of no rounds."""
        zeros = np.zeros((num_drafters, num_levels))
        return cls(predicted=zeros, realised=zeros, variance=zeros, num_rounds=zeros)

    def after(self, other: Calibration, *, decay: float = 1.0) -> Calibration:
        """Return the calibration with further rounds; what was before counts ``decay`` of it."""
        return Calibration(
            predicted=decay * self.predicted + other.predicted,
            realised=decay * self.realised + other.realised,
            variance=decay**2 * self.variance + other.variance,
            num_rounds=decay * self.num_rounds + other.num_rounds,
        )

    @property
    def ratio(self) -> NDArray[np.float64]:
        """Realised over predicted, (N, K); NaN where nothing was predicted."""
        return _over_predicted(self.realised, self.predicted)

    @property
    def interval(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The 95 % interval of the ratio, (N, K) each; it holds 1 if the scores are right."""
        half = _INTERVAL_Z * np.sqrt(self.variance + _NO_VARIANCE)
        return (
            _over_predicted(np.maximum(self.realised - half, 0.0), self.predicted),
            _over_predicted(self.realised + half, self.predicted),
        )

    @property
    def z(self) -> NDArray[np.float64]:
        """Standard deviations between realised and predicted, (N, K); 0 below ``MIN_ROUNDS``."""
        distance = (self.realised - self.predicted) / np.sqrt(self.variance + _NO_VARIANCE)
        return np.where(self.num_rounds >= MIN_ROUNDS, distance, 0.0)

    @property
    def is_off(self) -> NDArray[np.bool_]:
        """Which drafters disagree with their scores at some level beyond chance, (N,)."""
        return np.asarray((np.abs(self.z) > ALARM_Z).any(axis=1))


def calibration(
    drafter_index: NDArray[np.integer],
    num_draft_tokens: NDArray[np.integer],
    num_accepted_tokens: NDArray[np.integer],
    acceptance_probability: NDArray[np.floating],
    *,
    num_drafters: int,
) -> Calibration:
    """Compare rounds with the windows that start where they do.

    Args:
        drafter_index: Who was played, (R,); ``NO_DRAFTER`` is left out.
        num_draft_tokens: Proposed, (R,).
        num_accepted_tokens: Accepted without bonus, (R,).
        acceptance_probability: Of the played drafter at the levels of the window that starts at
            the round's first position, (R, K); NaN = not scored, or no such window or level.
        num_drafters: N.
    """
    probability = np.asarray(acceptance_probability, dtype=np.float64)
    level = np.arange(probability.shape[1])
    is_seen = (
        (drafter_index[:, None] != NO_DRAFTER)
        & (level < num_draft_tokens[:, None])
        & (level <= num_accepted_tokens[:, None])
        & ~np.isnan(probability)
    )
    known = np.where(is_seen, probability, 0.0)
    place = np.maximum(drafter_index, 0)

    def sums(values: NDArray[np.floating]) -> NDArray[np.float64]:
        total = np.zeros((num_drafters, level.size))
        np.add.at(total, place, np.where(is_seen, values, 0.0))
        return total

    return Calibration(
        predicted=sums(known),
        realised=sums((level < num_accepted_tokens[:, None]).astype(np.float64)),
        variance=sums(known * (1.0 - known)),
        num_rounds=sums(np.ones_like(known)),
    )


def is_compared(
    first_position: NDArray[np.integer], segment_first_position: int, num_positions: int
) -> NDArray[np.bool_]:
    """Return the rounds of a segment whose window is there whatever they had accepted, (R,).

    Near the end of a segment whose drafters are then replaced, the window of a round is complete
    only if enough was accepted. Taking those rounds would find every drafter better than its
    scores. So the first half of the positions counts alone.
    """
    return np.asarray(first_position < segment_first_position + num_positions // 2)


def event_calibration(event: VerificationEvent) -> Calibration:
    """Return the calibration of one segment; none of a request that was aborted or failed."""
    rounds, windows, size = event.rounds, event.windows, len(event.drafters)
    levels = event.num_speculative_tokens
    is_short = event.num_positions < 4 * (levels + 1)
    if is_short or event.finish_reason in (FinishReason.ABORTED, FinishReason.ERROR):
        return Calibration.empty(size, levels)
    row = np.searchsorted(windows.start, rounds.first_position)
    is_there = np.append(windows.start, -1)[row] == rounds.first_position
    is_there &= rounds.drafter_index != NO_DRAFTER
    is_there &= is_compared(rounds.first_position, event.first_position, event.num_positions)
    found = np.flatnonzero(is_there)
    return calibration(
        rounds.drafter_index[found],
        rounds.num_draft_tokens[found],
        rounds.num_accepted_tokens[found],
        windows.acceptance_probability[row[found], :, rounds.drafter_index[found]],
        num_drafters=size,
    )


class CalibrationMonitor:
    """Watches the drafters of a stream of events and says once of each that is off.

    What it has seen of a drafter begins anew with new weights. It is for operators: nothing that
    is learned depends on it.
    """

    def __init__(self) -> None:
        self._drafter_to_seen: dict[str, tuple[int, Calibration]] = {}
        self._alarmed: set[str] = set()

    @property
    def drafter_to_calibration(self) -> Mapping[str, Calibration]:
        """What was seen of every drafter's present weights, (1, K) each."""
        return {drafter: seen for drafter, (_, seen) in self._drafter_to_seen.items()}

    def observe(self, event: VerificationEvent) -> list[str]:
        """Take an event, and log and return the ids of drafters found off for the first time."""
        found = event_calibration(event)
        newly_off = []
        for index, drafter in enumerate(event.drafters):
            seen = self._seen(drafter.drafter_id, drafter.weights_version, _row(found, index))
            self._drafter_to_seen[drafter.drafter_id] = (drafter.weights_version, seen)
            if seen.is_off.any() and drafter.drafter_id not in self._alarmed:
                self._alarmed.add(drafter.drafter_id)
                newly_off.append(drafter.drafter_id)
                level = int(np.argmax(np.abs(seen.z[0])))
                logger.warning(
                    "drafter %s is accepted %.3f times as often at level %d as its scores say "
                    "(%d rounds): it is scored on other inputs than it drafts from",
                    drafter.drafter_id,
                    seen.ratio[0, level],
                    level + 1,
                    seen.num_rounds[0, level],
                )
        return newly_off

    def _seen(self, drafter_id: str, weights_version: int, new: Calibration) -> Calibration:
        version, before = self._drafter_to_seen.get(drafter_id, (weights_version, new))
        if drafter_id not in self._drafter_to_seen or version != weights_version:
            return new
        levels = max(before.predicted.shape[1], new.predicted.shape[1])
        num_new = float(new.num_rounds[0, 0]) if new.num_rounds.size else 0.0
        decay = 0.5 ** (num_new / HALF_LIFE_ROUNDS)
        return _widened(before, levels).after(_widened(new, levels), decay=decay)


def _row(found: Calibration, index: int) -> Calibration:
    rows = slice(index, index + 1)
    return Calibration(
        **{name: getattr(found, name)[rows] for name in Calibration.__dataclass_fields__}
    )


def _widened(found: Calibration, num_levels: int) -> Calibration:
    """Return the calibration with levels added that were never reached."""
    missing = num_levels - found.predicted.shape[1]
    return Calibration(
        **{
            name: np.pad(getattr(found, name), ((0, 0), (0, missing)))
            for name in Calibration.__dataclass_fields__
        }
    )


def _over_predicted(
    values: NDArray[np.float64], predicted: NDArray[np.float64]
) -> NDArray[np.float64]:
    is_known = predicted > 0.0
    return np.where(is_known, values / np.where(is_known, predicted, 1.0), np.nan)
