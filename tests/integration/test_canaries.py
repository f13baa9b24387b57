"""A key and a prompt that consented to nothing are found in no log, metric, file or topic."""

from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request
from pathlib import Path

from pipeline.messaging.event_logs import bare_log
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.integration.clean_pass import stored_messages
from tests.integration.tiny_run import TinyRun, save_tiny_model, wait_until

KEY = "canary-key-0123456789"
ADMIN_KEY = "canary-admin-0123456789"
PROMPT = "zyxwvutsrqponmlkjihgfedcba"
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


def ask(port: int, path: str, *, body: object = None, key: str = KEY, consent: str = "no") -> str:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        None if body is None else json.dumps(body).encode(),
        {
            "content-type": "application/json",
            "authorization": f"Bearer {key}",
            "x-draftloop-consent": consent,
            "traceparent": TRACE,
        },
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return str(error.read().decode())


def is_ready(port: int) -> bool:
    try:
        return "ready" in ask(port, "/readyz")
    except OSError:
        return False


def test_no_canary_is_found_anywhere(tmp_path: Path) -> None:
    """I9; and the trace context is in the headers of the events."""
    save_tiny_model(tmp_path / "model")
    run = TinyRun.make(tmp_path, tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    (tmp_path / "keys").write_text(KEY + "\n")
    (tmp_path / "admin").write_text(ADMIN_KEY + "\n")
    run.edit_settings(
        "[learner]\n",
        f'[logs]\nlevel = "DEBUG"\nformat = "json"\n[server]\nport = {port}\n'
        f'api_keys_file = "{tmp_path}/keys"\nadmin_keys_file = "{tmp_path}/admin"\n[learner]\n',
    )
    process = run.start("serve")
    pages = []
    try:
        wait_until(lambda: is_ready(port))
        model = json.loads(ask(port, "/v1/models"))["data"][0]["id"]
        asked = {"model": model, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        answer = ask(port, "/v1/completions", body=asked)
        assert "choices" in answer
        for wrong in (
            {**asked, "n": 2},
            {**asked, "prompt": PROMPT * 20},
            {**asked, "stop": 5},
            {**asked, "nonsense": PROMPT},
            {**asked, "user": [PROMPT]},
        ):
            pages.append(ask(port, "/v1/completions", body=wrong))
        pages += [ask(port, path) for path in ("/metrics", "/healthz", "/v1/models")]
        pages.append(ask(port, "/admin/status", key=ADMIN_KEY))
        pages.append(ask(port, "/admin/status", key=PROMPT))
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    pages += run.output("serve")
    with bare_log(run.settings) as log:
        stored = list(stored_messages(log, VERIFICATION_EVENTS, 0))
        letters = list(stored_messages(log, DEAD_LETTERS, 0))
    assert stored
    assert all(one.message.headers["traceparent"] == TRACE.encode() for one in stored)
    assert [json.loads(line)["service"] for line in run.output("serve")[1].splitlines()]
    files = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    contents = [path.read_bytes() for path in files]
    contents += [page.encode() for page in pages]
    contents += [one.message.value or b"" for one in [*stored, *letters]]
    for canary in (KEY, ADMIN_KEY, PROMPT):
        assert not any(canary.encode() in one for one in contents), canary
