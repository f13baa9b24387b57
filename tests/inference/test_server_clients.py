"""Clients that leave, that never read, that may not; and every route that asks for a key."""

from __future__ import annotations

import gc
import json
import socket
from contextlib import closing
from http.client import HTTPConnection

import pytest
from fastapi import FastAPI
from starlette.routing import Route

from inference.drafters.nothing import NothingDrafter
from inference.scheduler import Ticket
from inference.server.answers import Answer
from inference.server.gate import FOR_CLIENTS, OPEN, Gate
from inference.server.options import KeyRing, ServerOptions
from inference.server.submission import Submission
from inference.worker import RequestAtWork
from schemas.events import FinishReason
from tests.inference.full import num_cases
from tests.inference.http import MODEL, Running, serving, wait_until
from tests.inference.tiny import tiny_llama

ENDLESS = {"model": MODEL, "prompt": "abc", "max_tokens": 4000, "temperature": 0}
ADMIN_KEY = "a" * 20
CLIENT_KEY = "c" * 20
CLOSED = ServerOptions(
    model_name=MODEL, api_keys=KeyRing([CLIENT_KEY]), admin_keys=KeyRing([ADMIN_KEY])
)


def open_request(run: Running, asked: dict[str, object]) -> socket.socket:
    """Send a request and return the connection, unread."""
    body = json.dumps(asked).encode()
    connection = run.connect()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n" % len(body) + body
    )
    return connection


@pytest.mark.parametrize("is_stream", [True, False])
def test_work_stops_when_the_client_leaves(is_stream: bool) -> None:
    """H1: and the partial event says aborted."""
    with serving(tiny_llama(1, context_length=8192), drafters=[NothingDrafter()]) as run:
        connection = open_request(run, {**ENDLESS, "stream": is_stream})
        if is_stream:
            assert connection.recv(10)
        wait_until(lambda: run.scheduler.num_running == 1)
        connection.close()
        run.wait_until_idle()
        assert run.outbox.events[-1].finish_reason is FinishReason.ABORTED
        num_tokens = sum(event.num_positions for event in run.outbox.events)
        assert num_tokens < 4000


def test_streams_cut_after_the_first_chunk_leave_no_work_and_no_lost_slot() -> None:
    target = tiny_llama(1, context_length=8192)
    count = num_cases(60, 1000)
    with serving(target, drafters=[NothingDrafter()], max_running=4, max_waiting=4) as run:
        for _ in range(count):
            with closing(open_request(run, {**ENDLESS, "stream": True})) as connection:
                received = b""
                while b"data:" not in received:
                    received += connection.recv(4096)
        run.wait_until_idle()
        finals = [event for event in run.outbox.events if event.is_final]
        assert len(finals) == count
        wait_until(lambda: not live_records())
        assert {event.finish_reason for event in finals} == {FinishReason.ABORTED}
        assert run.post("/v1/completions", {**ENDLESS, "max_tokens": 3})[0] == 200


def live_records() -> list[object]:
    """Return what is still there of requests that were."""
    gc.collect()
    kinds = (Ticket, RequestAtWork, Submission, Answer)
    return [one for one in gc.get_objects() if type(one) in kinds]


def test_short_requests_leave_no_record() -> None:
    """H2: through the whole server, streaming and not."""
    count = num_cases(60, 10_000)
    with serving(tiny_llama(1), drafters=[NothingDrafter()]) as run:
        connection = HTTPConnection("127.0.0.1", run.port, timeout=60.0)
        for number in range(count):
            asked = {**ENDLESS, "max_tokens": 1, "stream": number % 2 == 0}
            connection.request(
                "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            assert answer.status == 200
            answer.read()
        connection.close()
        run.wait_until_idle()
        assert sum(event.is_final for event in run.outbox.events) == count
        wait_until(lambda: not live_records())


def test_a_client_that_never_reads_is_cut() -> None:
    options = ServerOptions(model_name=MODEL, client_seconds=0.2)
    with serving(
        tiny_llama(1, context_length=65536), drafters=[NothingDrafter()], options=options
    ) as run:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        with closing(connection):
            connection.connect(("127.0.0.1", run.port))
            asked = {**ENDLESS, "max_tokens": 60_000, "stream": True, "logprobs": 20}
            body = json.dumps(asked).encode()
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: h\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n" % len(body) + body
            )
            wait_until(lambda: run.scheduler.num_running == 1)
            run.wait_until_idle()
        assert run.outbox.events[-1].finish_reason is FinishReason.ABORTED


