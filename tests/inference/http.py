"""The HTTP server on a free port of this machine, over a tiny target."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from openai import OpenAI

from inference.ports import Drafter
from inference.recording import Round
from inference.scheduler import Scheduler
from inference.server.app import OpenAiServer, build_app
from inference.server.options import ServerOptions
from inference.target import Target
from inference.worker import Worker
from tests.inference.segments import drafters_of
from tests.inference.serving import Outbox, new_worker

MODEL = "tiny"
MOST_SECONDS = 120.0


class NoAdministration:
    """Nothing to swap (``inference.server.options.Administration``)."""

    def swap(self, drafter_id: str, version: int) -> None:
        """Know one drafter in one version."""
        if (drafter_id, version) != ("head", 1):
            raise KeyError(f"drafter {drafter_id!r} version {version} is not there")

    def describe(self) -> dict[str, Any]:
        """Say little."""
        return {"versions": {"head": 1}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Running:
    """A server that listens, and what lies behind it."""

    port: int
    target: Target
    worker: Worker
    scheduler: Scheduler
    outbox: Outbox

    def client(self, key: str = "none") -> OpenAI:
        """Return the official client."""
        return OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=60.0
        )

    def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Sequence[tuple[str, str]] = (("content-type", "application/json"),),
    ) -> tuple[int, Any]:
        """Send a request as it is; return status and JSON, or the text if it is none."""
        lines = [f"{method} {path} HTTP/1.1", "host: here", "connection: close"]
        lines += [f"content-length: {len(body)}", *(f"{k}: {v}" for k, v in headers), "", ""]
        with closing(self.connect()) as connection:
            connection.sendall("\r\n".join(lines).encode() + body)
            received = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, content = received.partition(b"\r\n\r\n")
        status = int(head.split()[1])
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode()

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Send JSON; return status and JSON."""
        named = [(key.replace("_", "-"), value) for key, value in headers.items()]
        return self.send(
            "POST", path, json.dumps(body).encode(), [("content-type", "application/json"), *named]
        )

    def connect(self) -> socket.socket:
        """Return a connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=60.0)

    def wait_until_idle(self) -> None:
        """Wait until no request is at work and none waits."""
        wait_until(lambda: self.scheduler.num_running + self.scheduler.num_waiting == 0)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until something has happened in another thread."""
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {MOST_SECONDS} s in vain"
        time.sleep(0.002)


@contextmanager
def serving(
    target: Target,
    *,
    drafters: Sequence[Drafter] | None = None,
    options: ServerOptions | None = None,
    max_running: int = 8,
    max_waiting: int = 64,
    on_step: Callable[[Round], None] = lambda _: None,
) -> Iterator[Running]:
    """Run a server for the length of the block."""
    outbox = Outbox()
    worker = new_worker(target, drafters_of(target) if drafters is None else drafters, outbox)
    scheduler = Scheduler(worker, max_running=max_running, max_waiting=max_waiting)
    server = OpenAiServer(scheduler, target, 4, options or ServerOptions(model_name=MODEL))
    app = build_app(server, lambda: (b"# nothing\n", "text/plain"), NoAdministration())
    config = uvicorn.Config(
        app, host="127.0.0.1", port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=2
    )
    http = uvicorn.Server(config)
    thread = threading.Thread(target=http.run, daemon=True)
    scheduler.start()
    thread.start()
    try:
        wait_until(lambda: http.started)
        port = http.servers[0].sockets[0].getsockname()[1]
        yield Running(port=port, target=target, worker=worker, scheduler=scheduler, outbox=outbox)
    finally:
        http.should_exit = True
        thread.join(20.0)
        assert scheduler.close(20.0)
        server.encoding.close()
