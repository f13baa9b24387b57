"""The services to be killed: ``python -m tests.integration.roles SERVERS FOLDER``.

For every line on the standard input, a role and a number, it starts that service over the broker
in a process of its own and prints that process's id. Forked, because importing everything takes
seconds. A service ends well on SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from inference.emission import Emitter
from learner.online_trainer import OnlineTrainer
from learner.service import LearnerSettings, PolicyLearner
from learner.training import DrafterTrainer
from pipeline.archiver import Archiver, ArchiverError
from pipeline.boards import LogPolicyBoard, LogRefusedEvents, LogReleaseBoard
from pipeline.dead_letters import DeadLetterTopic
from pipeline.elected_training import GROUP as TRAINER_GROUP
from pipeline.elected_training import ElectedTraining
from pipeline.event_sender import LogEventSender
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.eventlog.ports import EventLogError
from pipeline.group_source import GroupEventSource
from pipeline.outages import run_through_outages
from pipeline.registry import DrafterRegistry
from schemas.events import VerificationEvent
from schemas.topics import DRAFTER_RELEASES, VERIFICATION_EVENTS
from tests.learner.trainers import SETTINGS, Features, Softmax, event_of
from tests.schemas.builders import PRODUCED_AT, make_event

NUM_STREAMS = 12
TRAINED_STREAM = "stream-a"
TRAINED_EVERY = 25
LEARNER_ID = "group"
OPTIONS = KafkaOptions(timeout_seconds=4.0, session_timeout_seconds=6.0)


def open_log(servers: str) -> KafkaEventLog:
    """Open the broker's log, soon disappointed by a broker that is away."""
    return KafkaEventLog([servers], OPTIONS)


def event(worker: int, sequence: int) -> VerificationEvent:
    """Return an event of a worker; some of them can be trained on, all those in one stream."""
    if sequence % TRAINED_EVERY == 0:
        return event_of(sequence, worker_epoch=worker)
    return make_event(
        sequence=sequence,
        worker_id=f"worker-{worker}",
        worker_epoch=worker,
        stream=f"stream-{sequence % NUM_STREAMS}",
        num_windows=2,
    )


def trainer(log: KafkaEventLog, board: LogReleaseBoard, folder: Path) -> OnlineTrainer:
    """Build the trainer of one drafter."""
    one = DrafterTrainer(
        Softmax(),
        SETTINGS,
        target_fingerprint="fingerprint-0",
        tokenizer_hash="tokenizer-0",
        store=DrafterRegistry(str(folder)),
        board=board,
        now=lambda: PRODUCED_AT,
    )
    return OnlineTrainer([one], Features(), target_fingerprint="fingerprint-0")


def _learn(servers: str, folder: Path, number: int, stop: threading.Event) -> None:
    log = open_log(servers)
    with closing(GroupEventSource(log)) as source:
        learner = PolicyLearner(
            source,
            LogPolicyBoard(log, source=f"learner-{number}"),
            LearnerSettings(
                learner_id=LEARNER_ID, publish_every_events=5 + 20 * (number % 4), poll_seconds=0.1
            ),
            now=lambda: datetime.now(UTC),
        )
        run_through_outages("learner", learner.run, stop)


def _train(servers: str, folder: Path, number: int, stop: threading.Event) -> None:
    log = open_log(servers)
    member = log.member(DRAFTER_RELEASES, TRAINER_GROUP)
    board = LogReleaseBoard(log, source=f"trainer-{number}")
    training = ElectedTraining(
        log, lambda: trainer(log, board, folder / "data"), member, LogRefusedEvents(log)
    )
    member.start()
    with closing(member):
        run_through_outages("trainer", training.run, stop)


def _archive(servers: str, folder: Path, number: int, stop: threading.Event) -> None:
    while not stop.is_set():
        log = open_log(servers)
        try:
            with Archiver(
                log,
                VERIFICATION_EVENTS,
                folder / "archive",
                dead_letters=DeadLetterTopic(log),
                max_events_per_file=150,
                max_seconds_per_file=0.5,
            ) as archiver:
                archiver.run(stop)
                return
        except (EventLogError, ArchiverError):
            # The broker was away, or the one that was killed is not quite dead.
            time.sleep(0.2)


def _work(servers: str, folder: Path, number: int, stop: threading.Event) -> None:
    sender = LogEventSender(lambda: open_log(servers), source=f"worker-{number}")
    emitter = Emitter(sender, capacity=500)
    sequence = 1
    while not stop.wait(0.01):
        emitter.emit(event(number, sequence))
        sequence += 1
    emitter.close(5.0)


ROLES: dict[str, Callable[[str, Path, int, threading.Event], None]] = {
    "learner": _learn,
    "trainer": _train,
    "archiver": _archive,
    "worker": _work,
}


def main(servers: str, folder: Path) -> None:
    """Serve until the standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        role, number = line.split()
        process_id = os.fork()
        if process_id == 0:
            _run(role, servers, folder, int(number))
        sys.stdout.write(f"{process_id}\n")
        sys.stdout.flush()


def _run(role: str, servers: str, folder: Path, number: int) -> None:
    """Be the service, and end."""
    status = 1
    try:
        output = os.open(folder / f"{role}-{number}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 2)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ROLES[role](servers, folder, number, stop)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