def test_a_full_queue_is_a_429_and_the_rest_is_served() -> None:
    target = tiny_llama(1, context_length=8192)
    with serving(target, drafters=[NothingDrafter()], max_running=1, max_waiting=0) as run:
        with closing(open_request(run, {**ENDLESS, "stream": True})) as connection:
            assert connection.recv(10)
            status, body = run.post("/v1/completions", {**ENDLESS, "max_tokens": 1})
            assert (status, body["error"]["type"]) == (429, "rate_limit_error")
        run.wait_until_idle()
        assert run.post("/v1/completions", {**ENDLESS, "max_tokens": 1})[0] == 200


def routes_of(run: Running) -> list[tuple[str, str]]:
    """Return every method and path, from the application itself."""
    status, document = run.send("GET", "/openapi.json", headers=[bearer(CLIENT_KEY)])
    assert status == 200
    return [
        (method.upper(), path) for path, methods in document["paths"].items() for method in methods
    ]


def bearer(key: str) -> tuple[str, str]:
    return ("authorization", f"Bearer {key}")


def test_every_route_asks_for_the_key_that_it_needs() -> None:
    """I8: the routes are enumerated, so a new one that is open fails here."""
    with serving(tiny_llama(1), options=CLOSED) as run:
        routes = routes_of(run)
        assert {path for _, path in routes} >= {"/admin/drain", "/v1/completions", "/metrics"}
        for method, path in routes:
            place = path.replace("{model_id}", "x").replace("{drafter_id}", "d")
            place = place.replace("{version}", "1")
            no_key = run.send(method, place, headers=[])[0]
            client = run.send(method, place, headers=[bearer(CLIENT_KEY)])[0]
            if path in OPEN:
                assert no_key == 200
            elif path.startswith("/admin/"):
                assert (no_key, client) == (403, 403)
            else:
                assert no_key == 401
                assert client not in (401, 403)


def test_admin_routes_stay_closed_without_admin_keys() -> None:
    options = ServerOptions(model_name=MODEL)
    with serving(tiny_llama(1), options=options) as run:
        for key in ("", "none", ADMIN_KEY):
            status, body = run.send("POST", "/admin/drain", headers=[bearer(key)])
            assert status == 403
            assert "server.admin_keys_file" in body["error"]["message"]


def test_a_route_that_nobody_has_opened_is_closed() -> None:
    app = FastAPI()
    app.router.routes.append(Route("/new", lambda _: None))
    assert "/new" not in OPEN | FOR_CLIENTS
    gate = Gate(app, app.routes, ServerOptions(model_name=MODEL))
    scope = {"type": "http", "path": "/new", "method": "GET", "headers": []}
    refusal = gate.refusal(scope, {})
    assert refusal is not None
    assert refusal.status == 403


def test_the_admin_key_drains_changes_the_policy_and_swaps() -> None:
    with serving(tiny_llama(1), options=CLOSED) as run:
        admin, client = [bearer(ADMIN_KEY)], [bearer(CLIENT_KEY)]
        json_admin = [*admin, ("content-type", "application/json")]
        status, body = run.send("POST", "/admin/policy", b'{"policy":"hedge"}', json_admin)
        assert (status, run.worker.policy) == (200, "hedge")
        status, body = run.send("POST", "/admin/policy", b'{"policy":"x"}', json_admin)
        assert (status, body["error"]["param"]) == (400, "policy")
        assert run.send("POST", "/admin/drafters/head/1", headers=admin)[0] == 200
        for bad in ("head/2", "none/1"):
            assert run.send("POST", f"/admin/drafters/{bad}", headers=admin)[0] == 404
        for bad in ("a%00/1", f"{'d' * 300}/1", "..%5Cx/1", "head/x", "head/-1"):
            assert run.send("POST", f"/admin/drafters/{bad}", headers=admin)[0] == 400
        assert run.send("POST", "/admin/drafters/..%2Fx/1", headers=admin)[0] == 401
        assert run.send("POST", "/admin/drain", headers=admin)[0] == 200
        assert run.send("GET", "/readyz", headers=[])[0] == 503
        assert run.send("GET", "/healthz", headers=[])[0] == 200
        asked = json.dumps(ENDLESS).encode()
        json_client = [*client, ("content-type", "application/json")]
        assert run.send("POST", "/v1/completions", asked, json_client)[0] == 503
        assert run.send("POST", "/admin/resume", headers=admin)[0] == 200
        assert run.send("GET", "/readyz", headers=[])[0] == 200
        status, body = run.send("GET", "/admin/status", headers=admin)
        assert body == {"versions": {"head": 1}, "running": 0, "waiting": 0}


def test_no_key_is_shown() -> None:
    assert CLIENT_KEY not in repr(CLOSED)
    with serving(tiny_llama(1), options=CLOSED) as run:
        wrong = "wrong-" + CLIENT_KEY
        for path in ("/v1/models", "/admin/status", "/metrics", "/healthz"):
            _, body = run.send("GET", path, headers=[bearer(wrong)])
            assert CLIENT_KEY not in json.dumps(body)
