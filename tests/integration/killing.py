"""Processes to be killed, and the traffic they are killed in.

A service to be killed is a module run as ``python -m MODULE ARGUMENT...``: it imports everything
once, then forks a process per line on its standard input and prints that process's id. Importing
takes seconds, forking none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from learner.stream_state import StreamSettings, StreamState
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.eventlog.ports import EventLog, Message
from schemas.topics import VERIFICATION_EVENTS
from tests.learner.fakes import PlacedEvent
from tests.schemas.builders import make_event

MOST_SECONDS_WAITING = 120.0
SECONDS_BETWEEN_EVENTS = 0.01


class ForkServer:
    """The client's side: starts processes; none of them outlives a kill."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def start(self, line: str) -> int:
        """Start a process that is told ``line``, and return its id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{line}\n".encode())
        return int(self._process.stdout.readline())


@contextmanager
def fork_server(module: str, *arguments: Path | str) -> Iterator[ForkServer]:
    """Run a module's server until the block ends; its processes are for the caller to end."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    pipe = subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, bufsize=0, env=environment) as process:
        yield ForkServer(process)
        assert process.stdin is not None
        process.stdin.close()


def serve_forks(run: Callable[[str], None]) -> None:
    """Fork a process for every line on the standard input and run it there, until that ends."""
    # Nobody waits for the processes: their ends are seen in /proc.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        process_id = os.fork()
        if process_id == 0:
            _be(run, line.strip())
        sys.stdout.write(f"{process_id}\n")
        sys.stdout.flush()


def _be(run: Callable[[str], None], line: str) -> None:
    """Be the service, and end without the server's own clean-up."""
    status = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        run(line)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def load_kernels() -> None:
    """Learn one event, so that no process that is forked has to load the kernels anew."""
    received = PlacedEvent(partition=0, offset=0, event=make_event(num_windows=2))
    StreamState(stream=received.event.stream).learned(received, StreamSettings())


def is_running(process_id: int) -> bool:
    """Tell whether a process is there, neither stopped nor dead."""
    try:
        status = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in "TtZX"


def kill_and_wait(process_id: int) -> None:
    """Kill a process; its locks and files are free when this returns."""
    os.kill(process_id, signal.SIGKILL)
    wait_until(lambda: not is_running(process_id))


def kill_amid_work(
    kill: Callable[[], None],
    is_far_enough: Callable[[], bool],
    generator: np.random.Generator,
    *,
    most_seconds_beyond: float,
) -> None:
    """Kill at a random moment after some progress: a working process, on a slow machine too."""
    try:
        wait_until(is_far_enough)
        time.sleep(generator.uniform(0.0, most_seconds_beyond))
    finally:
        kill()


def wait_until(condition: Callable[[], bool], seconds: float = MOST_SECONDS_WAITING) -> None:
    """Wait for a condition."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        time.sleep(0.002)


@contextmanager
def embedded_log(path: Path, num_partitions: int) -> Iterator[EmbeddedEventLog]:
    """Yield a new log with all topics."""
    log = EmbeddedEventLog(path)
    for spec in declared_topics(num_partitions):
        log.create_topic(spec)
    yield log
    log.close()


@contextmanager
def events_flowing(log: EventLog, messages: Callable[[int], Sequence[Message]]) -> Iterator[None]:
    """Append ``messages(0)``, ``messages(1)``, ... until the block ends."""
    stop = threading.Event()

    def append() -> None:
        number = 0
        while not stop.wait(SECONDS_BETWEEN_EVENTS):
            log.append(VERIFICATION_EVENTS, messages(number))
            number += 1

    thread = threading.Thread(target=append)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
