"""All trainers of a target at the same events: an event is checked and its features read once."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from learner.examples import Segment
from learner.ports import FeatureComputer, FeatureStore, ReceivedEvent, SegmentStates
from learner.training import DrafterTrainer, TrainableDrafter
from schemas.events import Content, VerificationEvent

logger = logging.getLogger(__name__)


class OnlineTrainer:
    """Hands every event to the trainers of all drafters (``learner.ports.Trainer``).

    Args:
        trainers: One per drafter, over the same target.
        features: Recorded hidden states; None = what is recorded is not read.
        target_fingerprint: Of the target whose events are accepted.
        computer: Computes the states of events without recorded ones, if a trainer needs them;
            None = such events teach nothing.
    """

    def __init__(
        self,
        trainers: Sequence[DrafterTrainer],
        features: FeatureStore | None,
        *,
        target_fingerprint: str,
        computer: FeatureComputer | None = None,
    ) -> None:
        self._trainers = trainers
        self._features = features
        self._computer = computer
        self._target_fingerprint = target_fingerprint
        self.num_without_features = 0

    def start_offsets(self) -> Mapping[int, int]:
        """Return per partition the first offset that some trainer needs."""
        wanted = [trainer.start_offsets() for trainer in self._trainers]
        partitions = set[int]().union(*wanted)
        # A trainer that does not name a partition has seen nothing of it.
        return {p: min(offsets.get(p, 0) for offsets in wanted) for p in partitions}

    def train(self, received: ReceivedEvent) -> None:
        """Take one event.

        Raises:
            ValueError: If it is of another target, or its features or tokens cannot be the
                target's; it then counts as contained.
        """
        segment = None
        try:
            segment = self._segment(received)
        finally:
            for trainer in self._trainers:
                trainer.take(received, segment)

    def _segment(self, received: ReceivedEvent) -> Segment | None:
        """Return what the event teaches; None if it carries no content, or has no states."""
        event, content, began = received.event, received.event.content, time.perf_counter()
        states = None if content is None else self._states(received, content)
        if content is None or states is None:
            self.num_without_features += 1
            return None
        segment = Segment(
            partition=received.partition,
            offset=received.offset,
            stream=event.stream,
            hidden=states.hidden,
            token_ids=content.token_ids.astype(np.int64),
            top_token_ids=content.target_top_token_ids.astype(np.int64),
            top_probabilities=np.exp(content.target_top_log_probabilities.astype(np.float32)),
            read_from=states.first_offset,
            state_seconds=(time.perf_counter() - began) / max(len(self._trainers), 1),
        )
        for trainer in self._trainers:
            _refuse_unusable(segment, trainer.drafter, event.event_id)
            _refuse_other_vocabulary(event, trainer.drafter)
        return segment

    def _states(self, received: ReceivedEvent, content: Content) -> SegmentStates | None:
        """Return the recorded states, or else those that can be computed."""
        event, computer = received.event, self._computer
        is_recorded = self._features is not None and content.features is not None
        if not is_recorded and computer is None:
            return None
        if event.target_fingerprint != self._target_fingerprint:
            raise ValueError(
                f"{event.event_id}: target_fingerprint {event.target_fingerprint}, expected "
                f"{self._target_fingerprint}"
            )
        if computer is not None:
            computer.follow(received)
        recorded = self._recorded(event, content)
        if recorded is not None:
            return SegmentStates(hidden=recorded, first_offset=received.offset)
        if computer is None or not any(trainer.needs(received) for trainer in self._trainers):
            return None
        return computer.read(received)

    def _recorded(self, event: VerificationEvent, content: Content) -> NDArray[np.float32] | None:
        if self._features is None or content.features is None:
            return None
        try:
            return self._features.read(content.features)
        except LookupError as error:
            logger.warning("%s: %s", event.event_id, error)
            return None


def _refuse_other_vocabulary(event: VerificationEvent, drafter: TrainableDrafter) -> None:
    """Keep out what another drafter of the same id had verified: its acceptances are not ours."""
    for one in event.drafters:
        found, expected = one.draft_vocabulary_hash, drafter.draft_vocabulary_hash
        if one.drafter_id == drafter.drafter_id and found not in ("", expected):
            raise ValueError(
                f"{event.event_id}: draft_vocabulary_hash of {one.drafter_id} is {found}, expected "
                f"{expected}"
            )


def _refuse_unusable(segment: Segment, drafter: TrainableDrafter, event_id: str) -> None:
    """Keep out of the memory what would spoil every batch that draws from it."""
    expected = (len(segment.token_ids), drafter.hidden_size)
    if segment.hidden.shape != expected:
        raise ValueError(f"{event_id}: features {segment.hidden.shape}, expected {expected}")
    if not np.isfinite(segment.hidden).all():
        raise ValueError(f"{event_id}: features are not all finite")
    highest = int(max(segment.token_ids.max(initial=0), segment.top_token_ids.max(initial=0)))
    if highest >= drafter.vocab_size:
        raise ValueError(f"{event_id}: token {highest}, expected 0..{drafter.vocab_size - 1}")
