"""The worker of the soak: ``python -m pipeline.bench.soak_worker WINDOWS``.

It draws events of the described shape once and sends them again and again as new ones, through the
emitter and the sender of a real worker. It waits where learner or archiver are far behind: how
much the log holds is no part of the measurement. Every line that it prints is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from inference.emission import Emitter
from pipeline.archive.log_files import log_files
from pipeline.configuration.settings import Settings, load_settings
from pipeline.eventlog.ports import EventLog, Message
from pipeline.messaging.event_logs import open_log
from pipeline.messaging.event_sender import LogEventSender
from pipeline.operations.estimate import Fleet
from pipeline.operations.estimate_sample import sample_events
from schemas.events import VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

FLEET = Fleet(requests_per_second=10.0)
"""The traffic of the soak, which ``draftloop estimate`` plans for."""

NUM_REQUESTS = 400
"""Drawn requests; so many that no compression sees one of them twice."""
SEED = 1
"""Another one than the estimate's own."""

NUM_STREAMS = 16
LEARNER_GROUP = "draftloop.learner"
MOST_QUEUED = 400
MOST_UNREAD = 3000
LOOK_SECONDS = 0.5
CLOSE_SECONDS = 60.0


class CountingLog:
    """The event log, and the bytes of the values that were appended."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self.schemas = log.schemas
        self.num_bytes = 0

    def append(self, topic: str, messages: Sequence[Message]) -> Sequence[tuple[int, int]]:
        """Append and count."""
        places = self._log.append(topic, messages)
        self.num_bytes += sum(len(message.value or b"") for message in messages)
        return places

    def __getattr__(self, name: str) -> object:
        return getattr(self._log, name)


@dataclass(kw_only=True, slots=True)
class Sent:
    """What was sent so far."""

    num_events: int = 0
    num_windows: int = 0
    num_bytes: int = 0
    is_done: bool = False


def stamped_events(settings: Settings, num_windows: int) -> Iterator[VerificationEvent]:
    """Yield events with at least so many windows together, each a new one."""
    drawn = sample_events(settings, FLEET, num_requests=NUM_REQUESTS, has_content=False, seed=SEED)
    epoch, sequence, sent = time.time_ns() // 1000, 0, 0
    while sent < num_windows:
        event = drawn[sequence % len(drawn)]
        stream = f"soak-{sequence // 8 % NUM_STREAMS}"
        yield replace(
            event,
            event_id=f"{epoch:x}{sequence:018x}",
            produced_at=datetime.now(UTC),
            worker_epoch=epoch,
            sequence=sequence,
            stream=stream,
        )
        sent += len(event.windows.start)
        sequence += 1


class Pace:
    """Tells how far learner and archiver are behind."""

    def __init__(self, settings: Settings, log: EventLog) -> None:
        self._settings = settings
        self._log = log
        self._partitions = range(log.num_partitions(VERIFICATION_EVENTS))

    def num_unread(self, num_sent: int) -> int:
        """Return the events that the slower of the two has not read, files not written included."""
        learned = sum(
            self._log.committed(LEARNER_GROUP, VERIFICATION_EVENTS, p) or 0
            for p in self._partitions
        )
        ends = dict.fromkeys(self._partitions, 0)
        for file in log_files(self._settings.data, VERIFICATION_EVENTS):
            ends[file.partition] = max(ends[file.partition], file.last_offset + 1)
        return num_sent - min(learned, sum(ends.values()))


def main(num_windows: int) -> None:
    """Send, and print what was sent twice a second and at the end."""
    settings = load_settings()
    sent = Sent()
    with closing(open_log(settings)) as log:
        counting = CountingLog(log)
        sender = LogEventSender(lambda: counting, source="soak")  # type: ignore[arg-type,return-value]
        emitter = Emitter(sender, capacity=10 * MOST_QUEUED, max_batch=MOST_QUEUED)
        pace = Pace(settings, log)
        most_unread = MOST_UNREAD + settings.archiver.max_events_per_file * len(pace._partitions)
        looked = time.monotonic()
        for event in stamped_events(settings, num_windows):
            emitter.emit(event)
            sent.num_events += 1
            sent.num_windows += len(event.windows.start)
            while emitter.num_emitted - emitter.num_sent > MOST_QUEUED:
                time.sleep(0.002)
            if time.monotonic() - looked > LOOK_SECONDS:
                _say(sent, counting)
                while pace.num_unread(sent.num_events) > most_unread:
                    time.sleep(LOOK_SECONDS / 5)
                looked = time.monotonic()
        num_unsent = emitter.close(CLOSE_SECONDS)
        sent.is_done = num_unsent == emitter.num_dropped == sender.num_unsendable == 0
        _say(sent, counting)
    # Its parent reads what it has used only while it is there.
    threading.Event().wait(LOOK_SECONDS)


def _say(sent: Sent, counting: CountingLog) -> None:
    sent.num_bytes = counting.num_bytes
    line = {name: getattr(sent, name) for name in Sent.__slots__}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]))
