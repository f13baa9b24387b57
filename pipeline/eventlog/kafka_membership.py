"""Membership in a consumer group: which partitions this process owns, kept by a thread of its own.

The thread only keeps the membership; events are read elsewhere. So however long a learner takes
over a step, its group hears from it, and its partitions stay. They change hands one by one
(cooperative rebalance): a partition that is taken away is handed on once the owner has let go.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kafka import ConsumerRebalanceListener, TopicPartition
from kafka.coordinator.assignors.abstract import AbstractPartitionAssignor
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import (
    CommitFailedError,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
    KafkaError,
    RebalanceInProgressError,
)
from kafka.structs import MemberState, OffsetAndMetadata

from pipeline.eventlog.kafka_connections import REFUSALS
from pipeline.eventlog.kafka_errors import translated

POLL_MILLISECONDS = 50
RETRY_SECONDS = 0.5
CONFIRMATIONS_PER_SESSION = 4

FATAL = (
    *REFUSALS,
    InconsistentGroupProtocolError,
    InvalidSessionTimeoutError,
)
"""Refusals that no repetition cures."""

REBALANCING = (RebalanceInProgressError, CommitFailedError)
"""What a commit is told that comes while the group shares its partitions out anew."""

logger = logging.getLogger(__name__)


class ChangeKind(StrEnum):
    """What has happened to partitions."""

    ASSIGNED = "assigned"
    REVOKED = "revoked"
    """To be published and let go of; the group waits for it."""
    LOST = "lost"
    """Already somebody else's: to be forgotten."""


@dataclass(slots=True, eq=False)
class PartitionChange:
    """Partitions that come or go; the owner says when it has ``done`` what there is to do."""

    kind: ChangeKind
    partitions: tuple[int, ...]
    done: threading.Event = field(default_factory=threading.Event)
    is_too_late: bool = False


