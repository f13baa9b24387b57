"""Jobs by the clock, in a process of their own: refresh heads, keep the log in order, report.

Every job may be run again at any time: what is contained in released weights is not trained on
twice, what is merged is not merged again. Times are UTC, so no hour is skipped or comes twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

from apscheduler.events import (
    EVENT_JOB_ERROR,
    EVENT_JOB_EXECUTED,
    EVENT_JOB_MAX_INSTANCES,
    EVENT_JOB_MISSED,
)
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pipeline.configuration.settings import Settings
from pipeline.locks import LockError, only_one
from pipeline.operations.loops import PREFIX
from pipeline.operations.service_page import ServicePage
from schemas.errors import KnownError

logger = logging.getLogger(__name__)

Job = Callable[[Callable[[], bool]], object]
"""Does its work until done, or until the function it is given says that it must end."""

_OUTCOMES = {
    EVENT_JOB_EXECUTED: "done",
    EVENT_JOB_ERROR: "failed",
    EVENT_JOB_MISSED: "missed",
    EVENT_JOB_MAX_INSTANCES: "skipped",
}


class ScheduleError(KnownError):
    """There is nothing to run; the message says which keys would change that."""


def cron_trigger(text: str) -> Any:
    """Parse a cron text of five fields.

    Raises:
        ValueError: If it is none; the message says what is.
    """
    try:
        return CronTrigger.from_crontab(text, timezone=UTC)
    except ValueError as error:
        raise ValueError(
            f"{error}; expected five fields such as '30 3 * * *' (minute, hour, day of the month, "
            "month, day of the week), in UTC"
        ) from error


class Schedule:
    """Runs jobs by their cron texts until told to stop.

    Args:
        name_to_job: The jobs.
        name_to_cron: When each runs; the empty text = never.
        misfire_seconds: How late a job may start.
        max_job_seconds: How long it may run.

    Attributes:
        counts: Per (job, outcome) how often; outcomes are done, failed, missed and skipped, the
            last for one that was still running when it was due again.
    """

    def __init__(
        self,
        name_to_job: Mapping[str, Job],
        name_to_cron: Mapping[str, str],
        *,
        misfire_seconds: float,
        max_job_seconds: float,
    ) -> None:
        self._stop = threading.Event()
        self._max_job_seconds = max_job_seconds
        self._job_to_began: dict[str, float] = {}
        self.counts: Counter[tuple[str, str]] = Counter()
        self._scheduler = BackgroundScheduler(
            timezone=UTC,
            job_defaults={
                "coalesce": True,
                "max_instances": 1,
                "misfire_grace_time": max(int(misfire_seconds), 1),
            },
        )
        wanted = {name: text for name, text in name_to_cron.items() if text}
        if not wanted:
            keys = ", ".join(f"schedule.{name}" for name in name_to_cron)
            raise ScheduleError(f"no job has a schedule; set one of {keys}")
        for name, text in wanted.items():
            self._scheduler.add_job(
                self.run_job,
                cron_trigger(text),
                args=(name, name_to_job[name]),
                id=name,
                replace_existing=True,
            )
        self._scheduler.add_listener(self._note, sum(_OUTCOMES))

    def run_job(self, name: str, job: Job) -> None:
        """Run one job now, within its time."""
        began = time.monotonic()

        def must_end() -> bool:
            return self._stop.is_set() or time.monotonic() - began > self._max_job_seconds

        logger.info("job %s begins", name)
        self._job_to_began[name] = began
        try:
            job(must_end)
        finally:
            self._job_to_began.pop(name, None)
        logger.info("job %s took %.1f s", name, time.monotonic() - began)

    @property
    def overdue_seconds(self) -> float:
        """Seconds since the scheduler should have begun a job, or a job should have ended.

        Far beyond 0 its thread is dead, or a job has not heeded that its time was over.
        """
        if not self._scheduler.running:
            return 0.0
        now, clock = datetime.now(UTC), time.monotonic()
        due = [job.next_run_time for job in self._scheduler.get_jobs() if job.next_run_time]
        late = [(now - one).total_seconds() for one in due]
        ends = [began + self._max_job_seconds for began in list(self._job_to_began.values())]
        return float(max([0.0, *late, *(clock - end for end in ends)]))

    def run(self, stop: threading.Event) -> None:
        """Run the jobs until ``stop`` is set, then let the one at work end where it can."""
        self._scheduler.start()
        try:
            stop.wait()
        finally:
            self._stop.set()
            self._scheduler.shutdown(wait=True)

    def _note(self, event: Any) -> None:
        outcome = _OUTCOMES[event.code]
        self.counts[event.job_id, outcome] += 1
        if outcome != "done":
            error = getattr(event, "exception", None)
            logger.error("job %s %s%s", event.job_id, outcome, f": {error}" if error else "")


class ScheduleMetrics(Collector):
    """What Prometheus reads of a scheduler."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        family = CounterMetricFamily(
            PREFIX + "jobs", "Jobs by how they ended.", labels=("job", "outcome")
        )
        for (job, outcome), count in sorted(self._schedule.counts.items()):
            family.add_metric((job, outcome), count)
        yield family

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: the names need no value to be known."""
        return ()


def run_scheduler(
    settings: Settings, stop: threading.Event, page: ServicePage | None = None
) -> None:
    """Run the jobs of the settings until ``stop`` is set; ``page`` shows what becomes of them.

    Raises:
        ScheduleError: If none has a schedule.
        LockError: If another scheduler works on this data folder.
    """
    one = settings.schedule
    jobs = name_to_job(settings)
    schedule = Schedule(
        jobs,
        {name: getattr(one, name) for name in jobs},
        misfire_seconds=one.misfire_seconds,
        max_job_seconds=one.max_job_seconds,
    )
    page = page or ServicePage()
    page.loops.watch("scheduler", lambda: schedule.overdue_seconds)
    with (
        only_one(settings.data, "scheduler", cure="end it, or use another data folder"),
        page.showing(ScheduleMetrics(schedule)),
    ):
        schedule.run(stop)


def name_to_job(settings: Settings) -> dict[str, Job]:
    """Return the jobs by the names of their schedules."""
    return {
        "refresh": lambda must_end: refresh(settings, must_end),
        "compact": lambda must_end: _compact(settings),
        "report": lambda must_end: _report(settings),
        "retention": lambda must_end: _retain(settings, must_end),
    }


def refresh(settings: Settings, must_end: Callable[[], bool]) -> int:
    """Train every head on the events it has not seen, up to where the log ends now.

    Versions go through the gate like any other: the events that are read are their evidence too.
    Over the embedded log nothing is done while a learner runs: it trains already.

    Returns:
        Number of events read.
    """
    # Imported here: the schedules are read without torch.
    from pipeline.messaging.boards import LogEventSource, LogRefusedEvents
    from pipeline.messaging.event_logs import open_log
    from pipeline.releases.release_history import release_board
    from pipeline.training import build_trainer
    from schemas.topics import VERIFICATION_EVENTS

    num_read = 0
    try:
        with (
            only_one(settings.data, "learner", cure="it trains by itself"),
            closing(open_log(settings)) as log,
        ):
            partitions = range(log.num_partitions(VERIFICATION_EVENTS))
            ends = {p: log.end_offset(VERIFICATION_EVENTS, p) for p in partitions}
            trainer = build_trainer(settings, release_board(settings, log))
            source = LogEventSource(log, partitions)
            for partition, offset in trainer.start_offsets().items():
                source.seek(partition, offset)
            refused = LogRefusedEvents(log)
            while not must_end() and (events := source.poll(0.0)):
                for received in events:
                    if received.offset >= ends[received.partition]:
                        continue
                    num_read += 1
                    try:
                        trainer.train(received)
                    except ValueError as error:
                        refused.set_aside(received, str(error))
    except LockError as error:
        logger.warning("refresh left out: %s", error)
    return num_read


def _compact(settings: Settings) -> None:
    from pipeline.archive.log_compaction import compact_log
    from pipeline.clock import utc_now
    from schemas.topics import VERIFICATION_EVENTS

    done = compact_log(settings.data, VERIFICATION_EVENTS, utc_now())
    logger.info("%d files merged into %d", done.num_merged, done.num_written)


def _retain(settings: Settings, must_end: Callable[[], bool]) -> None:
    from pipeline.archive.retention import retain
    from pipeline.clock import utc_now

    retain(settings, utc_now(), must_end)


def _report(settings: Settings) -> None:
    from rich.console import Console

    from pipeline.replaying import ReplayRequest, replay_log

    asked = ReplayRequest(
        report=settings.data / "report.html", json_file=settings.data / "report.json"
    )
    replay_log(settings.data, asked, console=Console(quiet=True))
