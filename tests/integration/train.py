"""Gated trainers to be killed: ``python -m tests.integration.train FOLDER``.

For every line on the standard input it starts a trainer over the log and the registry in FOLDER in
a process of its own, prints that process's id, and waits for its end. Forked, because importing
everything takes a second. A trainer that has read all there is writes the offset where it stands
into ``FOLDER/position``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from learner.gate import GateSettings
from learner.online_trainer import OnlineTrainer
from learner.training import DrafterTrainer
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.messaging.boards import LogEventSource, LogReleaseBoard
from pipeline.releases.registry import DrafterRegistry
from tests.learner.trainers import SETTINGS, Features, Softmax

GATE = GateSettings(
    min_requests=3, max_requests=12, canary_share=0.5, min_canary_requests=1, error=0.2
)
STEPS_PER_EVENT = SETTINGS.steps_per_event


def main(folder: Path) -> None:
    """Serve until the standard input ends."""
    for _ in sys.stdin:
        process_id = os.fork()
        if process_id == 0:
            _train(folder)
        sys.stdout.write(f"{process_id}\n")
        sys.stdout.flush()
        os.waitpid(process_id, 0)


def _train(folder: Path) -> None:
    """Train for ever."""
    try:
        log = EmbeddedEventLog(folder / "log.sqlite")
        trainer = DrafterTrainer(
            Softmax(),
            replace(SETTINGS, gate=GATE),
            target_fingerprint="fingerprint-0",
            tokenizer_hash="tokenizer-0",
            store=DrafterRegistry(str(folder)),
            board=LogReleaseBoard(log, source="killed"),
            now=lambda: datetime.now(UTC),
        )
        online = OnlineTrainer([trainer], Features(), target_fingerprint="fingerprint-0")
        source = LogEventSource(log, [0], group="killed", max_messages=5)
        for partition, offset in online.start_offsets().items():
            source.seek(partition, offset)
        position = 0
        while True:
            for received in source.poll(0.01):
                online.train(received)
                position = received.offset + 1
            (folder / "position").write_text(str(position))
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
