"""The learner: learns each event once and publishes what it knows of every stream.

The published policies are its state. ``resume`` reads them and continues where the source's
committed position stands; an event that a policy already contains is passed over, so a crash at
any point leaves the same final state. A position is committed only once the policies that contain
all below it are stored: losing it costs time, not correctness.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from learner.calibration_monitor import CalibrationMonitor
from learner.feedback import Standing
from learner.ports import EventSource, PolicyBoard, ReceivedEvent, RefusedEvents, Trainer
from learner.stream_state import StreamSettings, StreamState

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerSettings:
    """How the service runs; only ``streams`` bears on what it learns.

    Attributes:
        learner_id: Names this learner in the policies.
        publish_every_events: Publish at least once per so many events, >= 1.
        publish_seconds: Publish what was learned so long ago, even while events keep coming, >= 0.
            Each publication waits for the broker, so it bounds the share of time that is waited.
        poll_seconds: Longest wait for the next event.
        streams: How events become the state of a stream.
    """

    learner_id: str = "learner"
    publish_every_events: int = 1000
    publish_seconds: float = 0.1
    poll_seconds: float = 0.5
    streams: StreamSettings = field(default_factory=StreamSettings)

    def __post_init__(self) -> None:
        if self.publish_every_events < 1:
            raise ValueError(f"publish_every_events={self.publish_every_events}, expected >= 1")
        if not self.publish_seconds >= 0.0:
            raise ValueError(f"publish_seconds={self.publish_seconds}, expected >= 0")


@dataclass(kw_only=True, slots=True)
class LearnerCounts:
    """What happened since the process started; for metrics only.

    Attributes:
        num_learned: Events learned.
        num_contained: Events read again that the state contains.
        num_late: Copies and stragglers that were skipped.
        num_refused: Events set aside by the learner.
        num_untrainable: Events set aside by the trainer.
        num_orphans: Drafters in learned events that the learner does not keep.
        num_miscalibrated: Drafters that were found to be accepted otherwise than scored.
        num_published: Policies published.
        delay_events: Events of a stream that were learned between the policy that an event was
            decided with and the event itself, added up over the learned events.
    """

    num_learned: int = 0
    num_contained: int = 0
    num_late: int = 0
    num_refused: int = 0
    num_untrainable: int = 0
    num_orphans: int = 0
    num_miscalibrated: int = 0
    num_published: int = 0
    delay_events: int = 0


class PolicyLearner:
    """Learns every stream of the owned partitions.

    Args:
        source: Verification events.
        board: The policies, read on ``resume`` and written on ``publish``.
        settings: How it runs.
        now: Returns the time in UTC, for the policies' ``produced_at``.
        trainer: Trains drafters from the same events, if given.
        refused: Keeps events that could not be learned; else they are counted and logged.
        clock: Returns monotonic seconds, for the cadence of publication.
    """

    def __init__(
        self,
        source: EventSource,
        board: PolicyBoard,
        settings: LearnerSettings,
        *,
        now: Callable[[], datetime],
        trainer: Trainer | None = None,
        refused: RefusedEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._board = board
        self._settings = settings
        self._now = now
        self._clock = clock
        self._trainer = trainer
        self._refused = refused
        self._stream_to_state: dict[str, StreamState] = {}
        self._partition_to_position: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        self._unpublished_streams: set[str] = set()
        self._num_unpublished_events = 0
        self._unpublished_since = 0.0
        self._calibration = CalibrationMonitor()
        self.counts = LearnerCounts()

    @property
    def stream_to_state(self) -> Mapping[str, StreamState]:
        """What is known now, published or not."""
        return self._stream_to_state

    @property
    def has_unpublished(self) -> bool:
        """Whether anything was read that the published policies and positions do not contain."""
        return self._num_unpublished_events > 0

    def run(self, stop: Callable[[], bool]) -> None:
        """Learn and train until ``stop()``, then publish what is left."""
        self._source.listen(self)
        self.resume()
        while not stop():
            arrived = self._source.poll(self._longest_wait_seconds())
            for received in arrived:
                self.learn_one(received)
                self._train(received)
                if self._is_due():
                    self.publish()
                if stop():
                    break
            if not arrived or self._is_due():
                self.publish()
        self.publish()

    def _is_due(self) -> bool:
        """Tell whether there is as much to publish, or for as long, as there may be."""
        if self._num_unpublished_events >= self._settings.publish_every_events:
            return True
        return self.has_unpublished and self._seconds_to_publish() <= 0.0

    def _longest_wait_seconds(self) -> float:
        if not self.has_unpublished:
            return self._settings.poll_seconds
        return min(max(self._seconds_to_publish(), 0.0), self._settings.poll_seconds)

    def _seconds_to_publish(self) -> float:
        return self._unpublished_since + self._settings.publish_seconds - self._clock()

    def resume(self) -> None:
        """Take the published state for one's own and seek to where it ends.

        Without any policy everything is read: the topic may have been emptied to learn afresh.

        Raises:
            ContractError: If a policy is of another layout.
        """
        self._stream_to_state.clear()
        self._partition_to_position.clear()
        self._committed.clear()
        self._unpublished_streams.clear()
        self._num_unpublished_events = 0
        self.on_assigned(self._source.partitions)

    def on_assigned(self, partitions: Sequence[int]) -> None:
        """Continue in these partitions where their published policies end.

        Raises:
            ContractError: If a policy is of another layout.
        """
        trainer_offsets = self._trainer.start_offsets() if self._trainer else None
        for partition in partitions:
            policies = self._board.read_all([partition])
            for policy in policies:
                state = StreamState.from_policy(policy, self._settings.streams)
                self._stream_to_state[policy.stream] = state
            position = (self._source.committed(partition) or 0) if policies else 0
            self._partition_to_position[partition] = position
            self._committed[partition] = position
            trained = position if trainer_offsets is None else trainer_offsets.get(partition, 0)
            self._source.seek(partition, min(position, trained))

    def on_revoked(self, partitions: Sequence[int]) -> None:
        """Publish and let go of these partitions."""
        self.publish()
        self.on_lost(partitions)

    def on_lost(self, partitions: Sequence[int]) -> None:
        """Let go of these partitions; what was not published is learned by their new owner."""
        for stream, state in list(self._stream_to_state.items()):
            if state.contained.partition_to_offset.keys() <= set(partitions):
                del self._stream_to_state[stream]
                self._unpublished_streams.discard(stream)
        for partition in partitions:
            self._partition_to_position.pop(partition, None)
            self._committed.pop(partition, None)

    def learn_one(self, received: ReceivedEvent) -> Standing | None:
        """Learn the event if it is new.

        Returns:
            What the state knew of it before; None if it was refused, counted and set aside.
        """
        position = self._partition_to_position.get(received.partition, 0)
        if received.offset < position:
            self.counts.num_contained += 1
            return Standing.CONTAINED
        self._partition_to_position[received.partition] = received.offset + 1
        if not self._num_unpublished_events:
            self._unpublished_since = self._clock()
        self._num_unpublished_events += 1
        try:
            return self._learn(received)
        except ValueError as error:
            self.counts.num_refused += 1
            self._set_aside(received, str(error))
            return None

    def _learn(self, received: ReceivedEvent) -> Standing:
        stream = received.event.stream
        state = self._stream_to_state.get(stream) or StreamState(stream=stream)
        standing = state.contained.standing(received)
        if standing is Standing.CONTAINED:
            self.counts.num_contained += 1
        elif standing is Standing.LATE:
            self.counts.num_late += 1
        else:
            self._stream_to_state[stream], orphans = state.learned(received, self._settings.streams)
            self._unpublished_streams.add(stream)
            self.counts.num_learned += 1
            self.counts.delay_events += max(state.version - received.event.policy_version, 0)
            self.counts.num_orphans += orphans
            self.counts.num_miscalibrated += len(self._calibration.observe(received.event))
        return standing

    def _train(self, received: ReceivedEvent) -> None:
        if self._trainer is None:
            return
        try:
            self._trainer.train(received)
        except ValueError as error:
            self.counts.num_untrainable += 1
            self._set_aside(received, str(error))

    def _set_aside(self, received: ReceivedEvent, reason: str) -> None:
        place = f"partition {received.partition} offset {received.offset}"
        logger.warning("event at %s set aside: %s", place, reason)
        if self._refused is not None:
            self._refused.set_aside(received, reason)

    def publish(self) -> None:
        """Publish the streams that changed, then commit the positions they contain.

        A learner that is no longer the owner publishes nothing; its next poll says what it lost.
        """
        if self._unpublished_streams and not self._source.is_owner():
            return
        policies = [
            self._stream_to_state[stream].to_policy(
                self._settings.streams,
                learner_id=self._settings.learner_id,
                produced_at=self._now(),
            )
            for stream in sorted(self._unpublished_streams)
        ]
        if policies:
            self._board.publish(policies)
        self.counts.num_published += len(policies)
        self._unpublished_streams.clear()
        self._num_unpublished_events = 0
        for partition, position in self._partition_to_position.items():
            if position != self._committed.get(partition):
                self._source.commit(partition, position)
                self._committed[partition] = position
