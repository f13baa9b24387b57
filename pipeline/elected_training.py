"""Training by one process at a time: the others stand by and go on where its releases end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from learner.ports import FencedError, RefusedEvents, ReleaseBoard, Trainer
from pipeline.eventlog.kafka_membership import ChangeKind, KafkaMembership
from pipeline.eventlog.ports import EventLog
from pipeline.messaging.boards import LogEventSource
from schemas.events import DrafterReleased
from schemas.topics import VERIFICATION_EVENTS

GROUP = "draftloop.trainer"
STANDBY_SECONDS = 0.1
POLL_SECONDS = 0.5
CONFIRM_SECONDS = 5.0

logger = logging.getLogger(__name__)


class ElectedReleases:
    """The board of releases, written by the elected trainer alone (``learner.ports.ReleaseBoard``).

    A trainer that stood still for longer than its session, or that was too long over a step to
    hear that another one was elected, finds out here, before it announces anything.

    Args:
        board: The releases.
        member: Membership in the group of trainers.
    """

    def __init__(self, board: ReleaseBoard, member: KafkaMembership) -> None:
        self._board = board
        self._member = member

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter in its own place."""
        return self._board.read_all()

    def read_beside(self) -> Sequence[DrafterReleased]:
        """Return the newest release of the version beside every drafter that has had one."""
        return self._board.read_beside()

    def publish(self, release: DrafterReleased) -> None:
        """Publish durably what stands in the drafter's own place; returns once stored."""
        self._refuse_unless_elected(release)
        self._board.publish(release)

    def publish_beside(self, release: DrafterReleased) -> None:
        """Publish durably what becomes of the version beside it; returns once stored."""
        self._refuse_unless_elected(release)
        self._board.publish_beside(release)

    def _refuse_unless_elected(self, release: DrafterReleased) -> None:
        """Raise ``FencedError`` unless the group confirms this member just now."""
        if not self._member.is_confirmed(CONFIRM_SECONDS) or not self._member.owned:
            raise FencedError(
                f"drafter {release.drafter_id}: version {release.version} is not announced, the "
                "group of trainers no longer counts on this one; it stands by"
            )


class ElectedTraining:
    """Trains while a group of trainers gives us the single partition of the releases.

    Args:
        log: Where the events come from; all partitions are read.
        build: Builds the trainer from the latest releases, anew at every election.
        member: Membership in the group, on the topic of releases.
        refused: Keeps events that cannot be trained on.

    Attributes:
        member: The membership; its user starts and closes it.
        is_active: This process trains; the others stand by.
        num_elections: How often it became the active one.
        num_untrainable: Events set aside.
        num_fenced: Times that it was kept from releasing: another trainer had, or was elected.
        last_poll_seconds: Monotonic time of the last look at the events, for liveness.
    """

    def __init__(
        self,
        log: EventLog,
        build: Callable[[], Trainer],
        member: KafkaMembership,
        refused: RefusedEvents,
    ) -> None:
        self._log = log
        self._build = build
        self.member = member
        self._refused = refused
        self.is_active = False
        self.num_elections = 0
        self.num_untrainable = 0
        self.num_fenced = 0
        self.last_poll_seconds = time.monotonic()

    def run(self, stop: Callable[[], bool]) -> None:
        """Stand by and train by turns until ``stop()``.

        What was trained since the last release is forgotten with the office; whoever is elected
        next reads those events again.
        """
        while not stop():
            self._heed_changes()
            self.last_poll_seconds = time.monotonic()
            if not self.is_active:
                time.sleep(STANDBY_SECONDS)
                continue
            try:
                self._train_while_active(stop)
            except FencedError as error:
                # Ours was the older view: begin again from what is released, if still elected.
                self.num_fenced += 1
                logger.warning("%s", error)
                time.sleep(STANDBY_SECONDS)

    def _train_while_active(self, stop: Callable[[], bool]) -> None:
        trainer = self._build()
        self.num_elections += 1
        source = LogEventSource(self._log, range(self._log.num_partitions(VERIFICATION_EVENTS)))
        for partition, offset in trainer.start_offsets().items():
            source.seek(partition, offset)
        while self.is_active and not stop():
            self.last_poll_seconds = time.monotonic()
            for received in source.poll(POLL_SECONDS):
                try:
                    trainer.train(received)
                except ValueError as error:
                    self.num_untrainable += 1
                    self._refused.set_aside(received, str(error))
                if not self._still_active() or stop():
                    return
            self._still_active()

    def _still_active(self) -> bool:
        self._heed_changes()
        return self.is_active

    def _heed_changes(self) -> None:
        for change in self.member.take_changes():
            self.is_active = change.kind is ChangeKind.ASSIGNED
            change.done.set()
            if self.is_active:
                # A position to commit lets the group confirm us.
                self.member.commit(0, 0)
