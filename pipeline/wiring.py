"""Wiring: services from settings. Here every port meets its adapter, and every seed is set."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from inference.emission import Emitter
from inference.engine import EngineOptions
from inference.model_files import resolve_target
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.target import Target, load_target
from inference.worker import Worker, WorkerOptions
from learner.online_trainer import OnlineTrainer
from learner.ports import EventSource, ReleaseBoard
from learner.selection import parse_policy
from learner.service import LearnerSettings, PolicyLearner
from learner.stream_state import StreamSettings
from learner.training import DrafterTrainer, TrainingSettings
from learner.updates.online_gradient import OnlineGradientSettings
from pipeline.archiver import FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, Archiver
from pipeline.boards import (
    LogEventSender,
    LogEventSource,
    LogPolicyBoard,
    LogRefusedEvents,
    LogReleaseBoard,
)
from pipeline.dead_letters import DeadLetterTopic
from pipeline.drafters import draft_vocabulary, pool_drafters, trainable

# Known by these names here, too: most of what opens a log wants other parts beside it.
from pipeline.event_logs import bare_log as bare_log
from pipeline.event_logs import open_log as open_log
from pipeline.event_logs import topic_plan as topic_plan
from pipeline.eventlog.ports import EventLog, EventLogUnavailableError
from pipeline.features import FeatureRecorder, RecordedFeatures
from pipeline.heads import HeadLoader
from pipeline.inbox import LogInbox
from pipeline.loops import Loop
from pipeline.pool_settings import DrafterSettings
from pipeline.registry import DrafterRegistry
from pipeline.release_history import RecordedReleases, ReleaseHistory
from pipeline.settings import Settings, SettingsError
from pipeline.traces import TraceContexts
from schemas.events import ReleaseState, VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

CLOSE_SECONDS = 10.0
"""Longest wait for unsent events when a worker ends."""

KEEP_VERSION_SECONDS = 60.0
"""No version is deleted before its successor is so old: whoever still loads it has that long."""

Progress = Callable[[str], None]

logger = logging.getLogger(__name__)


def utc_now() -> datetime:
    """Return the time in UTC."""
    return datetime.now(UTC)


def check_schemas(settings: Settings) -> list[str]:
    """Return one line per subject of the schema registry that would refuse this build's schema."""
    if not settings.schema_registry.url or not settings.event_log.url.startswith("kafka://"):
        return []
    from pipeline.kafka_options import registry_client
    from pipeline.schema_registry import incompatible_schemas

    return incompatible_schemas(registry_client(settings))


def open_log_patiently(
    settings: Settings, stop: threading.Event, loop: Loop | None = None
) -> EventLog | None:
    """Open the event log as soon as it can be reached, trying again with growing pauses.

    Args:
        settings: Of the event log.
        stop: Ends it.
        loop: Says meanwhile what is waited for.

    Returns:
        The log; None if ``stop`` was set before.
    """
    loop = loop or Loop("opening")
    pause_seconds = FIRST_RETRY_SECONDS
    while not stop.is_set():
        try:
            log = open_log(settings)
            loop.recover()
            return log
        except EventLogUnavailableError as error:
            loop.miss(str(error))
            logger.warning("degraded, next try in %.1f s: %s", pause_seconds, error)
            stop.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LAST_RETRY_SECONDS)
    return None


def open_target(settings: Settings, *, progress: Progress | None = None) -> Target:
    """Load the target, converting it first if it has never been used here."""
    torch.set_num_threads(settings.worker.num_threads)
    device = compute_device(settings.model.device)
    folder = resolve_target(settings.model.path, settings.cache, progress=progress)
    dtype = getattr(torch, settings.model.dtype)
    return load_target(folder, dtype=dtype, device=device, cache=settings.cache)


def compute_device(setting: str) -> str:
    """Return the device that ``model.device`` stands for: ``cpu`` or ``cuda``.

    Raises:
        SettingsError: If it is ``cuda`` and there is none.
    """
    if setting != "cpu" and torch.cuda.is_available():
        return "cuda"
    if setting == "cuda":
        raise SettingsError(
            f"model.device = 'cuda': torch {torch.__version__} finds no CUDA device: install its "
            "CUDA build and the driver, or set model.device to cpu"
        )
    return "cpu"


