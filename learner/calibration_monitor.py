"""Watching, event by event, whether drafters are accepted as often as their scores say.

One compiled pass per event compares its rounds as ``calibration`` does: it runs beside the learning
of every event, and must not be what a learner spends its time on.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from learner.calibration import ALARM_Z, MIN_ROUNDS, NO_VARIANCE, Calibration
from learner.selection.compiled import compiled
from learner.window_kernels import half
from schemas.events import DrafterVersion, FinishReason, VerificationEvent

logger = logging.getLogger(__name__)

HALF_LIFE_ROUNDS = 2000.0
PREDICTED, REALISED, VARIANCE, NUM_ROUNDS = range(4)
SUMS = ("predicted", "realised", "variance", "num_rounds")
"""The sums of a drafter, in the order of its rows; as in ``Calibration``."""


@compiled
def count_rounds(
    first_position: NDArray[np.int32],
    drafter_index: NDArray[np.int16],
    num_draft_tokens: NDArray[np.int16],
    num_accepted_tokens: NDArray[np.int16],
    start: NDArray[np.int32],
    scores: NDArray[np.uint16],
    end_position: int,
    found: NDArray[np.float64],
) -> None:
    """Add the rounds that begin before ``end_position`` and have a window to ``found``.

    Near the end of a segment whose drafters are then replaced, a window is there only if enough was
    accepted; ``calibration.is_compared`` tells more.

    Args:
        first_position: Of the rounds, (R,), not decreasing.
        drafter_index: Of the rounds, (R,); -1 = none.
        num_draft_tokens: Of the rounds, (R,).
        num_accepted_tokens: Of the rounds, without bonus, (R,).
        start: Of the windows, (W,), ascending.
        scores: Acceptance probabilities as bits of float16, (W, K, N).
        end_position: First position whose rounds are not compared.
        found: (N, 4, >= K), written.
    """
    window = 0
    for index in range(first_position.size):
        position, drafter = first_position[index], drafter_index[index]
        while window < start.size and start[window] < position:
            window += 1
        if window == start.size or position >= end_position:
            return
        if start[window] != position or drafter < 0:
            continue
        num_reached = min(num_draft_tokens[index], num_accepted_tokens[index] + 1)
        for level in range(min(num_reached, scores.shape[1])):
            chance = half(scores[window, level, drafter])
            if not np.isnan(chance):
                sums = found[drafter, :, level]
                sums[PREDICTED] += chance
                sums[REALISED] += level < num_accepted_tokens[index]
                sums[VARIANCE] += chance * (1.0 - chance)
                sums[NUM_ROUNDS] += 1.0


@compiled
def take_rounds(
    found: NDArray[np.float64],
    places: NDArray[np.int64],
    seen: NDArray[np.float64],
    is_off: NDArray[np.bool_],
) -> None:
    """Add new sums to the decayed ones and tell whose disagree with the scores beyond chance.

    Args:
        found: Of the event, (N, 4, K).
        places: Where its drafters stand in ``seen``, (N,).
        seen: Of all drafters ever seen, (M, 4, K), written.
        is_off: (N,), written.
    """
    for drafter in range(places.size):
        sums = seen[places[drafter]]
        decay = 0.5 ** (found[drafter, NUM_ROUNDS, 0] / HALF_LIFE_ROUNDS)
        for level in range(sums.shape[1]):
            for kind in range(sums.shape[0]):
                factor = decay * decay if kind == VARIANCE else decay
                sums[kind, level] = factor * sums[kind, level] + found[drafter, kind, level]
            distance = sums[REALISED, level] - sums[PREDICTED, level]
            z = distance / math.sqrt(sums[VARIANCE, level] + NO_VARIANCE)
            if sums[NUM_ROUNDS, level] >= MIN_ROUNDS and abs(z) > ALARM_Z:
                is_off[drafter] = True


@compiled
def compare_rounds(
    first_position: NDArray[np.int32],
    drafter_index: NDArray[np.int16],
    num_draft_tokens: NDArray[np.int16],
    num_accepted_tokens: NDArray[np.int16],
    start: NDArray[np.int32],
    scores: NDArray[np.uint16],
    end_position: int,
    places: NDArray[np.int64],
    seen: NDArray[np.float64],
    is_off: NDArray[np.bool_],
) -> bool:
    """Do both, ``count_rounds`` and ``take_rounds``, and tell whether any drafter is off."""
    found = np.zeros((places.size, seen.shape[1], seen.shape[2]))
    count_rounds(
        first_position,
        drafter_index,
        num_draft_tokens,
        num_accepted_tokens,
        start,
        scores,
        end_position,
        found,
    )
    take_rounds(found, places, seen, is_off)
    return bool(is_off.any())


class CalibrationMonitor:
    """Watches the drafters of a stream of events and says once of each that is off.

    What it has seen of a drafter begins anew with new weights. It is for operators: nothing that
    is learned depends on it.
    """

    def __init__(self) -> None:
        self._drafter_to_place: dict[str, int] = {}
        self._weights_versions: list[int] = []
        self._seen = np.zeros((0, len(SUMS), 1))
        self._alarmed: set[str] = set()
        self._pool: tuple[DrafterVersion, ...] = ()
        self._places = np.zeros(0, np.int64)

    @property
    def drafter_to_calibration(self) -> Mapping[str, Calibration]:
        """What was seen of every drafter's present weights, (1, K) each."""
        return {
            drafter_id: Calibration(**dict(zip(SUMS, self._seen[place, :, None], strict=True)))
            for drafter_id, place in self._drafter_to_place.items()
        }

    def observe(self, event: VerificationEvent) -> list[str]:
        """Take an event, and log and return the ids of drafters found off for the first time."""
        levels = event.num_speculative_tokens
        places = self._places_of(event.drafters, levels)
        is_short = event.num_positions < 4 * (levels + 1)
        if is_short or event.finish_reason in (FinishReason.ABORTED, FinishReason.ERROR):
            return []
        rounds, windows = event.rounds, event.windows
        is_off = np.zeros(len(places), np.bool_)
        if not compare_rounds(
            rounds.first_position,
            rounds.drafter_index,
            rounds.num_draft_tokens,
            rounds.num_accepted_tokens,
            windows.start,
            np.ascontiguousarray(windows.acceptance_probability).view(np.uint16),
            event.first_position + event.num_positions // 2,
            places,
            self._seen,
            is_off,
        ):
            return []
        off = [event.drafters[index].drafter_id for index in np.flatnonzero(is_off)]
        newly_off = [drafter_id for drafter_id in off if drafter_id not in self._alarmed]
        for drafter_id in newly_off:
            self._alarm(drafter_id)
        return newly_off

    def _places_of(
        self, drafters: tuple[DrafterVersion, ...], num_levels: int
    ) -> NDArray[np.int64]:
        """Return where the drafters' sums stand; those of new weights are set to 0."""
        missing = num_levels - self._seen.shape[2]
        if missing > 0:
            self._seen = np.pad(self._seen, ((0, 0), (0, 0), (0, missing)))
        if drafters == self._pool:
            return self._places
        for one in drafters:
            place = self._drafter_to_place.setdefault(one.drafter_id, len(self._weights_versions))
            if place == len(self._weights_versions):
                self._weights_versions.append(one.weights_version)
                self._seen = np.pad(self._seen, ((0, 1), (0, 0), (0, 0)))
            elif self._weights_versions[place] != one.weights_version:
                self._weights_versions[place] = one.weights_version
                self._seen[place] = 0.0
        self._pool = drafters
        self._places = np.array([self._drafter_to_place[d.drafter_id] for d in drafters], np.int64)
        return self._places

    def _alarm(self, drafter_id: str) -> None:
        self._alarmed.add(drafter_id)
        seen = self.drafter_to_calibration[drafter_id]
        level = int(np.argmax(np.abs(seen.z[0])))
        logger.warning(
            "drafter %s was accepted at level %d in %.0f of %.0f rounds, its scores say %.1f: "
            "it is scored on other inputs than it drafts from",
            drafter_id,
            level + 1,
            seen.realised[0, level],
            seen.num_rounds[0, level],
            seen.predicted[0, level],
        )
