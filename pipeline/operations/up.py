"""``draftloop up``: the services of a stack as processes of this machine, with one merged log.

A service that ends by itself is started again, at once and then with growing pauses. On the way
down they are ended one after the other, who produces before who consumes, so that nobody waits for
one that has gone. What is left in the log is consumed after the next start. Should this process be
killed, they end by themselves.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO

from pipeline.configuration.settings import Settings, service_environment
from pipeline.locks import only_one
from pipeline.operations.services import Service, services

STOP_SECONDS = 20.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
STEADY_SECONDS = 30.0
"""A service that has run so long is not failing at its start."""

Say = Callable[[str, str], None]
"""Shows one line of one service."""


class RunningService:
    """One service, started again when it ends.

    Args:
        service: What to run.
        environment: All variables of the process, those of the service included.
        say: Shows its lines.
        clock: Monotonic seconds.

    Attributes:
        num_starts: How often it was started.
    """

    def __init__(
        self,
        service: Service,
        environment: Mapping[str, str],
        say: Say,
        *,
        command: Sequence[str] = (sys.executable, "-P", "-m", "pipeline.tied"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = service
        self._environment = {**environment, **service.environment}
        self._say = say
        self._command = (*command, *service.arguments)
        self._clock = clock
        self._process: subprocess.Popen[str] | None = None
        self._pause_seconds = FIRST_PAUSE_SECONDS
        self._started_at = 0.0
        self._start_at = 0.0
        self.num_starts = 0

    @property
    def process_id(self) -> int | None:
        """Id of the process that runs now."""
        return self._process.pid if self._process else None

    def look(self) -> None:
        """Start it if it does not run and its pause is over."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return
            self._note_end(status)
        if self._clock() >= self._start_at:
            self._start()

    def stop(self) -> None:
        """End it, by force if it does not end by itself."""
        process, self._process = self._process, None
        if process is None or process.poll() is not None:
            return
        self._say(self.service.name, "stopping")
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._say(self.service.name, f"did not end within {STOP_SECONDS:.0f} s: killed")
            process.kill()
            process.wait()

    def _note_end(self, status: int) -> None:
        self._process = None
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        if self._clock() - self._started_at >= STEADY_SECONDS:
            self._pause_seconds = FIRST_PAUSE_SECONDS
        self._say(self.service.name, f"ended with {how}, starts in {self._pause_seconds:.1f} s")
        self._start_at = self._clock() + self._pause_seconds
        self._pause_seconds = min(2 * self._pause_seconds, LONGEST_PAUSE_SECONDS)

    def _start(self) -> None:
        self.num_starts += 1
        self._started_at = self._clock()
        process = subprocess.Popen(
            self._command,
            env=dict(self._environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            # A signal to the terminal's group is for us to pass on, in order.
            start_new_session=True,
        )
        self._process = process
        self._say(self.service.name, f"started as process {process.pid}")
        assert process.stdout is not None
        threading.Thread(target=self._follow, args=(process.stdout,), daemon=True).start()

    def _follow(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                self._say(self.service.name, line.rstrip("\n"))


def run_stack(settings: Settings, stop: threading.Event, say: Say) -> None:
    """Run all services until told to stop.

    Raises:
        LockError: If another stack runs on this data folder.
    """
    with only_one(settings.data, "stack", cure="stop it, or use another data folder"):
        environment = service_environment(settings)
        stack = [RunningService(one, environment, say) for one in services(settings)]
        with _stopped_in_order(stack):
            while not stop.is_set():
                for one in stack:
                    one.look()
                stop.wait(0.2)


@contextmanager
def _stopped_in_order(stack: Sequence[RunningService]) -> Iterator[None]:
    try:
        yield
    finally:
        for one in stack:
            one.stop()


def printer(width: int, out: IO[str]) -> Say:
    """Return what writes lines of all services to one place, whole, with their names."""
    lock = threading.Lock()

    def say(name: str, line: str) -> None:
        with lock:
            out.write(f"{name:<{width}} | {line}{os.linesep}")
            out.flush()

    return say
