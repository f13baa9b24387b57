"""From an event to losses: what was already learned, which windows count, whose losses they are.

Assumption, kept by the emitter and the event log: the events that one worker sends for one stream
reach that stream's partition in the order of their ``sequence``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from learner.measures import (
    Estimator,
    acceptance_length_loss,
    acceptance_loss,
    expected_acceptance_length,
    hybrid_loss,
    policy_losses,
)
from learner.ports import ReceivedEvent
from learner.selection.base import Loss
from schemas.events import DrafterVersion, FinishReason, ScoredWindows, VerificationEvent, Watermark

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


def window_losses(
    windows: ScoredWindows,
    num_speculative_tokens: int,
    *,
    estimator: Estimator = "exact",
    length_weight: float = 1.0,
) -> NDArray[np.float64]:
    """Return the loss of every drafter on every window, in order of start.

    Args:
        windows: Completed windows of K levels.
        num_speculative_tokens: K.
        estimator: How the acceptance length is estimated.
        length_weight: Share of the length loss, in [0, 1]; the rest is the loss at level 1.

    Returns:
        Shape (W, N), in [0, 1]; NaN = the drafter was not scored on all levels of that window and
        sleeps through it. Empty, shape (0, N), if K is 0: then nothing tells drafters apart.
    """
    acceptance = windows.acceptance_probability
    if num_speculative_tokens == 0:
        return np.empty((0, acceptance.shape[-1]))
    length = expected_acceptance_length(
        acceptance,
        windows.realised_acceptance,
        num_levels=windows.num_levels,
        estimator=estimator,
    )
    length_loss = acceptance_length_loss(length, num_speculative_tokens)
    return hybrid_loss(length_loss, acceptance_loss(acceptance), weight=length_weight)


def event_losses(
    event: VerificationEvent, *, estimator: Estimator = "exact", length_weight: float = 1.0
) -> NDArray[np.float64]:
    """Return ``window_losses`` of the event's windows that are not censored.

    A request that was aborted or failed did not end: its shortened windows were cut off, and
    how far a draft would have reached is unknown, so they are left out for all drafters.

    Raises:
        ValueError: If a loss is outside [0, 1], naming window and drafter.
    """
    losses = window_losses(
        event.windows,
        event.num_speculative_tokens,
        estimator=estimator,
        length_weight=length_weight,
    )
    losses = losses[is_learned(event)[: len(losses)]]
    good = np.isnan(losses) | ((losses >= 0.0) & (losses <= 1.0))
    if not good.all():
        window, drafter = (int(i) for i in np.argwhere(~good)[0])
        raise ValueError(
            f"{event.event_id}: loss of window {window} and drafter "
            f"{event.drafters[drafter].drafter_id!r} is {losses[window, drafter]}, expected [0, 1]"
        )
    return losses


def event_policy_losses(event: VerificationEvent, loss: Loss) -> NDArray[np.float64]:
    """Return the losses of the event's windows as a policy learns them, (W, N); NaN = asleep.

    Windows that an abort or an error cut are left out, as in ``event_losses``.
    """
    losses = policy_losses(
        event.windows.acceptance_probability,
        event.windows.realised_acceptance,
        event.windows.num_levels,
        loss=loss,
        num_speculative_tokens=event.num_speculative_tokens,
    )
    return losses[is_learned(event)[: len(losses)]]


def is_learned(event: VerificationEvent) -> NDArray[np.bool_]:
    """Return which windows are not censored, (W,)."""
    if event.finish_reason in (FinishReason.ABORTED, FinishReason.ERROR):
        return np.asarray(event.windows.num_levels == event.num_speculative_tokens)
    return np.ones(len(event.windows.start), dtype=np.bool_)


def drafter_positions(
    event_drafters: Sequence[DrafterVersion], drafters: Sequence[DrafterVersion]
) -> NDArray[np.int64]:
    """Return where each drafter of an event stands in the learner's list, -1 for an orphan.

    An orphan is a drafter that the learner does not keep: removed, or never admitted.
    """
    drafter_to_position = {drafter.drafter_id: index for index, drafter in enumerate(drafters)}
    found = [drafter_to_position.get(drafter.drafter_id, -1) for drafter in event_drafters]
    return np.array(found, dtype=np.int64)


def aligned(
    values: NDArray[np.float64],
    positions: NDArray[np.int64],
    num_drafters: int,
    *,
    absent: float = np.nan,
) -> NDArray[np.float64]:
    """Put the event's drafters, last axis, in the learner's order; ``absent`` where it has none.

    Args:
        values: Shape (..., N of the event).
        positions: As ``drafter_positions`` returns, shape (N of the event,).
        num_drafters: N of the learner.
        absent: Value of drafters that the event does not list.

    Returns:
        Shape (..., N of the learner); orphans are left out.
    """
    result = np.full((*values.shape[:-1], num_drafters), absent)
    is_kept = positions >= 0
    result[..., positions[is_kept]] = values[..., is_kept]
    return result
