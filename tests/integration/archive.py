"""Archivers to be killed: ``python -m tests.integration.archive LOG FOLDER``.

A line on the standard input starts one (``tests.integration.killing``).
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from pipeline.archive.archiver import Archiver
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.messaging.dead_letters import DeadLetterTopic
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.killing import serve_forks


def archive_for_ever(log_path: Path, folder: Path) -> None:
    """Archive until killed, with small files, so that it is nearly always writing one."""
    log = EmbeddedEventLog(log_path)
    archiver = Archiver(
        log,
        VERIFICATION_EVENTS,
        folder,
        dead_letters=DeadLetterTopic(log),
        max_events_per_file=3,
        max_seconds_per_file=0.05,
    )
    archiver.run(threading.Event())


if __name__ == "__main__":
    serve_forks(lambda _: archive_for_ever(Path(sys.argv[1]), Path(sys.argv[2])))
