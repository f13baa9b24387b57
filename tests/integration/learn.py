"""Learners to be killed: ``python -m tests.integration.learn LOG``.

For every line on the standard input, a number of events between publications, it starts a learner
in a process of its own, prints that process's id, and waits for its end. Forked, because
importing everything takes a second.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from learner.ports import PolicyBoard
from learner.service import LearnerSettings, PolicyLearner
from pipeline.boards import LogEventSource, LogPolicyBoard
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import EventLog
from schemas.arrow import LoggedEvent
from schemas.topics import VERIFICATION_EVENTS


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


def main(log_path: Path) -> None:
    """Serve until the standard input ends."""
    for line in sys.stdin:
        process_id = os.fork()
        if process_id == 0:
            _learn(log_path, publish_every_events=int(line))
        sys.stdout.write(f"{process_id}\n")
        sys.stdout.flush()
        os.waitpid(process_id, 0)


def _learn(log_path: Path, *, publish_every_events: int) -> None:
    """Learn for ever."""
    try:
        log = EmbeddedEventLog(log_path)
        board = LogPolicyBoard(log, source="killed")
        learner, _ = make_learner(
            log, publish_every_events=publish_every_events, board=board, group="killed"
        )
        learner.run(lambda: False)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
