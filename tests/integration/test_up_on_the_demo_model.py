"""From nothing to a learned release: ``draftloop up`` with the demo's target and default settings.

Takes minutes, so it runs only if ``DRAFTLOOP_TEST_UP`` says how many seconds it may take: 180 on
two cores that nobody else uses.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pipeline.configuration.settings import Settings, load_settings
from pipeline.eventlog.ports import EventLogError
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import bare_log
from pipeline.prompts import read_prompts
from schemas.events import ReleaseState
from tests.integration.test_up import free_ports

SETTINGS = """
data = "{folder}/data"
cache = "{folder}/cache"
[server]
port = {port}
[content]
consenting_streams = ["default"]
[features]
enabled = true
"""


def learned_states(settings: Settings) -> set[str]:
    """Return the states of all versions but the untrained ones that heads begin with."""
    try:
        with bare_log(settings) as log:
            board = LogReleaseBoard(log, source="test")
            releases = [*board.read_all(), *board.read_beside()]
    except (sqlite3.OperationalError, EventLogError):
        return set()
    return {one.state.value for one in releases if one.version > 0}


def ask(port: int, prompt: str) -> None:
    """Ask for an answer, or wait a moment if nobody listens yet."""
    body = {"model": model_name(port), "messages": [{"role": "user", "content": prompt}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body | {"max_tokens": 64, "temperature": 0}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] > 0


def model_name(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=60) as answer:
        return str(json.load(answer)["data"][0]["id"])


@pytest.mark.skipif(
    "DRAFTLOOP_TEST_UP" not in os.environ,
    reason="minutes of two cores: set DRAFTLOOP_TEST_UP=180, the seconds that it may take",
)
@pytest.mark.timeout(1800)
def test_up_has_a_learned_release_soon_after_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most_seconds = float(os.environ["DRAFTLOOP_TEST_UP"])
    monkeypatch.delenv("DRAFTLOOP_TEST_UP")  # it is no setting
    (port,) = free_ports(1)
    config = tmp_path / "draftloop.toml"
    config.write_text(SETTINGS.format(folder=tmp_path, port=port))
    settings = load_settings(config)
    prompts = itertools.cycle([one.text for one in read_prompts(None)])
    began, num_answers = time.monotonic(), 0
    first_seconds: dict[str, float] = {}
    with (tmp_path / "up.log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.cli", "up", "--config", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        while ReleaseState.LIVE.value not in first_seconds:
            for state in learned_states(settings):
                first_seconds.setdefault(state, time.monotonic() - began)
            assert time.monotonic() - began < most_seconds, (tmp_path / "up.log").read_text()
            try:
                ask(port, next(prompts))
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
                continue
            first_seconds.setdefault("answered", time.monotonic() - began)
            num_answers += 1
    finally:
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    shown = ", ".join(f"{what} after {seconds:.0f} s" for what, seconds in first_seconds.items())
    processor_seconds = used.ru_utime + used.ru_stime
    # The figure is what the test is run for.
    print(f"{shown}; {num_answers} answers, {processor_seconds:.0f} s of processor time")  # noqa: T201
