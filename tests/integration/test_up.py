"""The whole stack as processes: it learns, is healed when killed, and ends in order."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from pipeline.messaging.boards import LogPolicyBoard, LogReleaseBoard
from pipeline.messaging.event_logs import bare_log
from schemas.events import ReleaseState
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.clean_pass import first_wrong_policy, logged_events
from tests.integration.roles import LEARNER_ID
from tests.integration.tiny_run import TinyRun, save_tiny_model, wait_until


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TinyRun]:
    save_tiny_model(tmp_path / "model")
    run = TinyRun.make(tmp_path, tmp_path / "model")
    server, learner, archiver = free_ports(3)
    run.edit_settings(
        "[learner]\n",
        f"[server]\nport = {server}\n[metrics]\nlearner_port = {learner}\n"
        f'archiver_port = {archiver}\n[learner]\nlearner_id = "{LEARNER_ID}"\n',
    )
    yield run


def ask(run: TinyRun, path: str, body: dict[str, object] | None = None) -> str:
    url = f"http://127.0.0.1:{run.settings.server.port}{path}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def is_ready(run: TinyRun) -> bool:
    try:
        return "ready" in ask(run, "/readyz")
    except (urllib.error.URLError, OSError):
        return False


def process_of(run: TinyRun, service: str) -> int:
    out, _ = run.output("up")
    return int(re.findall(rf"^{service} +\| started as process (\d+)$", out, re.MULTILINE)[-1])


def was_restarted(run: TinyRun, service: str, killed: int) -> bool:
    return process_of(run, service) != killed


def newest_version(run: TinyRun) -> int:
    try:
        with bare_log(run.settings) as log:
            releases = LogReleaseBoard(log, source="test").read_all()
    except sqlite3.OperationalError:
        return 0
    return max((r.version for r in releases if r.state is ReleaseState.LIVE), default=0)


def is_learned(run: TinyRun) -> bool:
    """Whether the published policies contain every event of the log."""
    with bare_log(run.settings) as log:
        policies = LogPolicyBoard(log, source="test").read_all()
        learned = [policy.watermark.partition_to_offset.get(0, 0) for policy in policies]
        return max(learned, default=0) >= log.end_offset(VERIFICATION_EVENTS, 0)


def test_a_stack_learns_is_healed_after_every_kill_and_ends_in_order(run: TinyRun) -> None:
    process = run.start("up")
    try:
        wait_until(lambda: is_ready(run))
        model = json.loads(ask(run, "/v1/models"))["data"][0]["id"]
        asked = {"model": f"{model}:code", "prompt": "abcabc", "max_tokens": 40, "seed": 1}

        def has_learned(version: int) -> bool:
            ask(run, "/v1/completions", asked)
            return newest_version(run) > version

        wait_until(lambda: has_learned(1))
        services = ("learner", "archiver", "worker")
        service_to_killed = {service: process_of(run, service) for service in services}
        before = newest_version(run)
        for killed in service_to_killed.values():
            os.kill(killed, signal.SIGKILL)
        for service, killed in service_to_killed.items():
            wait_until(partial(was_restarted, run, service, killed))
        wait_until(lambda: is_ready(run))
        wait_until(partial(has_learned, before))
        wait_until(lambda: is_learned(run))
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait()
    out, _ = run.output("up")
    assert status == 0
    stopping = re.findall(r"^(\w+) +\| stopping$", out, re.MULTILINE)
    assert stopping == ["worker", "learner", "archiver"]
    assert out.count("ended with SIGKILL") == 3
    assert "Traceback" not in out
    assert list(run.events.rglob("*.parquet"))
    with bare_log(run.settings) as log:
        assert first_wrong_policy(log, logged_events(log)) is None
