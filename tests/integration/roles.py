"""The services of the fault run: ``python -m tests.integration.roles SERVERS FOLDER``.

A line on the standard input is a role and a number (``tests.integration.killing``). A service ends
well on SIGTERM, and writes to ``ROLE-NUMBER.err`` in the folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from inference.emission import Emitter
from learner.online_trainer import OnlineTrainer
from learner.ports import ReleaseBoard
from learner.service import LearnerSettings, PolicyLearner
from learner.training import DrafterTrainer
from pipeline.archive.archiver import Archiver, ArchiverError
from pipeline.elected_training import GROUP as TRAINER_GROUP
from pipeline.elected_training import ElectedReleases, ElectedTraining
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.eventlog.ports import EventLogError, EventLogUnavailableError
from pipeline.messaging.boards import LogPolicyBoard, LogRefusedEvents, LogReleaseBoard
from pipeline.messaging.dead_letters import DeadLetterTopic
from pipeline.messaging.event_sender import LogEventSender
from pipeline.messaging.group_source import GroupEventSource
from pipeline.messaging.outages import run_through_outages
from pipeline.messaging.topics import TopicPlan, create_topics
from pipeline.releases.registry import DrafterRegistry
from schemas.events import VerificationEvent
from schemas.topics import DRAFTER_RELEASES, VERIFICATION_EVENTS
from tests.integration.killing import load_kernels, serve_forks
from tests.learner.trainers import SETTINGS, Features, Softmax, event_of
from tests.schemas.builders import PRODUCED_AT, make_event

NUM_STREAMS = 12
TRAINED_STREAM = "stream-a"
DRAFTER_ID = "softmax"
TRAINED_EVERY = 25
TRAINING = replace(SETTINGS, release_every_events=4)
KEEP_SECONDS = 20.0
LEARNER_ID = "group"
SECONDS_BETWEEN_EVENTS = 0.02
RETRY_SECONDS = 0.2
NUM_PARTITIONS = 4
OPTIONS = KafkaOptions(timeout_seconds=10.0, session_timeout_seconds=6.0)


def open_log(servers: str) -> KafkaEventLog:
    """Open the broker's log with its topics."""
    log = KafkaEventLog([servers], OPTIONS)
    try:
        create_topics(log, TopicPlan(num_partitions=NUM_PARTITIONS))
    except BaseException:
        log.close()
        raise
    return log


def open_log_patiently(servers: str) -> KafkaEventLog:
    """Open it once the broker can be reached, as every service begins."""
    while True:
        try:
            return open_log(servers)
        except EventLogUnavailableError:
            time.sleep(RETRY_SECONDS)


def event(worker: int, sequence: int) -> VerificationEvent:
    """Return an event of a worker; some of them can be trained on, all those in one stream."""
    worker_id = f"worker-{worker}"
    if sequence % TRAINED_EVERY == 0:
        return replace(event_of(sequence, worker_epoch=worker), worker_id=worker_id)
    return make_event(
        sequence=sequence,
        worker_id=worker_id,
        worker_epoch=worker,
        stream=f"stream-{sequence % NUM_STREAMS}",
        num_windows=2,
    )


def trainer(board: ReleaseBoard, registry: DrafterRegistry) -> OnlineTrainer:
    """Build the trainer of one drafter."""
    one = DrafterTrainer(
        Softmax(),
        TRAINING,
        target_fingerprint="fingerprint-0",
        tokenizer_hash="tokenizer-0",
        store=registry,
        board=board,
        now=lambda: PRODUCED_AT,
    )
    return OnlineTrainer([one], Features(), target_fingerprint="fingerprint-0")


def _learn(servers: str, folder: Path, number: int, stop: threading.Event) -> None:
    log = open_log_patiently(servers)
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
    log = open_log_patiently(servers)
    member = log.member(DRAFTER_RELEASES, TRAINER_GROUP)
    board = ElectedReleases(LogReleaseBoard(log, source=f"trainer-{number}"), member)
    registry = DrafterRegistry(str(folder / "registry"), keep_seconds=KEEP_SECONDS)
    training = ElectedTraining(log, lambda: trainer(board, registry), member, LogRefusedEvents(log))
    member.start()
    with closing(member):
        run_through_outages("trainer", training.run, stop)


def _archive(servers: str, folder: Path, number: int, stop: threading.Event) -> None:
    while not stop.is_set():
        log = open_log_patiently(servers)
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
            time.sleep(RETRY_SECONDS)
        finally:
            log.close()


def _work(servers: str, folder: Path, number: int, stop: threading.Event) -> None:
    sender = LogEventSender(lambda: open_log(servers), source=f"worker-{number}")
    emitter = Emitter(sender, capacity=500)
    sequence = 1
    while not stop.wait(SECONDS_BETWEEN_EVENTS):
        emitter.emit(event(number, sequence))
        sequence += 1
    emitter.close(5.0)


ROLES: dict[str, Callable[[str, Path, int, threading.Event], None]] = {
    "learner": _learn,
    "trainer": _train,
    "archiver": _archive,
    "worker": _work,
}


def run_role(servers: str, folder: Path, line: str) -> None:
    """Be a service until SIGTERM."""
    role, number = line.split()
    output = os.open(folder / f"{role}-{number}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(output, 2)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    ROLES[role](servers, folder, int(number), stop)


if __name__ == "__main__":
    load_kernels()
    serve_forks(lambda line: run_role(sys.argv[1], Path(sys.argv[2]), line))
