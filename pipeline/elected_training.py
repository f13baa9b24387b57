"""Training by one process at a time: the others stand by and go on where its releases end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from learner.ports import RefusedEvents, Trainer
from learner.training import FencedError
from pipeline.boards import LogEventSource
from pipeline.eventlog.kafka_membership import ChangeKind, KafkaMembership
from pipeline.eventlog.ports import EventLog
from schemas.topics import VERIFICATION_EVENTS

GROUP = "draftloop.trainer"
STANDBY_SECONDS = 0.1
POLL_SECONDS = 0.5

logger = logging.getLogger(__name__)


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
        num_fenced: Times that another trainer had released a version meanwhile.
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
