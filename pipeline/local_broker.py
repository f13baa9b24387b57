"""A small Kafka-protocol broker of our own, for benchmarks and tests: noida-db on the loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from schemas.errors import KnownError

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


class BenchError(KnownError):
    """The benchmark could not be finished; the message says how far it came."""


class NoBrokerError(KnownError):
    """There is no broker to talk to; the message says what to do."""


class LocalBroker:
    """A broker that can be stopped and started again on the same port and data.

    It is an emulator: what it has acknowledged within its last second is lost if it is stopped
    while it is written to, and its rates say nothing about a cluster.

    Args:
        folder: Holds its data and its log; nothing else uses it.
        port: Loopback port; a free one is looked for if 0.

    Raises:
        NoBrokerError: If it is not installed.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._folder = folder
        self._port = port or free_port()
        self._binary = _binary()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def servers(self) -> str:
        """``host:port``."""
        return f"127.0.0.1:{self._port}"

    @property
    def process_id(self) -> int | None:
        """Process, if it runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it on what its folder holds; returns once it listens.

        Raises:
            NoBrokerError: If it does not start.
        """
        with (self._folder / "broker.log").open("ab") as output:
            self._process = subprocess.Popen(
                # The binary itself: the console script is a wrapper that would die alone.
                [
                    *[str(self._binary), "start", "--only", "kafka"],
                    *["--kafka-port", str(self._port), "--data-dir", str(self._folder / "data")],
                ],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            time.sleep(0.02)
        raise NoBrokerError(
            f"the broker on port {self._port} did not start, exit status {self._process.poll()}; "
            f"see {self._folder / 'broker.log'}"
        )

    def stop(self) -> None:
        """Stop it, by its process; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def local_broker(folder: Path, port: int = 0) -> Iterator[str]:
    """Yield ``host:port`` of a broker that keeps its data in ``folder`` and ends with the block.

    Raises:
        NoBrokerError: If it is not installed, or does not start.
    """
    broker = LocalBroker(folder, port)
    try:
        broker.start()
        yield broker.servers
    finally:
        broker.stop()


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _binary() -> Path:
    spec = find_spec("noida_db")
    if spec is None or spec.origin is None:
        raise NoBrokerError(
            "no broker: noida-db is not installed; pass --kafka host:port, or pip install noida-db"
        )
    binary = Path(spec.origin).parent / "noida-db"
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    return binary
