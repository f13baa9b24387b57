"""Services outlive the event log's absence: they begin again from what is durable."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from pipeline.configuration.settings import Settings
from pipeline.eventlog.ports import EventLog, EventLogUnavailableError
from pipeline.messaging.event_logs import open_log
from pipeline.operations.loops import Loop

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 10.0
HEALTHY_SECONDS = 1.0
"""A service that runs for so long after an outage is no longer degraded."""

logger = logging.getLogger(__name__)


def run_through_outages(
    name: str,
    run: Callable[[Callable[[], bool]], None],
    stop: threading.Event,
    loop: Loop | None = None,
) -> None:
    """Run a service until ``stop``; where the log cannot be reached, begin again after a pause.

    Args:
        name: Names the service in the log.
        run: Runs until its argument returns True, and asks it at every turn. Begun again, it goes
            on from durable state, so an outage is to it what a crash is.
        stop: Ends it.
        loop: Moves with it, and says what it lacks.
    """
    loop = loop or Loop(name)
    pause_seconds = FIRST_PAUSE_SECONDS
    while not stop.is_set():
        begun_seconds = time.monotonic()

        def should_stop(healthy_from: float = begun_seconds + HEALTHY_SECONDS) -> bool:
            loop.move()
            if loop.lacks and time.monotonic() >= healthy_from:
                loop.recover()
            return stop.is_set()

        try:
            run(should_stop)
            return
        except EventLogUnavailableError as error:
            if time.monotonic() - begun_seconds > LONGEST_PAUSE_SECONDS:
                pause_seconds = FIRST_PAUSE_SECONDS
            loop.miss(str(error))
            logger.warning("%s degraded, next try in %.1f s: %s", name, pause_seconds, error)
            stop.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)


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
    pause_seconds = FIRST_PAUSE_SECONDS
    while not stop.is_set():
        try:
            log = open_log(settings)
            loop.recover()
            return log
        except EventLogUnavailableError as error:
            loop.miss(str(error))
            logger.warning("degraded, next try in %.1f s: %s", pause_seconds, error)
            stop.wait(pause_seconds)
            pause_seconds = min(2 * pause_seconds, LONGEST_PAUSE_SECONDS)
    return None
