"""The soak: a day of a small fleet in minutes, in separate processes as in production.

A worker stub, a learner and an archiver run over a broker. What each of them holds in memory must
not grow once it is warm, every event must be learned once and stored once, and topic and files
must be as large as ``draftloop estimate`` says.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
from rich.console import Console
from rich.progress import Progress

from pipeline.archive.log_files import EVENTS_FOLDER
from pipeline.bench.soak_worker import FLEET
from pipeline.configuration.settings import Settings, service_environment
from pipeline.eventlog.ports import EventLog
from pipeline.json_files import write_json
from pipeline.messaging.boards import LogPolicyBoard
from pipeline.messaging.event_logs import open_log
from pipeline.operations.estimate import estimate
from schemas.errors import KnownError
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS

WORKER, LEARNER, ARCHIVER = "worker", "learner", "archiver"
MOST_GROWTH = 0.10
MOST_OFF_PLAN = 0.10
WINDOWS_UNTIL_WARM = 1_000_000
"""In a shorter soak nothing is warm, and memory is shown, not judged."""
LOOK_SECONDS = 0.25
START_SECONDS = 240.0
"""Longest time until a service is ready: the learner may have to compile its kernels."""
STALL_SECONDS = 120.0
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
EVENTS_PER_FILE = 500
"""Half of what the worker draws per partition: no file holds an event twice."""
KEPT_SECONDS = 60.0
"""How long the topic keeps events: a broker of tests holds them in memory."""


class SoakError(KnownError):
    """The soak could not be finished, or has shown something that must not be; says what."""


@dataclass(slots=True)
class Memory:
    """Resident bytes of one process, sampled beside how much of the soak was done, [0, 1]."""

    shares: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def look(self, process_id: int, share: float) -> None:
        """Add a sample; a process that has ended has none."""
        try:
            pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
        except (OSError, IndexError):
            return
        if pages:
            self.shares.append(share)
            self.sizes.append(pages * PAGE_BYTES)

    def peak(self, begin: float, end: float) -> int:
        """Return the most bytes between two shares of the soak; 0 without a sample."""
        found = zip(self.shares, self.sizes, strict=True)
        return max((size for share, size in found if begin <= share <= end), default=0)

    @property
    def warm_bytes(self) -> int:
        """The most of the second quarter: the first is the warming up.

        A soak so short that no sample fell into it has the most of all samples.
        """
        return self.peak(0.25, 0.5) or self.peak(0.0, 1.0)

    @property
    def growth(self) -> float:
        """By what share the second half has needed more than the second quarter."""
        return self.peak(0.5, 1.0) / self.warm_bytes - 1.0 if self.warm_bytes else 0.0


def run_soak(
    settings: Settings,
    num_windows: int,
    *,
    json_file: Path | None,
    console: Console,
) -> dict[str, float]:
    """Run the soak and return what it measured.

    Args:
        settings: Name the broker, and how it is talked to; it should hold nothing else.
        num_windows: Windows that are sent.
        json_file: Where to write the numbers.
        console: Where to show progress and print them.

    Raises:
        SoakError: If a service ends or stalls, or the numbers are not as they must be.
    """
    with tempfile.TemporaryDirectory(prefix="draftloop-soak-") as folder:
        settings = _soak_settings(settings, Path(folder))
        with closing(open_log(settings)) as log:
            results = _measure(settings, log, num_windows, console)
    for name, value in results.items():
        console.print(f"{name:32} {value:16,.4f}", highlight=False)
    if json_file is not None:
        write_json(json_file, results)
    if faults := faults_of(results):
        raise SoakError("soak: " + "; ".join(faults))
    return results


def faults_of(results: Mapping[str, float]) -> list[str]:
    """Return what must not be, one line each; empty if all is well."""
    expected = results["num_events"]
    faults = [
        f"{name} is {results[name]:,.0f}, expected {wanted:,.0f}"
        for name, wanted in (
            ("num_events_in_topic", expected),
            ("num_events_learned", expected),
            ("num_rows", expected),
            ("num_dead_letters", 0.0),
        )
        if results[name] != wanted
    ]
    if results["num_windows"] >= WINDOWS_UNTIL_WARM:
        faults += [
            f"{name} is {results[name]:.3f}, expected at most {MOST_GROWTH}"
            for name in results
            if name.endswith("_memory_growth") and results[name] > MOST_GROWTH
        ]
    faults += [
        f"{name} is {results[name]:.3f}, expected 1 within {MOST_OFF_PLAN}"
        for name in results
        if name.endswith("_share_of_plan") and abs(results[name] - 1.0) > MOST_OFF_PLAN
    ]
    return faults


def _soak_settings(settings: Settings, folder: Path) -> Settings:
    """Return the settings of a run: as given, with its own folder, and files enough to see."""
    return settings.model_copy(
        update={
            "data": folder,
            "event_log": settings.event_log.model_copy(
                update={"num_partitions": 2, "retention_days": KEPT_SECONDS / 86_400}
            ),
            "learner": settings.learner.model_copy(
                update={"steps_per_event": 0, "publish_policy_every_events": 200}
            ),
            "archiver": settings.archiver.model_copy(
                update={"max_events_per_file": EVENTS_PER_FILE}
            ),
            "metrics": settings.metrics.model_copy(
                update={"learner_port": _free_port(), "archiver_port": _free_port()}
            ),
        }
    )


def _measure(
    settings: Settings, log: EventLog, num_windows: int, console: Console
) -> dict[str, float]:
    environment = service_environment(settings) | {"OMP_NUM_THREADS": "1"}
    name_to_memory = {name: Memory() for name in (WORKER, LEARNER, ARCHIVER)}
    with ExitStack() as stack:
        services = {
            LEARNER: stack.enter_context(_service("pipeline.cli", ["learner"], environment)),
            ARCHIVER: stack.enter_context(_service("pipeline.cli", ["archiver"], environment)),
        }
        with console.status("waiting for learner and archiver"):
            for name, port in (
                (LEARNER, settings.metrics.learner_port),
                (ARCHIVER, settings.metrics.archiver_port),
            ):
                _await(partial(_is_ready, port), f"{name} to be ready", START_SECONDS)
        begun = time.monotonic()
        worker = stack.enter_context(
            _service("pipeline.bench.soak_worker", [str(num_windows)], environment)
        )
        sent = _watch(worker, services, name_to_memory, num_windows, console)
        seconds = time.monotonic() - begun
        _await(lambda: _num_learned(log) >= sent["num_events"], "the last events to be learned")
        for process in services.values():
            _end(process)
    return _results(settings, log, sent, seconds, name_to_memory)


def _watch(
    worker: subprocess.Popen[str],
    services: Mapping[str, subprocess.Popen[str]],
    name_to_memory: Mapping[str, Memory],
    num_windows: int,
    console: Console,
) -> dict[str, int]:
    """Follow the worker to its end, looking at every process's memory."""
    said: dict[str, int] = {"num_windows": 0}
    moved = time.monotonic()

    def read() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            said.update(json.loads(line))

    reading = threading.Thread(target=read, daemon=True)
    reading.start()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("windows", total=num_windows)
        while worker.poll() is None:
            before = progress.tasks[0].completed
            progress.update(task, completed=said["num_windows"])
            moved = time.monotonic() if said["num_windows"] > before else moved
            _refuse_stalled(services, time.monotonic() - moved)
            for name, process in {WORKER: worker, **services}.items():
                name_to_memory[name].look(process.pid, said["num_windows"] / num_windows)
            time.sleep(LOOK_SECONDS)
    reading.join()
    if not said.get("is_done"):
        raise SoakError(f"the worker ended with status {worker.returncode} after {said}")
    return said


