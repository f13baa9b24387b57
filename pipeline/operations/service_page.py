"""The page of a service that serves no HTTP otherwise: metrics, liveness, readiness."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from pipeline.configuration.settings import SettingsError
from pipeline.operations.loops import Loops

TEXT = "text/plain; charset=utf-8"
CLIENT_SECONDS = 10.0


class ServicePage:
    """What is shown of a service.

    Attributes:
        loops: Its loops, which say whether it is alive and ready.
    """

    def __init__(self, loops: Loops | None = None) -> None:
        self.loops = loops or Loops()
        self._registry = CollectorRegistry()
        self._registry.register(self.loops)

    @contextmanager
    def showing(self, collector: Collector) -> Iterator[None]:
        """Show these metrics for the length of the block."""
        self._registry.register(collector)
        try:
            yield
        finally:
            self._registry.unregister(collector)

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, content type and body of a request."""
        path = path.partition("?")[0]
        if path == "/metrics":
            return 200, CONTENT_TYPE_LATEST, generate_latest(self._registry)
        if path not in ("/healthz", "/readyz"):
            return 404, TEXT, b"there are /metrics, /healthz and /readyz\n"
        trouble = self.loops.still()
        if path == "/readyz" and not trouble and (lacks := self.loops.lacking()):
            trouble = f"degraded: {lacks}"
        return 503 if trouble else 200, TEXT, f"{trouble or 'ok'}\n".encode()


@contextmanager
def answering(page: ServicePage, host: str, port: int, setting: str) -> Iterator[None]:
    """Answer for the page on a port for the length of the block; port 0 = not at all.

    Raises:
        SettingsError: If the port cannot be listened on.
    """
    if not port:
        yield
        return
    try:
        server = ThreadingHTTPServer((host, port), _handler(page))
    except OSError as error:
        raise SettingsError(
            f"{setting} = {port}: cannot be listened on: {error.strerror}; name another port"
        ) from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _handler(page: ServicePage) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = CLIENT_SECONDS

        def do_GET(self) -> None:
            status, kind, body = page.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing: it is asked every few seconds."""

    return Handler
