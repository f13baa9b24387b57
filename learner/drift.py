"""Drift: has the acceptance of a stream fallen, and when did it begin to?

ADWIN (Bifet and Gavalda, *Learning from time-changing data with adaptive windowing*, 2007) raises
the alarm; where the two sides differ most, by likelihood, is where the change is placed. What is
done about it, ``learner.spawning`` says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_NUM_DOUBTFUL = 10
"""Values after an alarm of ADWIN in which a fall may still show: it speaks of a change once."""

_NUM_BEFORE = 64
"""Values before a fall that tell the level which was fallen from."""

_LEAST_SIDE = 4
"""Values that each side of a fall must have."""

_NUM_ERRORS = 4.0
"""Standard errors that a fall must exceed: its place was chosen to make it large."""

MAX_VALUES = 256
"""Values that a detector remembers at least; beyond twice as many, the older half is forgotten."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftSettings:
    """When a fall counts.

    Attributes:
        delta: ADWIN's chance of a false alarm, in (0, 1). Its bounds are wide: at 0.3 four alarms
            were raised over 100,000 steady values, and a fall of several deviations was found after
            8 values; at 0.002 a head has often learned the new before.
        hold_off: Values after an alarm in which no other is raised, >= 0.
        min_fall: Fall of the mean that counts, in the values' unit, >= 0.
    """

    delta: float = 0.3
    hold_off: int = 50
    min_fall: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"delta={self.delta}, expected (0, 1)")
        for name in ("hold_off", "min_fall"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}, expected >= 0 and finite")


class DriftDetector:
    """Watches one stream of values for a fall.

    Its state is a function of the values since it last began afresh, which it remembers: a detector
    made of that state goes on as this one would.

    Args:
        settings: When a fall counts.

    Attributes:
        values: Those remembered, the oldest first; the change of the last alarm lies before them.
        num_left_out: Values that were not finite; they tell nothing about traffic.
    """

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self.values: list[float] = []
        self._num_quiet = settings.hold_off
        self._num_doubtful = 0
        self.num_left_out = 0
        self._begin_with([])

    @property
    def mean(self) -> float:
        """Mean of the values since the last change; NaN before the first."""
        return float(self._adwin.estimation) if self._adwin.width else float("nan")

    def update(self, value: float) -> int | None:
        """Take one value.

        Returns:
            If it has fallen by enough just now, how many values lie behind the change, this one
            included; else None.
        """
        if not math.isfinite(value):
            self.num_left_out += 1
            return None
        self._adwin.update(value)  # type: ignore[no-untyped-call]
        self.values.append(value)
        self._num_quiet += 1
        self._num_doubtful = max(self._num_doubtful - 1, 0)
        if self._adwin.drift_detected:
            self._num_doubtful = _NUM_DOUBTFUL
        if self._num_doubtful and self._num_quiet > self._settings.hold_off and self._has_fallen():
            return self._fallen()
        if len(self.values) >= 2 * MAX_VALUES:
            self._begin_with(self.values[-MAX_VALUES:])
        return None

    def _has_fallen(self) -> bool:
        """Tell a fall from a rise and from noise, and one that counts from one that does not."""
        point = fall_point(self.values)
        before = np.array(self.values[max(point - _NUM_BEFORE, 0) : point])
        behind = np.array(self.values[point:])
        if min(len(before), len(behind)) < _LEAST_SIDE:
            return False
        fall = float(before.mean() - behind.mean())
        error = math.sqrt(before.var(ddof=1) / len(before) + behind.var(ddof=1) / len(behind))
        return fall >= max(self._settings.min_fall, _NUM_ERRORS * error)

    def _fallen(self) -> int:
        self._num_quiet = self._num_doubtful = 0
        num_behind = len(self.values) - fall_point(self.values)
        self._begin_with(self.values[-num_behind:])
        return num_behind

    def _begin_with(self, values: Sequence[float]) -> None:
        # Imported here: workers know of experts, and of drift only learners.
        from river.drift import ADWIN

        self._adwin = ADWIN(delta=self._settings.delta, clock=1)  # type: ignore[no-untyped-call]
        self.values = list(values)
        for value in self.values:
            self._adwin.update(value)  # type: ignore[no-untyped-call]

    def state(self) -> dict[str, Any]:
        """Return what continues it, as JSON."""
        return {
            "values": list(self.values),
            "num_quiet": self._num_quiet,
            "num_doubtful": self._num_doubtful,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], settings: DriftSettings) -> DriftDetector:
        """Go on from a state."""
        detector = cls(settings)
        detector._begin_with([float(value) for value in state["values"]])
        detector._num_quiet = int(state["num_quiet"])
        detector._num_doubtful = int(state["num_doubtful"])
        return detector


def fall_point(values: Sequence[float]) -> int:
    """Return the index in 1..len - 1 at which ``values`` have most likely fallen.

    The likelihood of one change of the mean under equal noise grows with the square of the
    difference of the means times n_1 n_2 / n; rises are left out.
    """
    found = np.asarray(values, dtype=np.float64)
    size = len(found)
    before = np.arange(1, size)
    sums = np.cumsum(found)[:-1]
    fall = np.maximum(sums / before - (found.sum() - sums) / (size - before), 0.0)
    return int(before[np.argmax(fall**2 * before * (size - before))])


def regret_contributions(losses: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what the best expert of every block would have lost more without each, shape (N,).

    Args:
        losses: Mean loss per block (a request, a stretch of a stream) and expert, shape (B, N), N
            >= 2; NaN = the expert slept.
    """
    filled = np.where(np.isnan(losses), np.inf, losses)
    best_two = np.sort(filled, axis=1)[:, :2]
    counts = np.isfinite(best_two).all(axis=1)
    filled, best_two = filled[counts], best_two[counts]
    is_best = filled == best_two[:, :1]
    gain = np.where(is_best, (best_two[:, 1] - best_two[:, 0])[:, None], 0.0)
    return np.asarray(gain.sum(axis=0))
