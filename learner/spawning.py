"""Experts by spawning: what a head was good at is kept when its traffic changes.

A head has a family: itself, which learns, and experts, which are what it once was and learn no
more. When the head's acceptance on a stream falls, or a new stream is served badly by the whole
family, the head as it was *before* becomes an expert under an id of its own, and the head goes on
learning under its own id. It is kept only if it would be missed: if some expert did as well in what
has ended, nothing is lost. The family is bounded; the one without which the past would have lost
least retires, or is not kept at all.

Pure: a function of the acceptance lengths per event, so it is the same after a restart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from learner.drift import MAX_VALUES, DriftDetector, DriftSettings

T = TypeVar("T")

_EXPERT = re.compile(r"(.+)\.expert-(\d+)")

NUM_LEADS = 64
"""Events before a fall over which the head's lead is averaged."""

NO_DRAFT_LENGTH = 1.0
"""Acceptance length without any draft: what a family of nobody would give."""


def expert_id(family_id: str, number: int) -> str:
    """Return the id of a head's expert."""
    return f"{family_id}.expert-{number}"


def family_of(drafter_id: str) -> str | None:
    """Return whose expert an id names; None if it is none's."""
    found = _EXPERT.fullmatch(drafter_id)
    return None if found is None else found[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpawnSettings:
    """When a head is kept, and how many are.

    Attributes:
        max_experts: Experts beside the head that learns, >= 1.
        drift: When the acceptance length has fallen; ``min_fall`` is in tokens.
        num_first: Events of a new stream after which it is judged, >= 2.
        max_streams: Streams watched; beyond, the least recently seen is forgotten, >= 1.
        half_life_events: Events after which what an expert contributed counts half, > 0.
    """

    max_experts: int = 3
    drift: DriftSettings = field(default_factory=DriftSettings)
    num_first: int = 10
    max_streams: int = 256
    half_life_events: float = 1000.0

    def __post_init__(self) -> None:
        for name, least in (("max_experts", 1), ("num_first", 2), ("max_streams", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}, expected >= {least}")
        if not 0.0 < self.half_life_events < math.inf:
            raise ValueError(f"half_life_events={self.half_life_events}, expected > 0 and finite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Spawn:
    """A head is to be kept.

    Attributes:
        expert_id: Id under which.
        since: The head as it was before this event of the family, counted from 0.
        retired_id: Expert that makes room; None = there was room.
        reason: For people.
    """

    expert_id: str
    since: int
    retired_id: str | None
    reason: str


class _Stream:
    """One stream: the head's lengths, its lead over the best expert, and when they were seen."""

    def __init__(self, detector: DriftDetector, *, is_new: bool) -> None:
        self.detector = detector
        self.leads: list[float] = []
        self.indices: list[int] = []
        self.is_new = is_new

    def add(self, index: int, length: float, lead: float) -> tuple[int, float] | None:
        """Return (index of the change, mean lead before it) if the length has fallen."""
        known = len(self.detector.values) + 1
        self.leads = [*self.leads, lead][-known:]
        self.indices = [*self.indices, index][-known:]
        num_behind = self.detector.update(length)
        if num_behind is None:
            return None
        before = self.leads[:-num_behind][-NUM_LEADS:]
        return self.indices[-num_behind], float(np.mean(before)) if before else math.inf


class ExpertFamily:
    """A head and the experts that have come from it.

    Args:
        head_id: Of the head that learns.
        settings: When to spawn.

    Attributes:
        expert_ids: Experts that are kept, the oldest first.
        num_events: Events observed.
    """

    def __init__(self, head_id: str, settings: SpawnSettings) -> None:
        self._head_id = head_id
        self._settings = settings
        self._stream_to_watch: dict[str, _Stream] = {}
        self._id_to_contribution: dict[str, float] = {}
        self._level = math.nan
        self._num_spawned = 0
        self.expert_ids: tuple[str, ...] = ()
        self.num_events = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """The head and its experts."""
        return (self._head_id, *self.expert_ids)

    def observe(self, stream: str, id_to_length: Mapping[str, float]) -> Spawn | None:
        """Take in an event; return a spawn if it calls for one.

        Args:
            stream: Of the event.
            id_to_length: Mean acceptance length that the head and its experts had on the event's
                windows; others are not read, and who is missing or not finite slept.
        """
        lengths = {
            one: length
            for one in self.ids
            if math.isfinite(length := id_to_length.get(one, math.nan))
        }
        own = lengths.get(self._head_id)
        if own is None:
            return None
        index, self.num_events = self.num_events, self.num_events + 1
        others = [length for one, length in lengths.items() if one != self._head_id]
        best_other = max([NO_DRAFT_LENGTH, *others])
        self._count_contributions(lengths)
        watch = self._watch(stream)
        fallen = watch.add(index, own, own - best_other)
        spawn = None
        if fallen is not None:
            spawn = self._missed(stream, *fallen)
        elif watch.is_new and len(watch.indices) >= self._settings.num_first:
            spawn = self._judged_new(stream, watch)
        known = self._level if math.isfinite(self._level) else own
        self._level = known + (own - known) / MAX_VALUES
        return spawn

    def _watch(self, stream: str) -> _Stream:
        watch = self._stream_to_watch.pop(stream, None)
        if watch is None:
            is_first = not self._stream_to_watch
            watch = _Stream(DriftDetector(self._settings.drift), is_new=not is_first)
        self._stream_to_watch[stream] = watch
        if len(self._stream_to_watch) > self._settings.max_streams:
            del self._stream_to_watch[next(iter(self._stream_to_watch))]
        return watch

    def _count_contributions(self, lengths: Mapping[str, float]) -> None:
        """Credit the best of an event with what it gave beyond the second best."""
        decay = 0.5 ** (1.0 / self._settings.half_life_events)
        kept = self._id_to_contribution
        self._id_to_contribution = {one: decay * kept.get(one, 0.0) for one in self.ids}
        best = max(lengths, key=lambda one: lengths[one])
        rest = [length for one, length in lengths.items() if one != best]
        gain = lengths[best] - max([NO_DRAFT_LENGTH, *rest])
        self._id_to_contribution[best] += max(gain, 0.0)

    def _missed(self, stream: str, since: int, lead: float) -> Spawn | None:
        """Keep the head as it was if no expert did as well in what has ended."""
        if lead < self._settings.drift.min_fall / 2:
            self._id_to_contribution.pop(self._head_id, None)
            return None
        return self._spawned(since, f"acceptance of stream {stream} fell, led by {lead:.2f} before")

    def _judged_new(self, stream: str, watch: _Stream) -> Spawn | None:
        """Keep the head as it was before a stream that the whole family serves badly."""
        watch.is_new = False
        own = np.array(watch.detector.values[-len(watch.leads) :])
        best = float(np.mean(np.maximum(own, own - np.array(watch.leads))))
        if self._level - best < self._settings.drift.min_fall:
            return None
        reason = f"new stream {stream} has {best:.2f} tokens, others {self._level:.2f}"
        return self._spawned(watch.indices[0], reason)

    def _spawned(self, since: int, reason: str) -> Spawn | None:
        """Let the head as it was in; in a full family, only for one that has contributed less."""
        # What the head has contributed, the expert it leaves behind will.
        worth = self._id_to_contribution.pop(self._head_id, 0.0)
        retired = None
        if len(self.expert_ids) >= self._settings.max_experts:
            retired = min(self.expert_ids, key=lambda one: self._id_to_contribution.get(one, 0.0))
            if worth <= self._id_to_contribution.get(retired, 0.0):
                return None
        self._num_spawned += 1
        new = expert_id(self._head_id, self._num_spawned)
        self.expert_ids = (*(one for one in self.expert_ids if one != retired), new)
        self._id_to_contribution[new] = worth
        return Spawn(expert_id=new, since=since, retired_id=retired, reason=reason)

    def forget(self, drafter_id: str) -> None:
        """Let go of an expert that somebody else has retired."""
        self.expert_ids = tuple(one for one in self.expert_ids if one != drafter_id)

    def state(self) -> dict[str, Any]:
        """Return what continues it, as JSON."""
        return {
            "expert_ids": list(self.expert_ids),
            "num_spawned": self._num_spawned,
            "num_events": self.num_events,
            "level": self._level if math.isfinite(self._level) else None,
            "contributions": dict(self._id_to_contribution),
            "streams": {
                stream: {
                    "detector": watch.detector.state(),
                    "leads": watch.leads,
                    "indices": watch.indices,
                    "is_new": watch.is_new,
                }
                for stream, watch in self._stream_to_watch.items()
            },
        }

    @classmethod
    def from_state(
        cls, head_id: str, settings: SpawnSettings, state: Mapping[str, Any]
    ) -> ExpertFamily:
        """Go on from a state."""
        family = cls(head_id, settings)
        family.expert_ids = tuple(state["expert_ids"])
        family._num_spawned = int(state["num_spawned"])
        family.num_events = int(state["num_events"])
        family._level = math.nan if state["level"] is None else float(state["level"])
        family._id_to_contribution = dict(state["contributions"])
        for stream, one in state["streams"].items():
            detector = DriftDetector.from_state(one["detector"], settings.drift)
            watch = _Stream(detector, is_new=bool(one["is_new"]))
            watch.leads, watch.indices = list(one["leads"]), list(one["indices"])
            family._stream_to_watch[stream] = watch
        return family


class Snapshots(Generic[T]):
    """The head as it was, at a few points of its past.

    Args:
        spacing: Events between two points, >= 1.
        most: Points kept, >= 1; ``spacing`` times that should span the delay of an alarm.

    Attributes:
        points: (event before which it was so, the head), the oldest first.
    """

    def __init__(self, *, spacing: int = 8, most: int = 8) -> None:
        self._spacing = spacing
        self._most = most
        self.points: list[tuple[int, T]] = []

    def note(self, index: int, head: T) -> None:
        """Remember the head before an event, if the last point is far enough back."""
        if not self.points or index - self.points[-1][0] >= self._spacing:
            self.points = [*self.points, (index, head)][-self._most :]

    def before(self, index: int) -> T | None:
        """Return the head as it was at the last point up to an event, else at the oldest."""
        known = [head for point, head in self.points if point <= index]
        if known:
            return known[-1]
        return self.points[0][1] if self.points else None
