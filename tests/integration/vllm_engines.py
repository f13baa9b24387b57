"""Engines of a real vLLM for the tests: programs of its own environment, and what they report."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.bench.vllm.benchmark import PROPOSER
from pipeline.bench.vllm.engines import engine_environment
from pipeline.configuration.settings import Settings
from pipeline.messaging.boards import LogEventSource
from pipeline.messaging.event_logs import open_log
from schemas.events import VerificationEvent

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("DRAFTLOOP_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
IS_FULL = os.environ.get("DRAFTLOOP_TEST_FULL") == "1"
ENGINE_SECONDS = 3600 if IS_FULL else 600
NUM_LEVELS = 4
SPECULATION = {
    "method": "custom_class",
    "model": PROPOSER,
    "num_speculative_tokens": NUM_LEVELS,
}

needs_vllm = [
    pytest.mark.real_model,
    pytest.mark.timeout(3 * ENGINE_SECONDS + 60),
    pytest.mark.skipif(
        not PYTHON.is_file(),
        reason=f"no vLLM at {PYTHON}: 'make vllm-venv' installs it, 'make test-vllm' runs this",
    ),
]


def run_engine(
    program: str,
    job: Mapping[str, Any],
    folder: Path,
    settings: Settings | None,
    *,
    python: Path = PYTHON,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], str]:
    """Run a program of these tests in vLLM's environment; return its result and its log.

    Args:
        program: Module that takes the files of a job and of its result.
        job: Written as JSON.
        folder: New; for the files.
        settings: Of the proposer; None = none are set.
        python: Another interpreter than the tested environment's.
        environment: Variables on top.
    """
    folder.mkdir(parents=True)
    job_file, result = folder / "job.json", folder / "result.json"
    job_file.write_text(json.dumps(job), encoding="utf-8")
    variables = engine_environment(settings or Settings())
    if settings is None:
        variables = {k: v for k, v in variables.items() if not k.startswith("DRAFTLOOP_")}
    served = subprocess.run(
        [str(python), "-m", program, str(job_file), str(result)],
        env=variables | {"PYTHONPATH": str(ROOT)} | dict(environment or {}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=ENGINE_SECONDS,
        check=False,
    )
    log = served.stdout + served.stderr
    assert served.returncode == 0, log[-3000:]
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found, log


def events_of(settings: Settings) -> list[VerificationEvent]:
    """Return all events of a log, in the order in which they were made."""
    log = open_log(settings)
    try:
        source = LogEventSource(log, range(1))
        found = []
        while received := source.poll(0.5):
            found += [one.event for one in received]
    finally:
        log.close()
    return sorted(found, key=lambda event: event.sequence)
