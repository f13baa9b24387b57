"""A schema registry for tests: the requests that Draftloop makes of Confluent's API, in memory.

No registry installs from the package index, so this one follows the published description of the
API: paths, media type, status codes and the fields of the answers.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Registry:
    """What the registry holds, and how it misbehaves.

    Attributes:
        refuses: Subjects that find every schema incompatible.
        asked: Paths that were asked for, oldest first.
        answer_seconds: How long it takes to answer.
        password: Of the user ``draftloop``, if one is asked for.
    """

    first_id: int = 1
    refuses: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)
    answer_seconds: float = 0.0
    password: str = ""
    id_to_text: dict[int, str] = field(default_factory=dict)
    subject_to_ids: dict[str, list[int]] = field(default_factory=dict)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def register(self, subject: str, text: str) -> int:
        """Give a text its id: one text has one, under whatever subjects."""
        known = [one for one, other in self.id_to_text.items() if other == text]
        schema_id = known[0] if known else self.first_id + len(self.id_to_text)
        self.id_to_text[schema_id] = text
        ids = self.subject_to_ids.setdefault(subject, [])
        if schema_id not in ids:
            ids.append(schema_id)
        return schema_id

    def answer(self, path: str, body: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
        """Return status and answer of one request."""
        if found := re.fullmatch(r"/schemas/ids/(\d+)", path):
            text = self.id_to_text.get(int(found[1]))
            missing = 404, {"error_code": 40403, "message": "Schema not found"}
            return missing if text is None else (200, {"schema": text})
        if found := re.fullmatch(r"/subjects/([^/]+)/versions", path):
            if found[1] in self.refuses:
                message = "Schema being registered is incompatible with an earlier schema"
                return 409, {"error_code": 409, "message": message}
            return 200, {"id": self.register(found[1], body["schema"])}
        if found := re.fullmatch(r"/compatibility/subjects/([^/]+)/versions/latest", path):
            if found[1] not in self.subject_to_ids:
                return 404, {"error_code": 40401, "message": "Subject not found"}
            return 200, {"is_compatible": found[1] not in self.refuses}
        return 404, {"error_code": 404, "message": "HTTP 404 Not Found"}


@contextmanager
def serving(registry: Registry) -> Iterator[Registry]:
    """Answer for ``registry`` on a port of its own, the same one again if it had one before."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._answer(json.loads(self.rfile.read(length)))

        def _answer(self, body: Mapping[str, Any]) -> None:
            registry.asked.append(self.path)
            time.sleep(registry.answer_seconds)
            proof = base64.b64encode(f"draftloop:{registry.password}".encode()).decode()
            if registry.password and self.headers["Authorization"] != f"Basic {proof}":
                status, answer = 401, {"error_code": 401, "message": "Unauthorized"}
            else:
                status, answer = registry.answer(self.path, body)  # type: ignore[assignment]
            data = json.dumps(answer).encode()
            with suppress(OSError):  # whoever asked may have lost patience
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", registry.port), Handler)
    registry.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield registry
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
