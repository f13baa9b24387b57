"""From an event to losses: what was already learned, which windows count, whose losses they are.

Assumption, kept by the emitter and the event log: the events that one worker sends for one stream
reach that stream's partition in the order of their ``sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.event_kernels import (
    FIRST_LOSS,
    HYBRID_LOSS,
    LENGTH_LOSS,
    NO_LOSS,
    measure_event,
)
from learner.measures import Estimator
from learner.ports import ReceivedEvent
from learner.selection.base import Loss
from learner.window_kernels import halves
from schemas.events import DrafterVersion, FinishReason, VerificationEvent, Watermark

POLICY_LOSSES: Mapping[Loss, int] = {
    "first": FIRST_LOSS,
    "length": LENGTH_LOSS,
    "hybrid": HYBRID_LOSS,
}
CUT = (FinishReason.ABORTED, FinishReason.ERROR)
"""How requests end whose last windows are shorter than the text would have been."""

MAX_REMEMBERED_WORKERS = 4096
"""Workers whose newest sequence is remembered; beyond, the least recently heard is forgotten."""


class Standing(StrEnum):
    """What a state knows of an event."""

    NEW = "new"
    CONTAINED = "contained"
    """It lies below the watermark's offset: read again after a restart."""
    LATE = "late"
    """It lies above, but its worker's sequence does not: a copy, or a straggler."""


@dataclass(frozen=True, slots=True)
class Contained:
    """Which events a state contains; keep one per stream, or one per partition.

    Attributes:
        partition_to_offset: Per partition, the first offset not contained.
        worker_to_latest: Per worker, the newest contained (epoch, sequence), least recently heard
            first. One epoch is enough: a new one begins when the former's process has ended.
    """

    partition_to_offset: Mapping[int, int] = field(default_factory=dict)
    worker_to_latest: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    @classmethod
    def from_watermark(cls, watermark: Watermark) -> Contained:
        """Read back what ``watermark`` returned."""
        latest: dict[str, tuple[int, int]] = {}
        for key, sequence in watermark.worker_to_sequence.items():
            worker_id, _, epoch = key.rpartition("/")
            latest[worker_id] = max(latest.get(worker_id, (-1, -1)), (int(epoch), sequence))
        return cls(dict(watermark.partition_to_offset), latest)

    def watermark(self) -> Watermark:
        """Return the form that is published; its mappings keep the order of this one's."""
        return Watermark(
            partition_to_offset=dict(self.partition_to_offset),
            worker_to_sequence={
                f"{worker_id}/{epoch}": sequence
                for worker_id, (epoch, sequence) in self.worker_to_latest.items()
            },
        )

    def standing(self, received: ReceivedEvent) -> Standing:
        """Tell whether the event is still to be learned."""
        if received.offset < self.partition_to_offset.get(received.partition, 0):
            return Standing.CONTAINED
        event = received.event
        latest = self.worker_to_latest.get(event.worker_id, (-1, -1))
        is_newer = (event.worker_epoch, event.sequence) > latest
        return Standing.NEW if is_newer else Standing.LATE

    def with_event(self, received: ReceivedEvent) -> Contained:
        """Return what a state contains once it has learned this new event."""
        event = received.event
        latest = dict(self.worker_to_latest)
        latest.pop(event.worker_id, None)
        latest[event.worker_id] = (event.worker_epoch, event.sequence)
        if len(latest) > MAX_REMEMBERED_WORKERS:
            del latest[next(iter(latest))]
        offsets = {**self.partition_to_offset, received.partition: received.offset + 1}
        return Contained(offsets, latest)


class EventLosses(NamedTuple):
    """Losses of an event's windows in order, each (W, M) in the learner's order; NaN = asleep.

    Windows that an abort or an error cut are left out. Empty, (0, M), where nothing can be drafted.

    Attributes:
        evidence: What the stream's prior learns.
        of_policy: What its policy learns; the same array if there is none to teach.
    """

    evidence: NDArray[np.float64]
    of_policy: NDArray[np.float64]


def event_losses(
    event: VerificationEvent,
    *,
    places: NDArray[np.int64] | None = None,
    num_drafters: int | None = None,
    estimator: Estimator = "exact",
    length_weight: float = 1.0,
    policy_loss: Loss | None = None,
) -> EventLosses:
    """Measure the event's windows, once, for all that learn from them.

    A request that was aborted or failed did not end: its shortened windows were cut off, and
    how far a draft would have reached is unknown, so they are left out for all drafters.

    Args:
        event: Its windows are measured.
        places: As ``drafter_positions``; None = the event's own order.
        num_drafters: M of the learner; None = the event's.
        estimator: How the acceptance length is estimated, for the evidence.
        length_weight: Share of the length in the evidence, in [0, 1]; the rest is the loss at
            level 1.
        policy_loss: What the policy learns, as ``measures.policy_losses``; None = no policy.

    Raises:
        ValueError: If a loss is outside [0, 1], naming window and drafter.
    """
    if not 0.0 <= length_weight <= 1.0:
        raise ValueError(f"weight={length_weight} outside [0, 1]")
    size = len(event.drafters)
    width = size if num_drafters is None else num_drafters
    if event.num_speculative_tokens == 0:
        nothing = np.empty((0, width))
        return EventLosses(nothing, nothing)
    windows = event.windows
    evidence = np.full((len(windows.start), width), np.nan)
    of_policy = evidence if policy_loss is None else evidence.copy()
    count, window, drafter, loss = measure_event(
        halves(windows.acceptance_probability),
        halves(windows.realised_acceptance),
        windows.num_levels,
        np.arange(size) if places is None else places,
        event.finish_reason in CUT,
        estimator == "published",
        length_weight,
        NO_LOSS if policy_loss is None else POLICY_LOSSES[policy_loss],
        evidence,
        of_policy,
    )
    if drafter >= 0:
        refuse_loss(event, window, drafter, loss)
    return EventLosses(evidence[:count], of_policy[:count])


def refuse_loss(event: VerificationEvent, window: int, drafter: int, loss: float) -> None:
    """Refuse an event for the loss of one drafter in one window.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{event.event_id}: loss of window {window} and drafter "
        f"{event.drafters[drafter].drafter_id!r} is {loss}, expected [0, 1]"
    )


def is_learned(event: VerificationEvent) -> NDArray[np.bool_]:
    """Return which windows are not censored, (W,)."""
    if event.finish_reason in CUT:
        return np.asarray(event.windows.num_levels == event.num_speculative_tokens)
    return np.ones(len(event.windows.start), dtype=np.bool_)


def drafter_positions(
    event_drafters: Sequence[DrafterVersion], drafters: Sequence[DrafterVersion]
) -> NDArray[np.int64]:
    """Return where each drafter of an event stands in the learner's list, -1 for an orphan.

    An orphan is a drafter that the learner does not keep: removed, or never admitted.
    """
    if event_drafters == drafters:
        return _in_order(len(drafters))
    drafter_to_position = {drafter.drafter_id: index for index, drafter in enumerate(drafters)}
    found = [drafter_to_position.get(drafter.drafter_id, -1) for drafter in event_drafters]
    return _read_only(np.array(found, dtype=np.int64))


@cache
def _in_order(size: int) -> NDArray[np.int64]:
    return _read_only(np.arange(size))


def _read_only(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Protect what is shared; kernels are compiled once for arrays that are."""
    positions.flags.writeable = False
    return positions
