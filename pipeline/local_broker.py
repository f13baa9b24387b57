"""A small Kafka-protocol broker of our own, for benchmarks where nobody has named one."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

START_SECONDS = 60.0
STOP_SECONDS = 15.0


class NoBrokerError(Exception):
    """There is no broker to talk to; the message says what to do."""


@contextmanager
def local_broker(folder: Path) -> Iterator[str]:
    """Yield ``host:port`` of a broker that keeps its data in ``folder`` and ends with the block.

    Raises:
        NoBrokerError: If the package is not installed, or the broker does not start.
    """
    port = _free_port()
    with (folder / "broker.log").open("wb") as output:
        process = subprocess.Popen(
            # The binary itself: the console script is a wrapper that would die alone.
            [
                *[str(_binary()), "start", "--only", "kafka"],
                *["--kafka-port", str(port), "--data-dir", str(folder / "data")],
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        _await_port(port, process)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise NoBrokerError(f"the broker on port {port} did not start; exit status {process.poll()}")
