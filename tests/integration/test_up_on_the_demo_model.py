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

from pipeline.boards import LogReleaseBoard
from pipeline.eventlog.ports import EventLogError
from pipeline.prompts import read_prompts
from pipeline.settings import Settings, load_settings
from pipeline.wiring import bare_log
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


def learned_releases(settings: Settings) -> list[str]:
    """Return the heads whose live version is not the untrained one that they began with."""
    try:
        with bare_log(settings) as log:
            releases = LogReleaseBoard(log, source="test").read_all()
    except (sqlite3.OperationalError, EventLogError):
        return []
    return [
        f"{one.drafter_id} version {one.version}"
        for one in releases
        if one.version > 0 and one.state is ReleaseState.LIVE
    ]


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
    began, num_answers, seconds_to_ready = time.monotonic(), 0, 0.0
    with (tmp_path / "up.log").open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeline.cli", "up", "--config", str(config)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        while not (found := learned_releases(settings)):
            assert time.monotonic() - began < most_seconds, (tmp_path / "up.log").read_text()
            try:
                ask(port, next(prompts))
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
                continue
            seconds_to_ready = seconds_to_ready or time.monotonic() - began
            num_answers += 1
    finally:
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        status = process.wait(60)
    assert status == 0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(  # noqa: T201  # the figure is what the test is run for
        f"{seconds:.0f} s to {found[0]}, first answer after {seconds_to_ready:.0f} s, "
        f"{num_answers} answers, {used.ru_utime + used.ru_stime:.0f} s of processor time"
    )
