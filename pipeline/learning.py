"""The learner's process: alone over the embedded log, in groups over a broker."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from learner.ports import EventSource, FencedError
from learner.selection import parse_policy
from learner.service import LearnerSettings, PolicyLearner
from learner.stream_state import StreamSettings
from pipeline.clock import utc_now
from pipeline.configuration.settings import Settings
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.ports import EventLog
from pipeline.locks import only_one
from pipeline.messaging.boards import LogEventSource, LogPolicyBoard, LogRefusedEvents
from pipeline.messaging.outages import run_through_outages
from pipeline.operations.service_page import ServicePage
from pipeline.operations.service_watch import LearnerMetrics, WatchedSource
from pipeline.releases.release_history import release_board
from schemas.topics import DRAFTER_RELEASES, VERIFICATION_EVENTS

if TYPE_CHECKING:
    from pipeline.elected_training import ElectedTraining
    from pipeline.eventlog.kafka import KafkaEventLog
    from pipeline.wiring import Progress

LEARNER = "learner"
JOIN_SECONDS = 10.0

logger = logging.getLogger(__name__)


def run_learner(
    settings: Settings,
    log: EventLog,
    stop: threading.Event,
    *,
    progress: Progress | None = None,
    page: ServicePage | None = None,
) -> None:
    """Learn until ``stop`` is set.

    Over the embedded log one process does all. Over a broker several share the partitions for
    selection, and one of those that may train (``learner.steps_per_event``) trains every drafter.

    Args:
        settings: Of the learner.
        log: The event log.
        stop: Ends it.
        progress: Told what takes long.
        page: Shows what it does.

    Raises:
        LockError: If another learner works on this embedded log.
    """
    page = page or ServicePage()
    if not isinstance(log, EmbeddedEventLog):
        _run_in_groups(settings, log, stop, progress, page)
        return
    should_stop = page.loops.loop(LEARNER).moving(stop.is_set)
    # Two would both train and number every version.
    with only_one(settings.data, "learner", cure="end it, or use another data folder"):
        while not stop.is_set():
            try:
                with _shown_learner(settings, log, page, progress=progress) as learner:
                    learner.run(should_stop)
            except FencedError as error:
                # No other learner works here: an operator has moved a drafter.
                logger.warning("%s", error)


@contextmanager
def _shown_learner(
    settings: Settings,
    log: EventLog,
    page: ServicePage,
    *,
    progress: Progress | None = None,
    source: EventSource | None = None,
    training: ElectedTraining | None = None,
) -> Iterator[PolicyLearner]:
    """Build the learner, and show on the page what it does."""
    watched: list[WatchedSource] = []

    def watch(one: EventSource) -> EventSource:
        watched.append(WatchedSource(one, lambda p: log.end_offset(VERIFICATION_EVENTS, p)))
        return watched[-1]

    learner = build_learner(settings, log, progress=progress, source=source, watch=watch)
    metrics = LearnerMetrics(
        watched[0], learner.counts, is_shared=source is not None, training=training
    )
    with page.showing(metrics):
        yield learner


def _run_in_groups(
    settings: Settings,
    log: EventLog,
    stop: threading.Event,
    progress: Progress | None,
    page: ServicePage,
) -> None:
    # Imported here: without a broker nothing of its client is loaded.
    from pipeline.eventlog.kafka import KafkaEventLog
    from pipeline.messaging.group_source import GroupEventSource

    assert isinstance(log, KafkaEventLog)
    training = _elected_training(settings, log, progress) if is_training(settings) else None
    beside = _Beside(lambda: _train(training, stop, page), stop)
    if training is not None:
        beside.start()
    source = GroupEventSource(log)
    page.loops.watch("membership", lambda: source.seconds_since_group)
    try:
        with _shown_learner(settings, log, page, source=source, training=training) as learner:
            run_through_outages(LEARNER, learner.run, stop, page.loops.loop(LEARNER))
    finally:
        stop.set()
        source.close()
        beside.join()


def _elected_training(
    settings: Settings, log: KafkaEventLog, progress: Progress | None
) -> ElectedTraining:
    from pipeline.elected_training import GROUP, ElectedReleases, ElectedTraining
    from pipeline.training import build_trainer

    member = log.member(DRAFTER_RELEASES, GROUP)
    board = ElectedReleases(release_board(settings, log), member)
    return ElectedTraining(
        log,
        lambda: build_trainer(settings, board, progress=progress),
        member,
        LogRefusedEvents(log),
    )


def _train(training: ElectedTraining | None, stop: threading.Event, page: ServicePage) -> None:
    assert training is not None  # else it is not started
    training.member.start()
    try:
        run_through_outages("trainer", training.run, stop, page.loops.loop("trainer"))
    finally:
        training.member.close()


class _Beside:
    """A service in a thread beside the main one; when it fails, both end."""

    def __init__(self, run: Callable[[], None], stop: threading.Event) -> None:
        self._run_service = run
        self._stop = stop
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="training", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Wait for its end and raise what it has raised."""
        if self._thread.ident is not None:
            self._thread.join(JOIN_SECONDS)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._run_service()
        except BaseException as error:
            self._error = error
            self._stop.set()


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
    trainer = None
    if trains_here:
        # Here alone: a learner of selection needs no target, and none of its libraries.
        from pipeline.training import build_trainer

        trainer = build_trainer(settings, release_board(settings, log), progress=progress)
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
