"""Learners to be killed: ``python -m tests.integration.learn LOG``.

A line on the standard input is the number of events between publications
(``tests.integration.killing``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from learner.ports import PolicyBoard
from learner.service import LearnerSettings, PolicyLearner
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import EventLog
from pipeline.messaging.boards import LogEventSource, LogPolicyBoard
from schemas.arrow import LoggedEvent
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.killing import load_kernels, serve_forks


class DrainingSource(LogEventSource):
    """Tells when a poll has found nothing more."""

    is_drained = False

    def poll(self, timeout_seconds: float) -> Sequence[LoggedEvent]:
        """Poll and remember whether anything came."""
        events = super().poll(timeout_seconds)
        self.is_drained = not events
        return events


def make_learner(
    log: EventLog, *, publish_every_events: int, board: PolicyBoard, group: str
) -> tuple[PolicyLearner, DrainingSource]:
    """Return a learner over all partitions, and its source."""
    partitions = range(log.num_partitions(VERIFICATION_EVENTS))
    source = DrainingSource(log, partitions, group=group, max_messages=20)
    settings = LearnerSettings(publish_every_events=publish_every_events, poll_seconds=0.01)
    return PolicyLearner(source, board, settings, now=lambda: datetime.now(UTC)), source


def learn_for_ever(log_path: Path, publish_every_events: int) -> None:
    """Learn until killed."""
    log = EmbeddedEventLog(log_path)
    board = LogPolicyBoard(log, source="killed")
    learner, _ = make_learner(
        log, publish_every_events=publish_every_events, board=board, group="killed"
    )
    learner.run(lambda: False)


if __name__ == "__main__":
    load_kernels()
    serve_forks(lambda line: learn_for_ever(Path(sys.argv[1]), int(line)))
