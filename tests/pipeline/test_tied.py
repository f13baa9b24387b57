"""A service does not outlive the process that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from pipeline.locks import LockError, only_one
from tests.integration.tiny_run import wait_until

STARTER = """
import subprocess, sys
command = [sys.executable, "-P", "-m", "pipeline.tied", "scheduler", "--config", {config!r}]
child = subprocess.Popen(command)
print(child.pid, flush=True)
child.wait()
"""


def is_locked(data: Path) -> bool:
    try:
        with only_one(data, "scheduler", cure=""):
            return False
    except LockError:
        return True


def test_a_service_ends_when_its_starter_was_killed(tmp_path: Path) -> None:
    config = tmp_path / "draftloop.toml"
    config.write_text(f'data = "{tmp_path}/data"\n[schedule]\ncompact = "40 * * * *"\n')
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER.format(config=str(config))],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert starter.stdout is not None
    child = int(starter.stdout.readline())
    wait_until(lambda: is_locked(tmp_path / "data"))
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    wait_until(lambda: not Path(f"/proc/{child}").exists())
    assert not is_locked(tmp_path / "data")
