"""The learner's events when several learners share the partitions."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from learner.ports import PartitionOwner
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_membership import ChangeKind, PartitionChange
from pipeline.messaging.dead_letters import DeadLetterTopic
from pipeline.messaging.event_decoding import decode_events
from schemas.arrow import LoggedEvent
from schemas.topics import VERIFICATION_EVENTS

GROUP = "draftloop.learner"
JOINING_SECONDS = 0.05
CONFIRM_SECONDS = 5.0


class GroupEventSource:
    """Verification events of the partitions that a group gives us (``learner.ports.EventSource``).

    Args:
        log: The event log, on a Kafka broker.
        group: The group; its committed positions are the learners'.
        max_messages: Most messages per poll.

    Attributes:
        num_dead_letters: Messages that could not be decoded and went to the dead letters.
        kind_to_dead_letters: The same by ``pipeline.messaging.dead_letters.KINDS``.
        last_poll_seconds: Monotonic time of the last poll, for liveness.
    """

    def __init__(self, log: KafkaEventLog, *, group: str = GROUP, max_messages: int = 2000) -> None:
        self._log = log
        self._group = group
        self._max_messages = max_messages
        self._dead_letters = DeadLetterTopic(log)
        self._member = log.member(VERIFICATION_EVENTS, group)
        self._reader = log.reader(VERIFICATION_EVENTS)
        self._owner: PartitionOwner | None = None
        self._partitions: set[int] = set()
        self._pending: deque[PartitionChange] = deque()
        self.num_dead_letters = 0
        self.kind_to_dead_letters: Counter[str] = Counter()
        self.last_poll_seconds = time.monotonic()
        self._member.start()

    @property
    def partitions(self) -> Sequence[int]:
        """Partitions this learner owns; none before its first poll."""
        return tuple(sorted(self._partitions))

    @property
    def lag_messages(self) -> int | None:
        """Messages still to be read, as last seen."""
        return self._reader.lag_messages

    @property
    def seconds_since_group(self) -> float:
        """Seconds since the thread that keeps the membership last spoke with the group."""
        return self._member.still_seconds

    @property
    def num_rebalances(self) -> int:
        """Changes of the owned partitions."""
        return self._member.num_rebalances

    def listen(self, owner: PartitionOwner) -> None:
        """Tell ``owner``, in ``poll``, of partitions that come and go."""
        self._owner = owner

    def is_owner(self) -> bool:
        """Tell whether the group still counts on us; asks it if we were silent for long."""
        return self._member.is_confirmed(CONFIRM_SECONDS) and self._partitions <= self._member.owned

    def seek(self, partition: int, offset: int) -> None:
        """Read ``partition`` from ``offset`` on, or from the first offset that is still there."""
        begin = self._log.begin_offset(VERIFICATION_EVENTS, partition)
        self._reader.seek(partition, max(offset, begin))
        # With a position to commit, the group can be asked whether it still counts on us.
        self._member.commit(partition, max(offset, begin))

    def committed(self, partition: int) -> int | None:
        """Return the position last committed for ``partition``, or None."""
        return self._log.committed(self._group, VERIFICATION_EVENTS, partition)

    def commit(self, partition: int, offset: int) -> None:
        """Store soon that everything below ``offset`` is contained in published policies."""
        self._member.commit(partition, offset)

    def poll(self, timeout_seconds: float) -> Sequence[LoggedEvent]:
        """Hand over partitions that come and go, then return what has arrived."""
        self.last_poll_seconds = time.monotonic()
        self._pending.extend(self._member.take_changes())
        while self._pending:
            # One at a time: where one fails, the others are still to be heeded by the next poll.
            self._apply(self._pending.popleft())
        if not self._partitions:
            time.sleep(min(timeout_seconds, JOINING_SECONDS))
            return []
        messages = self._reader.poll(timeout_seconds, self._max_messages)
        events, letters = decode_events(VERIFICATION_EVENTS, messages, table=self._log.schemas)
        self._dead_letters.set_aside(letters)
        self.num_dead_letters += len(letters)
        self.kind_to_dead_letters.update(letter.kind for letter in letters)
        return events

    def close(self) -> None:
        """Leave the group, so that others take over at once."""
        self._member.close()
        self._reader.close()

    def _apply(self, change: PartitionChange) -> None:
        try:
            if change.kind is ChangeKind.ASSIGNED:
                self._gain(change.partitions)
            else:
                self._lose(change)
        finally:
            change.done.set()

    def _gain(self, partitions: Sequence[int]) -> None:
        self._partitions |= set(partitions)
        if self._owner is not None:
            self._owner.on_assigned(partitions)

    def _lose(self, change: PartitionChange) -> None:
        owned = [p for p in change.partitions if p in self._partitions]
        # They are gone, even if publishing what was known of them fails.
        self._reader.let_go(owned)
        try:
            if self._owner is not None and owned:
                if change.kind is ChangeKind.REVOKED and not change.is_too_late:
                    self._owner.on_revoked(owned)
                else:
                    self._owner.on_lost(owned)
        finally:
            self._partitions -= set(owned)