@dataclass(frozen=True, slots=True)
class RunningWorker:
    """A worker with the threads that connect it; ``close`` ends them."""

    worker: Worker
    emitter: Emitter
    sender: LogEventSender
    inbox: LogInbox
    loader: HeadLoader
    features: FeatureRecorder | None

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> int:
        """Stop following, send what is queued, and return how many events stayed unsent."""
        self.inbox.close()
        return self.emitter.close(timeout_seconds)


class _TappedEmitter:
    """Shows every event to a listener on its way to the emitter."""

    def __init__(self, emitter: Emitter, tap: Callable[[VerificationEvent], None]) -> None:
        self._emitter = emitter
        self._tap = tap

    def emit(self, event: VerificationEvent) -> None:
        """Show and queue the event."""
        self._tap(event)
        self._emitter.emit(event)


def start_worker(
    settings: Settings,
    target: Target,
    *,
    tap: Callable[[VerificationEvent], None] | None = None,
    traces: TraceContexts | None = None,
) -> RunningWorker:
    """Build a worker on a loaded target and start its inbox.

    Args:
        settings: Of the worker.
        target: The verifying model.
        tap: Shown every event as it is emitted, on the serving thread.
        traces: Trace contexts of the requests, for the headers of their events.
    """
    epoch = time.time_ns() // 1000
    features = _feature_recorder(settings, epoch)
    loader = HeadLoader(target, DrafterRegistry(str(settings.data)))
    sender = LogEventSender(
        lambda: open_log(settings),
        source=settings.worker.worker_id,
        trace_headers=(traces or TraceContexts()).headers,
    )
    emitter = Emitter(
        sender,
        capacity=settings.worker.emit_capacity,
        prepare=features.prepare if features else None,
    )
    inbox = LogInbox(
        lambda: open_log(settings),
        loader,
        [one.drafter_id for one in settings.drafters],
        poll_seconds=settings.worker.poll_seconds,
        canary_share=settings.gate.canary_share if settings.gate.enabled else 0.0,
    )
    worker = Worker(
        target,
        DrafterPool(_drafters(settings, target)),
        _worker_options(settings, epoch),
        sink=_TappedEmitter(emitter, tap) if tap else emitter,
        inbox=inbox,
        recorder=features,
    )
    inbox.start()
    return RunningWorker(worker, emitter, sender, inbox, loader, features)


def _drafters(settings: Settings, target: Target) -> list[Drafter]:
    return pool_drafters(
        settings.drafters,
        target,
        resolve=lambda path: resolve_target(path, settings.cache),
        dtype=target.dtype,
    )


def _feature_recorder(settings: Settings, epoch: int) -> FeatureRecorder | None:
    if not settings.features.enabled:
        return None
    return FeatureRecorder(
        str(settings.data),
        worker_id=settings.worker.worker_id,
        worker_epoch=epoch,
        max_bytes=settings.features.max_bytes,
        share=settings.features.share,
    )


def _worker_options(settings: Settings, epoch: int) -> WorkerOptions:
    return WorkerOptions(
        worker_id=settings.worker.worker_id,
        worker_epoch=epoch,
        policy=settings.worker.policy,
        segment_tokens=settings.worker.segment_tokens,
        engine=EngineOptions(
            num_speculative_tokens=settings.worker.num_speculative_tokens,
            score_block=settings.worker.score_block,
            first_level_block=settings.worker.first_level_block,
        ),
    )


def is_training(settings: Settings) -> bool:
    """Tell whether there are weights to train, and this process may train them."""
    heads = [drafter for drafter in settings.drafters if drafter.is_trained]
    may_train = settings.learner.steps_per_event and settings.worker.num_speculative_tokens
    return bool(heads and may_train)