def _refuse_stalled(services: Mapping[str, subprocess.Popen[str]], still_seconds: float) -> None:
    for name, process in services.items():
        if process.poll() is not None:
            raise SoakError(f"the {name} ended with status {process.returncode}")
    if still_seconds > STALL_SECONDS:
        raise SoakError(f"nothing was sent for {still_seconds:.0f} s: learner or archiver hangs")


def _results(
    settings: Settings,
    log: EventLog,
    sent: Mapping[str, int],
    seconds: float,
    name_to_memory: Mapping[str, Memory],
) -> dict[str, float]:
    plan = estimate(settings, FLEET)
    files = sorted((settings.data / EVENTS_FOLDER).glob("*/*/*.parquet"))
    file_bytes = sum(path.stat().st_size for path in files)
    planned_topic = plan.bytes_per_event * sent["num_events"]
    planned_files = plan.parquet_bytes_per_event * sent[
        "num_events"
    ] + plan.parquet_bytes_per_file * len(files)
    results = {
        "num_windows": sent["num_windows"],
        "num_events": sent["num_events"],
        "seconds": seconds,
        "windows_per_second": sent["num_windows"] / seconds,
        "num_events_in_topic": _num_in_topic(log),
        "num_events_learned": _num_learned(log),
        "num_rows": sum(pq.read_metadata(path).num_rows for path in files),
        "num_dead_letters": log.end_offset(DEAD_LETTERS, 0),
        "num_files": len(files),
        "topic_bytes": sent["num_bytes"],
        "topic_bytes_share_of_plan": sent["num_bytes"] / planned_topic,
        "parquet_bytes": file_bytes,
        "parquet_bytes_share_of_plan": file_bytes / planned_files,
    }
    for name, memory in name_to_memory.items():
        results[f"{name}_memory_megabytes"] = memory.warm_bytes / 2**20
        results[f"{name}_memory_growth"] = memory.growth
    return {name: float(value) for name, value in results.items()}


def _num_in_topic(log: EventLog) -> int:
    """Return the offsets that were given, whether the topic still keeps what they hold or not."""
    partitions = range(log.num_partitions(VERIFICATION_EVENTS))
    return sum(log.end_offset(VERIFICATION_EVENTS, partition) for partition in partitions)


def _num_learned(log: EventLog) -> int:
    policies = LogPolicyBoard(log, source="soak").read_all()
    return sum(policy.version for policy in policies)


@contextmanager
def _service(
    module: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Run a process for the length of the block; its standard error is ours."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        env=dict(environment),
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        _end(process)
        assert process.stdout is not None
        process.stdout.close()


def _end(process: subprocess.Popen[str]) -> None:
    """Ask it to end, which makes it store what it owes, and wait for it."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STALL_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _await(condition: Callable[[], bool], what: str, seconds: float = STALL_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SoakError(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(LOOK_SECONDS)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
