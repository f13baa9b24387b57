"""A Kafka-protocol broker for tests: the one the environment names, or one started here."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

BOOTSTRAP_VARIABLE = "KAFKA_BOOTSTRAP_SERVERS"

_START_SECONDS = 60.0
_STOP_SECONDS = 15.0


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    """Yield ``host:port`` of a broker, started with ``folder`` as its data unless one is given."""
    given = os.environ.get(BOOTSTRAP_VARIABLE)
    if given:
        yield given
    else:
        with own_broker(folder, free_port()) as servers:
            yield servers


@contextmanager
def own_broker(folder: Path, port: int) -> Iterator[str]:
    """Yield ``host:port`` of a broker that is started here and ends with the block."""
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
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def _binary() -> Path:
    spec = find_spec("noida_db")
    if spec is None or spec.origin is None:
        raise RuntimeError("noida-db is not installed; install the dev extra")
    binary = Path(spec.origin).parent / "noida-db"
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)
    return binary


def _await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise RuntimeError(f"the broker on port {port} did not start; exit status {process.poll()}")
