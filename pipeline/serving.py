"""``draftloop serve``: a worker behind the OpenAI API, wired to the event log."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console
from starlette.types import ASGIApp

from inference.scheduler import Scheduler
from inference.server.app import OpenAiServer, build_app
from inference.server.options import KeyRing, ServerOptions
from inference.target import Target
from inference.worker import Completion
from pipeline.configuration.server_settings import ServerSettings
from pipeline.configuration.settings import Settings, SettingsError
from pipeline.locks import only_one
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import bare_log
from pipeline.messaging.traces import TraceContexts
from pipeline.operations.metrics import Reading, WorkerMetrics
from pipeline.wiring import RunningWorker, open_target, start_worker
from schemas.events import VerificationEvent

GRACE_SECONDS = 3
"""How long requests may go on once the server is told to stop."""

SCHEDULER_SECONDS = 2.0
SEND_SECONDS = 3.0
SHORTEST_KEY = 16

logger = logging.getLogger(__name__)


def read_keys(path: Path | None, setting: str) -> KeyRing:
    """Read keys, one a line; empty lines and lines that begin with # are none.

    Raises:
        SettingsError: If the file cannot be read, holds no key, or one that is easily guessed.
    """
    if path is None:
        return KeyRing(())
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not plain ASCII text"
        raise SettingsError(f"{setting} = {str(path)!r}: cannot be read: {reason}") from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise SettingsError(f"{setting} = {str(path)!r}: holds no key: write one a line")
    if min(map(len, keys)) < SHORTEST_KEY:
        raise SettingsError(
            f"{setting} = {str(path)!r}: a key is shorter than {SHORTEST_KEY} characters: "
            "make a longer one"
        )
    return KeyRing(keys)


def server_keys(settings: Settings) -> tuple[KeyRing, KeyRing]:
    """Return the keys of clients and those of admin routes.

    Raises:
        SettingsError: If a file of keys cannot be used.
    """
    one = settings.server
    return (
        read_keys(one.api_keys_file, "server.api_keys_file"),
        read_keys(one.admin_keys_file, "server.admin_keys_file"),
    )


def server_options(settings: Settings, target: Target) -> ServerOptions:
    """Return how the server serves.

    Raises:
        SettingsError: If a file of keys cannot be used.
    """
    one = settings.server
    api_keys, admin_keys = server_keys(settings)
    return ServerOptions(
        model_name=one.model_name or target.target_id.replace(":", "-"),
        default_stream=one.default_stream,
        streams=one.streams,
        consenting_streams=frozenset(settings.content.consenting_streams),
        default_max_tokens=one.default_max_tokens,
        max_body_bytes=one.max_body_bytes,
        client_seconds=one.client_seconds,
        api_keys=api_keys,
        admin_keys=admin_keys,
    )


class WorkerAdministration:
    """What admin routes ask of a running worker (``inference.server.options.Administration``)."""

    def __init__(self, settings: Settings, running: RunningWorker, scheduler: Scheduler) -> None:
        self._settings = settings
        self._running = running
        self._scheduler = scheduler

    def swap(self, drafter_id: str, version: int) -> None:
        """Serve a version whose release is the newest known of its drafter.

        Raises:
            KeyError: If there is no such release.
            ValueError: If it cannot be used here.
        """
        with bare_log(self._settings) as log:
            releases = LogReleaseBoard(log, source=self._settings.worker.worker_id).read_all()
        found = [r for r in releases if (r.drafter_id, r.version) == (drafter_id, version)]
        if not found:
            raise KeyError(f"drafter {drafter_id!r} version {version}: no such release")
        drafter = self._running.loader(found[0])
        self._scheduler.order(lambda worker: worker.pool.replace(drafter)).result()

    def describe(self) -> dict[str, Any]:
        """Return versions and counts."""
        worker = self._running.worker
        return {
            "worker_id": self._settings.worker.worker_id,
            "policy": worker.policy,
            "target_fingerprint": worker.target.fingerprint,
            "drafter_versions": {v.drafter_id: v.weights_version for v in worker.pool.versions},
            "events_dropped": self._running.emitter.num_dropped,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """An application that is ready to be listened for, and what it stands on."""

    app: ASGIApp
    options: ServerOptions
    scheduler: Scheduler
    running: RunningWorker
    metrics: WorkerMetrics


@contextmanager
def served(settings: Settings, target: Target) -> Iterator[Served]:
    """Run worker and scheduler for the length of the block; then abort, flush and end them."""
    options = server_options(settings, target)
    traces = TraceContexts()
    taps: list[WorkerMetrics] = []

    def tap(event: VerificationEvent) -> None:
        for one in taps:
            one.observe(event)

    def finished(completion: Completion) -> None:
        for one in taps:
            one.finished(completion.finish_reason, completion.seconds)

    running = start_worker(settings, target, tap=tap, traces=traces)
    scheduler = Scheduler(
        running.worker,
        max_running=settings.server.max_running,
        max_waiting=settings.server.max_waiting,
        on_finished=finished,
    )
    metrics = worker_metrics(settings, running, scheduler)
    taps.append(metrics)
    server = OpenAiServer(
        scheduler,
        target,
        settings.worker.num_speculative_tokens,
        options,
        note_trace=traces.note,
    )
    administration = WorkerAdministration(settings, running, scheduler)
    scheduler.start()
    try:
        app = build_app(server, metrics.render, administration)
        yield Served(
            app=app, options=options, scheduler=scheduler, running=running, metrics=metrics
        )
    finally:
        if not scheduler.close(SCHEDULER_SECONDS):
            logger.warning("a round did not end within %.0f s", SCHEDULER_SECONDS)
        server.encoding.close()
        num_unsent = running.close(SEND_SECONDS)
        if num_unsent:
            logger.warning("%d events could not be sent to the event log", num_unsent)


def worker_metrics(
    settings: Settings, running: RunningWorker, scheduler: Scheduler
) -> WorkerMetrics:
    """Return the metrics of a worker, with what is read from its parts."""
    emitter, inbox, sender = running.emitter, running.inbox, running.sender
    pool = running.worker.pool
    ids = [one.drafter_id for one in settings.drafters]
    reading = Reading(
        counters=(
            (
                "requests_refused",
                "Requests that found the queue full.",
                lambda: scheduler.num_refused,
            ),
            ("requests_failed", "Requests that a failure ended.", lambda: scheduler.num_failed),
            ("events_emitted", "Events queued for the log.", lambda: emitter.num_emitted),
            ("events_sent", "Events that the log has.", lambda: emitter.num_sent),
            ("events_dropped", "Events dropped, oldest first.", lambda: emitter.num_dropped),
            ("event_send_errors", "Failed sends.", lambda: emitter.num_send_errors),
            ("events_unsendable", "Events left out for good.", lambda: sender.num_unsendable),
            ("releases_refused", "Releases that could not be loaded.", lambda: inbox.num_refused),
            ("log_read_errors", "Looks at a log that failed.", lambda: inbox.num_failed_looks),
            (
                "emission_seconds",
                "Seconds that recording and emitting cost the serving thread.",
                lambda: running.worker.emission_seconds,
            ),
        ),
        gauges=(
            ("requests_running", "Requests that take turns.", lambda: scheduler.num_running),
            ("requests_waiting", "Requests that wait.", lambda: scheduler.num_waiting),
            ("ready", "1 if requests are taken.", lambda: float(scheduler.is_ready)),
            (
                "seconds_since_last_look",
                "Since policies and releases could last be read.",
                lambda: inbox.seconds_since_look,
            ),
        ),
        drafter_counters=(
            ("drafter_failures", "Requests lost.", lambda: {i: pool.failures[i] for i in ids}),
            (
                "versions_withdrawn",
                "Versions that gate or operator took back, as seen here.",
                lambda: {i: inbox.withdrawn[i] for i in ids},
            ),
        ),
        kind_counters=(
            (
                "events_lost",
                "Events that reach no learner, by why.",
                lambda: {"queue": emitter.num_dropped, "unsendable": sender.num_unsendable},
            ),
            (
                "events_trimmed",
                "Events sent without some of their content, by what they lost.",
                lambda: {
                    "top_tokens": sender.num_with_fewer_top_tokens,
                    "features": sender.num_without_features,
                    "content": sender.num_without_content,
                },
            ),
        ),
    )
    return WorkerMetrics(ids, settings.worker.num_speculative_tokens, reading)


def run_server(settings: Settings, stop: threading.Event, console: Console) -> None:
    """Serve until told to stop.

    Raises:
        LockError: If another worker of this name is at work on the data folder.
        SettingsError: If a file of keys cannot be used, or the address cannot be listened on.
    """
    worker_id = settings.worker.worker_id
    with only_one(settings.data, f"worker {worker_id}", cure="set another worker.worker_id"):
        # What is wrong with keys and address is said before minutes go into the model.
        server_keys(settings)
        with closing(bound_socket(settings.server)) as listener:
            target = open_target(settings, progress=console.log)
            if stop.is_set():
                return
            with served(settings, target) as ready:
                _listen(settings, ready, listener, stop)


def bound_socket(one: ServerSettings) -> socket.socket:
    """Return a socket at the address to listen on; it refuses clients until it is listened on.

    Raises:
        SettingsError: If the address is taken or not this machine's.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in one.host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((one.host, one.port))
    except OSError as error:
        listener.close()
        raise SettingsError(
            f"server.host = {one.host!r}, server.port = {one.port}: cannot be listened on: "
            f"{error.strerror}: free the port or name another"
        ) from error
    return listener


def _listen(
    settings: Settings, ready: Served, listener: socket.socket, stop: threading.Event
) -> None:
    one = settings.server
    if not len(ready.options.api_keys) and one.host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("server.host = %r is open to all: set server.api_keys_file", one.host)
    config = uvicorn.Config(
        ready.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    port = listener.getsockname()[1]
    logger.info("serving %s on http://%s:%d/v1", ready.options.model_name, one.host, port)
    server = uvicorn.Server(config)
    threading.Thread(target=_pass_on, args=(stop, server), daemon=True).start()
    server.run(sockets=[listener])


def _pass_on(stop: threading.Event, server: uvicorn.Server) -> None:
    stop.wait()
    server.should_exit = True
