"""Whether drafters are accepted as often as their scores say, level by level.

A score at level k says how often verification would accept the drafter's k-th token. The rounds in
which a drafter was really chosen tell how often it did. The two must agree up to chance; they do
not if a drafter is scored on other inputs than it drafts from, as a head that unrolls from its
own states may be, or a tree whose branches are pruned as it grows.

Axes: R rounds, N drafters, K levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from schemas.events import NO_DRAFTER

ALARM_Z = 4.0
MIN_ROUNDS = 100.0
_INTERVAL_Z = 1.96
NO_VARIANCE = 1.0
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
        half = _INTERVAL_Z * np.sqrt(self.variance + NO_VARIANCE)
        return (
            _over_predicted(np.maximum(self.realised - half, 0.0), self.predicted),
            _over_predicted(self.realised + half, self.predicted),
        )

    @property
    def z(self) -> NDArray[np.float64]:
        """Standard deviations between realised and predicted, (N, K); 0 below ``MIN_ROUNDS``."""
        distance = (self.realised - self.predicted) / np.sqrt(self.variance + NO_VARIANCE)
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


def _over_predicted(
    values: NDArray[np.float64], predicted: NDArray[np.float64]
) -> NDArray[np.float64]:
    is_known = predicted > 0.0
    return np.where(is_known, values / np.where(is_known, predicted, 1.0), np.nan)