class KafkaMembership:
    """One member of a group on one topic.

    Args:
        build: Builds the client, a consumer in the group with the assignor that is handed in; it
            is used in the thread alone.
        topic: Whose partitions are shared out.
        session_timeout_seconds: A member that was silent for so long has left.
        most_silent_seconds: If the owner does not ask for changes for so long, it is taken for
            dead and its partitions are given to others, until it asks again.

    Attributes:
        num_rebalances: Changes of the owned partitions.
        num_failures: Polls and commits that the broker refused or did not answer.
    """

    def __init__(
        self,
        build: Callable[[AbstractPartitionAssignor], Any],
        topic: str,
        *,
        session_timeout_seconds: float,
        most_silent_seconds: float = 300.0,
    ) -> None:
        self._build = build
        self._topic = topic
        self._session_seconds = session_timeout_seconds
        self._most_silent_seconds = most_silent_seconds
        self._changes: queue.SimpleQueue[PartitionChange] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._owned: set[int] = set()
        self._to_commit: dict[int, int] = {}
        self._positions: dict[int, int] = {}
        self._confirmed_seconds = float("-inf")
        self._asked_seconds = time.monotonic()
        self._moved_seconds = time.monotonic()
        self._wants_confirmation = threading.Event()
        self._has_answered = threading.Event()
        self._stop = threading.Event()
        self._fatal_error: KafkaError | None = None
        self._thread = threading.Thread(target=self._run, name=f"member {topic}", daemon=True)
        self.num_rebalances = 0
        self.num_failures = 0

    def start(self) -> None:
        """Join the group in the background."""
        self._thread.start()

    @property
    def owned(self) -> frozenset[int]:
        """Partitions that the group gives to this member just now."""
        with self._lock:
            return frozenset(self._owned)

    @property
    def still_seconds(self) -> float:
        """Seconds since its thread last went round; one that has died goes round no more."""
        return time.monotonic() - self._moved_seconds

    def take_changes(self) -> list[PartitionChange]:
        """Return what has changed since the last call, oldest first.

        Raises:
            EventLogError: If the broker refuses the membership for good.
        """
        if self._fatal_error is not None:
            where = f"group of topic {self._topic}"
            raise translated(self._fatal_error, where) from self._fatal_error
        self._asked_seconds = time.monotonic()
        changes = []
        while not self._changes.empty():
            changes.append(self._changes.get())
        return changes

    def commit(self, partition: int, offset: int) -> None:
        """Store a position soon; one that is lost costs time, never an event."""
        with self._lock:
            self._to_commit[partition] = offset

    def is_confirmed(self, timeout_seconds: float) -> bool:
        """Tell whether the group still counts this member, asking it if the answer is old.

        A process that stood still for longer than its session (stopped, swapped out) must ask:
        another one may have taken its partitions over.
        """
        if self._is_fresh():
            return True
        self._has_answered.clear()
        self._wants_confirmation.set()
        self._has_answered.wait(timeout_seconds)
        return self._is_fresh()

    def close(self) -> None:
        """Leave the group, so that others need not wait for the session to end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._session_seconds)

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._confirmed_seconds < self._session_seconds / 2

    def _run(self) -> None:
        consumer = None
        while not self._stop.is_set():
            self._moved_seconds = time.monotonic()
            try:
                if consumer is None:
                    consumer = self._build(_HonestAssignor(self))
                    consumer.subscribe([self._topic], listener=_Listener(self, consumer))
                if self._is_owner_silent():
                    self._leave(consumer)
                    consumer = None
                    self._await_owner()
                    continue
                consumer.poll(timeout_ms=POLL_MILLISECONDS)
                self._commit_or_confirm(consumer)
            except FATAL as error:
                self._fatal_error = error
                break
            except REBALANCING as error:
                # The group waits for us to join it anew, which the next poll does.
                self.num_failures += 1
                logger.info("membership in the group of %s: %s", self._topic, error)
            except KafkaError as error:
                self._bear(error)
            except Exception as error:
                # The client meets answers it did not foresee. A thread that ends here would leave
                # a member that nobody hears from, so it joins anew with another client.
                self._bear(error)
                self._discard(consumer)
                consumer = None
        if consumer is not None:
            self._leave(consumer)

    def _bear(self, error: Exception) -> None:
        self.num_failures += 1
        name = type(error).__name__
        logger.warning("membership in the group of %s: %s: %s", self._topic, name, error)
        self._stop.wait(RETRY_SECONDS)

    def _discard(self, consumer: Any) -> None:
        self._lose(self.owned)
        if consumer is not None:
            with suppress(Exception):
                consumer.close(autocommit=False, timeout_ms=0)

    def _is_owner_silent(self) -> bool:
        """A member without partitions owes nobody an answer."""
        silent_seconds = time.monotonic() - self._asked_seconds
        return bool(self._owned) and silent_seconds > self._most_silent_seconds

    def _await_owner(self) -> None:
        """Stay away until the owner asks for changes: what it does not read is others' to read."""
        left_seconds = time.monotonic()
        while self._asked_seconds < left_seconds and not self._stop.wait(POLL_MILLISECONDS / 1000):
            self._moved_seconds = time.monotonic()

    def _leave(self, consumer: Any) -> None:
        try:
            self._commit_or_confirm(consumer)
        except KafkaError as error:
            logger.warning("positions of %s not stored on leaving: %s", self._topic, error)
        self._lose(self.owned)
        consumer.close(autocommit=False, timeout_ms=round(1000 * self._session_seconds))

    def _commit_or_confirm(self, consumer: Any) -> None:
        """Store new positions; store old ones again when it is time to hear from the group.

        While the group is rebalancing it is told nothing: a position that comes with a generation
        that is over costs the client its membership, and the group another rebalance.
        """
        if consumer.group_metadata().state != MemberState.STABLE:
            return
        since_seconds = time.monotonic() - self._confirmed_seconds
        is_due = since_seconds > self._session_seconds / CONFIRMATIONS_PER_SESSION
        with self._lock:
            new, self._to_commit = self._to_commit, {}
            self._positions |= new
            positions = {p: o for p, o in self._positions.items() if p in self._owned} | new
        try:
            if new or ((is_due or self._wants_confirmation.is_set()) and positions):
                self._commit(consumer, positions)
        finally:
            if self._wants_confirmation.is_set():
                self._wants_confirmation.clear()
                self._has_answered.set()

    def _commit(self, consumer: Any, positions: dict[int, int]) -> None:
        asked_seconds = time.monotonic()
        offsets = {
            TopicPartition(self._topic, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in positions.items()
        }
        consumer.commit(offsets, timeout_ms=round(500 * self._session_seconds))
        self._confirmed_seconds = asked_seconds

    def _gain(self, partitions: Collection[int]) -> None:
        with self._lock:
            self._owned |= set(partitions)
            # The assignment itself is the group's word.
            self._confirmed_seconds = time.monotonic()
        self.num_rebalances += 1
        self._asked_seconds = time.monotonic()
        self._changes.put(PartitionChange(ChangeKind.ASSIGNED, tuple(sorted(partitions))))

    def _give_up(self, partitions: Collection[int]) -> None:
        """Wait until the owner has published and let go; the group waits with us."""
        if self._stop.is_set() or not self.owned.intersection(partitions):
            # Leaving on purpose: the owner has published already and asks no more.
            self._lose(partitions)
            return
        change = PartitionChange(ChangeKind.REVOKED, tuple(sorted(partitions)))
        self._changes.put(change)
        if not change.done.wait(self._session_seconds / 2):
            change.is_too_late = True
        self._forget(partitions)

    def _lose(self, partitions: Collection[int]) -> None:
        lost = self.owned.intersection(partitions)
        if lost:
            self._changes.put(PartitionChange(ChangeKind.LOST, tuple(sorted(lost))))
            self._forget(lost)

    def _forget(self, partitions: Collection[int]) -> None:
        self.num_rebalances += 1
        with self._lock:
            self._owned -= set(partitions)
            for partition in partitions:
                self._positions.pop(partition, None)


class _HonestAssignor(CooperativeStickyAssignor):  # type: ignore[misc]  # the client is untyped
    """Tells the group what this member owns.

    The client's own (3.0.12) goes on naming what it has lost; that is then withheld from the others
    and given to nobody. Leaving the group instead does not help: while a join is under way, the
    broker hears of it too late, and waits for a member that is gone until its session has ended.
    """

    def __init__(self, membership: KafkaMembership) -> None:
        super().__init__()
        self.member_assignment: list[TopicPartition] | None = None
        self._membership = membership

    def metadata(self, topics: Any) -> Any:
        owned = self._membership.owned
        known = self.member_assignment or []
        self.member_assignment = [place for place in known if place.partition in owned]
        return super().metadata(topics)


class _Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # the client is untyped
    """Hands the group's changes to the membership; runs in the client's own thread."""

    def __init__(self, membership: KafkaMembership, consumer: Any) -> None:
        self._membership = membership
        self._consumer = consumer

    def on_partitions_assigned(self, assigned: Collection[TopicPartition]) -> None:
        # Nothing is read through this client.
        self._consumer.pause(*assigned)
        self._membership._gain([place.partition for place in assigned])

    def on_partitions_revoked(self, revoked: Collection[TopicPartition]) -> None:
        self._membership._give_up([place.partition for place in revoked])

    def on_partitions_lost(self, lost: Collection[TopicPartition]) -> None:
        self._membership._lose([place.partition for place in lost])
