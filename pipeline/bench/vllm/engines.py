"""Engines of the vLLM benchmark: processes of vLLM's own environment that serve in turns.

A shared machine's speed drifts by tens of percent within seconds. So the engines that are compared
run at the same time and serve the same block of prompts, each for a moment while the others stand
still.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

from pipeline.bench.vllm.result import VllmBenchError
from pipeline.bench.vllm.runner import DONE
from pipeline.configuration.settings import Settings, service_environment
from pipeline.messaging.boards import LogPolicyBoard
from pipeline.messaging.event_logs import open_log

RUNNER = "pipeline.bench.vllm.runner"

TURN_SECONDS = 1.0

ANSWER_SECONDS = 900.0
"""Longest that an engine may take to start, or for one turn."""

END_SECONDS = 60.0

LEARNER_LOG = "learner.log"


class Engine:
    """One engine, and the learner beside it, that work only while it is their turn.

    Args:
        method: Names it in errors.
        python: Of vLLM's environment.
        settings: Of the proposer; ``data`` is the folder of its files.
        job: As ``pipeline.bench.vllm.runner`` reads it.
        has_learner: Whether a learner works beside it, on the same cores.
    """

    def __init__(
        self,
        method: str,
        python: Path,
        settings: Settings,
        job: Mapping[str, Any],
        *,
        has_learner: bool = False,
    ) -> None:
        self._method = method
        self._settings = settings
        folder = settings.data
        folder.mkdir(parents=True, exist_ok=True)
        job_file, self._result, self._log = (
            folder / name for name in ("job.json", "result.json", "engine.log")
        )
        job_file.write_text(json.dumps({**job, "turn_seconds": TURN_SECONDS}), encoding="utf-8")
        self._learner: subprocess.Popen[bytes] | None = None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [str(python), "-P", "-m", RUNNER, str(job_file), str(self._result)],
                env=engine_environment(settings),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        if has_learner:
            with (folder / LEARNER_LOG).open("ab") as log:
                self._learner = subprocess.Popen(
                    [sys.executable, "-P", "-m", "pipeline.tied", "learner"],
                    env=service_environment(settings),
                    stdout=log,
                    stderr=log,
                )

    def await_start(self) -> None:
        """Return once it could serve, and the learner could learn.

        Raises:
            VllmBenchError: If it fails, or does not start.
        """
        self._await_answer()
        self._await_learner()
        self._pause(signal.SIGSTOP)

    def take_turn(self) -> bool:
        """Serve for a moment; return whether the block is served.

        Raises:
            VllmBenchError: If the engine fails, or does not end its turn.
        """
        self._pause(signal.SIGCONT)
        self._go()
        answer = self._await_answer()
        self._pause(signal.SIGSTOP)
        return answer == DONE

    def found(self) -> Any:
        """Return what it wrote, once its last turn is over, and let it end.

        Raises:
            VllmBenchError: If it does not end well.
        """
        self._go()
        try:
            status = self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            status = 1
        if status or not self._result.is_file():
            raise self._failure()
        return json.loads(self._result.read_text(encoding="utf-8"))

    def close(self) -> None:
        """End what still runs."""
        self._pause(signal.SIGCONT)
        for process in filter(None, (self._learner, self._process)):
            process.terminate()
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            _pipe(pipe).close()

    def _await_learner(self) -> None:
        """Wait until the warm-up is learned, which says that all is loaded and compiled."""
        if self._learner is None:
            return
        deadline = time.monotonic() + ANSWER_SECONDS
        with closing(open_log(self._settings)) as log:
            board = LogPolicyBoard(log, source="benchmark")
            while not board.read_all():
                if self._learner.poll() is not None or time.monotonic() > deadline:
                    place = self._settings.data / LEARNER_LOG
                    raise VllmBenchError(f"{self._method}: the learner did not start, see {place}")
                time.sleep(0.2)

    def _go(self) -> None:
        # One that has ended answers nothing, which says so.
        with suppress(BrokenPipeError):
            _pipe(self._process.stdin).write(b"\n")

    def _await_answer(self) -> str:
        answers = _pipe(self._process.stdout)
        ready, _, _ = select.select([answers], [], [], ANSWER_SECONDS)
        answer = answers.readline() if ready else b""
        if not answer:
            raise self._failure()
        return answer.decode().strip()

    def _failure(self) -> VllmBenchError:
        last = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        words = f"the engine failed, see {self._log}: {' '.join(last)[:300]}"
        return VllmBenchError(f"{self._method}: {words}")

    def _pause(self, number: signal.Signals) -> None:
        if self._learner is not None:
            self._learner.send_signal(number)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def engine_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of an engine: the proposer's settings, and vLLM in one process."""
    return service_environment(settings) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Five engines stand side by side; a gigabyte holds 16 requests of 2,048 tokens.
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