def build_learner(
    settings: Settings,
    log: EventLog,
    *,
    progress: Progress | None = None,
    source: EventSource | None = None,
    watch: Callable[[EventSource], EventSource] = lambda source: source,
) -> PolicyLearner:
    """Build the learner; heads of the pool that were never released are released untrained.

    Args:
        settings: Of the learner.
        log: The event log.
        progress: Told what takes long.
        source: Where the events come from, if several learners share them; weights are then
            trained elsewhere.
        watch: Wraps the source, to see what is read.
    """
    one = settings.learner
    trains_here = source is None and is_training(settings)
    board = release_board(settings, log)
    trainer = build_trainer(settings, board, progress=progress) if trains_here else None
    return PolicyLearner(
        watch(source or LogEventSource(log, range(log.num_partitions(VERIFICATION_EVENTS)))),
        LogPolicyBoard(log, source=one.learner_id),
        LearnerSettings(
            learner_id=one.learner_id,
            publish_every_events=one.publish_policy_every_events,
            publish_seconds=one.publish_policy_every_seconds,
            streams=StreamSettings(policy=parse_policy(settings.worker.policy)),
        ),
        now=utc_now,
        trainer=trainer,
        refused=LogRefusedEvents(log),
    )


def release_board(settings: Settings, log: EventLog, source: str = "") -> ReleaseBoard:
    """Return the board that versions are announced on, with the history of their steps.

    Args:
        settings: Say where the history is.
        log: Has the topic of releases.
        source: Who announces; empty = this learner.
    """
    board = LogReleaseBoard(log, source=source or settings.learner.learner_id)
    return RecordedReleases(board, ReleaseHistory(str(settings.data)))


def build_trainer(
    settings: Settings, board: ReleaseBoard, *, progress: Progress | None = None
) -> OnlineTrainer:
    """Build the trainer of every head, each going on from its latest release."""
    target = open_target(settings, progress=progress)
    registry = DrafterRegistry(str(settings.data), keep_seconds=KEEP_VERSION_SECONDS)
    loader = HeadLoader(target, registry)
    texts = _draft_vocabulary_texts(settings.learner.draft_vocabulary_text)
    released = {release.drafter_id: release for release in board.read_all()}
    fresh = loader.rows_of(
        draft_vocabulary(target, texts, size=settings.learner.draft_vocabulary_size)
    )
    trainers = []
    for one in settings.drafters:
        known = released.get(one.drafter_id)
        if known is not None and known.state is ReleaseState.RETIRED:
            logger.warning("drafter %s is retired and learns nothing", one.drafter_id)
        elif one.is_trained:
            # A released head keeps the draft vocabulary that it was born with.
            rows = loader(known).rows if known else fresh
            trainers.append(
                DrafterTrainer(
                    trainable(one, rows, num_levels=settings.worker.num_speculative_tokens),
                    training_settings(settings, one),
                    target_fingerprint=target.fingerprint,
                    tokenizer_hash=target.tokenizer_hash,
                    store=registry,
                    board=board,
                    now=utc_now,
                )
            )
    return OnlineTrainer(
        trainers,
        RecordedFeatures(str(settings.data)),
        target_fingerprint=target.fingerprint,
    )


def _draft_vocabulary_texts(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise SettingsError(
            f"learner.draft_vocabulary_text = {str(path)!r}: cannot be read ({error}): "
            "name a text file in UTF-8, or unset it"
        ) from error


def training_settings(settings: Settings, head: DrafterSettings) -> TrainingSettings:
    """Return how one head is trained."""
    one = settings.learner
    return TrainingSettings(
        num_levels=settings.worker.num_speculative_tokens,
        batch_size=one.batch_size,
        steps_per_event=one.steps_per_event,
        memory_positions=head.memory_positions,
        replay_bytes=head.replay_bytes,
        release_every_events=one.publish_weights_every_events,
        keep_versions=one.keep_versions,
        seed=one.seed,
        rule=one.update_rule,
        gradient=OnlineGradientSettings(learning_rate=one.learning_rate),
        gate=settings.gate.settings(),
        experts=settings.experts.settings(),
    )


def build_archiver(settings: Settings, log: EventLog) -> Archiver:
    """Build the archiver of the verification events."""
    return Archiver(
        log,
        VERIFICATION_EVENTS,
        Path(settings.data),
        dead_letters=DeadLetterTopic(log),
        max_events_per_file=settings.archiver.max_events_per_file,
        max_seconds_per_file=settings.archiver.max_seconds_per_file,
    )
