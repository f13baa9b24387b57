"""Drift: when the pool serves a regime badly, and which expert it can spare.

A detector watches the acceptance of what was served (ADWIN: Bifet and Gavalda, *Learning from
time-changing data with adaptive windowing*, 2007). When it has fallen, the head that was good until
now is kept as an expert, under its own id, and a copy goes on learning under a new one. The pool is
bounded: the expert without which the past would have lost least retires.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from river.drift import ADWIN

_NUM_RECENT = 10
"""Newest values whose mean tells a fall from a rise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftSettings:
    """When a fall counts.

    Attributes:
        delta: ADWIN's chance of a false alarm, in (0, 1).
        hold_off: Values after an alarm in which no other is raised, >= 0.
        min_fall: Fall of the mean that is worth an expert, in the values' unit, >= 0.
        max_experts: Heads of one family at a time, frozen ones included, >= 2.
    """

    delta: float = 0.002
    hold_off: int = 50
    min_fall: float = 0.05
    max_experts: int = 4

    def __post_init__(self) -> None:
        if not 0.0 < self.delta < 1.0:
            raise ValueError(f"delta={self.delta}, expected (0, 1)")
        if self.max_experts < 2:
            raise ValueError(f"max_experts={self.max_experts}, expected >= 2")


class DriftDetector:
    """Watches one stream of acceptances for a fall.

    Args:
        settings: When a fall counts.

    Attributes:
        num_left_out: Values that were not finite; they tell nothing about traffic.
    """

    def __init__(self, settings: DriftSettings) -> None:
        self._settings = settings
        self._adwin = ADWIN(delta=settings.delta, clock=1)  # type: ignore[no-untyped-call]
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._num_quiet = settings.hold_off
        self._level, self._num_doubtful = float("nan"), 0
        self.num_left_out = 0

    @property
    def mean(self) -> float:
        """Mean of the values since the last change; NaN before the first."""
        return float(self._adwin.estimation) if self._adwin.width else float("nan")

    def update(self, value: float) -> bool:
        """Take one acceptance; return whether it has fallen by enough just now."""
        if not math.isfinite(value):
            self.num_left_out += 1
            return False
        before = self.mean
        self._adwin.update(value)  # type: ignore[no-untyped-call]
        self._recent.append(value)
        self._num_quiet += 1
        if self._adwin.drift_detected:
            # It tells of a change once, often after its first few values: their mean comes later.
            self._level, self._num_doubtful = before, _NUM_RECENT
        elif self._num_doubtful:
            self._num_doubtful -= 1
        if not self._num_doubtful or self._num_quiet <= self._settings.hold_off:
            return False
        has_fallen = self._level - float(np.mean(self._recent)) >= self._settings.min_fall
        if has_fallen:
            self._num_quiet = self._num_doubtful = 0
        return has_fallen


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawned:
    """The pool after a spawn.

    Attributes:
        frozen_id: Keeps the weights it has and learns no more.
        learning_id: Starts as its copy and goes on learning.
        retired_id: Leaves the pool to make room; None = there was room.
    """

    frozen_id: str
    learning_id: str
    retired_id: str | None


class ExpertPool:
    """The heads that have come from one, of which the newest learns.

    Args:
        drafter_id: Of the first.
        settings: When to spawn.
    """

    def __init__(self, drafter_id: str, settings: DriftSettings) -> None:
        self._family = drafter_id
        self._settings = settings
        self._stream_to_detector: dict[str, DriftDetector] = {}
        self._num_spawned = 0
        self.expert_ids: tuple[str, ...] = (drafter_id,)

    @property
    def learning_id(self) -> str:
        """The head that learns."""
        return self.expert_ids[-1]

    def observe(
        self, stream: str, acceptance: float, id_to_contribution: Mapping[str, float]
    ) -> Spawned | None:
        """Take what a request of a stream had accepted; return a spawn if it calls for one.

        Args:
            stream: Of the request.
            acceptance: Of the pool as it played, any unit.
            id_to_contribution: ``regret_contributions`` of late; who is not named counts as 0.
        """
        detector = self._stream_to_detector.setdefault(stream, DriftDetector(self._settings))
        if not detector.update(acceptance):
            return None
        return self.spawn(id_to_contribution)

    def spawn(self, id_to_contribution: Mapping[str, float]) -> Spawned:
        """Freeze the head that learns and let a copy of it learn, also for a new stream."""
        self._num_spawned += 1
        frozen = self.learning_id
        learning = f"{self._family}.{self._num_spawned}"
        retired = None
        if len(self.expert_ids) >= self._settings.max_experts:
            # The newest frozen one is what the copy starts from: it is not given up.
            old = self.expert_ids[:-1]
            retired = min(old, key=lambda one: id_to_contribution.get(one, 0.0))
        kept = tuple(one for one in self.expert_ids if one != retired)
        self.expert_ids = (*kept, learning)
        return Spawned(frozen_id=frozen, learning_id=learning, retired_id=retired)
