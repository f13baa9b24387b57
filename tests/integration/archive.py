"""Archivers to be killed: ``python -m tests.integration.archive LOG FOLDER``.

For every line on the standard input it starts an archiver in a process of its own, prints that
process's id, and waits for its end. Forked, because importing everything takes a second.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from pipeline.archiver import Archiver
from pipeline.dead_letters import DeadLetterTopic
from pipeline.eventlog.embedded import EmbeddedEventLog
from schemas.topics import VERIFICATION_EVENTS


def main(log_path: Path, folder: Path) -> None:
    """Serve until the standard input ends."""
    for _ in sys.stdin:
        process_id = os.fork()
        if process_id == 0:
            _archive(log_path, folder)
        sys.stdout.write(f"{process_id}\n")
        sys.stdout.flush()
        os.waitpid(process_id, 0)


def _archive(log_path: Path, folder: Path) -> None:
    """Archive for ever, with small files, so that it is nearly always writing one."""
    try:
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
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
