"""Whether drafters were accepted as often as they were scored, over a whole log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from learner.calibration import Calibration, calibration, is_compared
from replay.requests import RequestTrace
from replay.summary import CalibrationRow
from schemas.events import NO_DRAFTER

_SUMS = tuple(Calibration.__dataclass_fields__)


class CalibrationMeter:
    """Adds up what was predicted and what happened; drafters are numbered over the log."""

    def __init__(self) -> None:
        self._sums = np.zeros((len(_SUMS), 0, 0))

    def add(self, request: RequestTrace, place: NDArray[np.int64]) -> None:
        """Add a request whose drafters have these numbers, (N,); none that was cut off.

        Of a request whose end is missing the first half counts: near the cut a window is there
        only if enough was accepted.
        """
        rounds, windows = request.rounds, request.windows
        if request.is_censored or not windows.start.size:
            return
        row = np.searchsorted(windows.start, rounds.first_position)
        is_there = np.append(windows.start, -1)[row] == rounds.first_position
        is_there &= rounds.drafter_index != NO_DRAFTER
        if not request.is_complete:
            num_positions = request.end_position - request.first_position
            is_there &= is_compared(rounds.first_position, request.first_position, num_positions)
        chosen = np.flatnonzero(is_there)
        found = calibration(
            rounds.drafter_index[chosen],
            rounds.num_draft_tokens[chosen],
            rounds.num_accepted_tokens[chosen],
            windows.acceptance_probability[row[chosen], :, rounds.drafter_index[chosen]],
            num_drafters=len(place),
        )
        num_levels = found.predicted.shape[1]
        self._grow(int(place.max(initial=-1)) + 1, num_levels)
        for sums, name in zip(self._sums, _SUMS, strict=True):
            sums[place, :num_levels] += getattr(found, name)

    def _grow(self, num_drafters: int, num_levels: int) -> None:
        _, drafters, levels = self._sums.shape
        if num_drafters > drafters or num_levels > levels:
            missing = (
                (0, 0),
                (0, max(0, num_drafters - drafters)),
                (0, max(0, num_levels - levels)),
            )
            self._sums = np.pad(self._sums, missing)

    def rows(self, drafter_ids: Sequence[str]) -> Iterator[CalibrationRow]:
        """Yield a row per drafter and level that was reached."""
        found = Calibration(**dict(zip(_SUMS, self._sums, strict=True)))
        low, high = found.interval
        is_off = found.is_off
        for drafter, level in np.argwhere(found.num_rounds > 0.0):
            at = (drafter, level)
            predicted = float(found.predicted[at])
            yield CalibrationRow(
                drafter_id=drafter_ids[drafter],
                level=int(level) + 1,
                num_rounds=int(found.num_rounds[at]),
                predicted=predicted,
                realised=float(found.realised[at]),
                ratio=float(found.ratio[at]) if predicted > 0.0 else None,
                ratio_low=float(low[at]) if predicted > 0.0 else None,
                ratio_high=float(high[at]) if predicted > 0.0 else None,
                is_off=bool(is_off[drafter]),
            )
