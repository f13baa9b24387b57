"""One engine of the vLLM benchmark: reads a job, serves its prompts, writes what it saw.

It runs in vLLM's own environment, as a program of its own: ``python -m
pipeline.bench.vllm.runner JOB RESULT``. Prompts are sent so that at most ``concurrency`` are in the
engine at a time. Nothing but vLLM serves here; the proposer, if the job asks for it, is named in
vLLM's configuration.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

WARM_UP = "Say in two sentences what a warm-up is, then say it again in other words."
WARM_UP_TOKENS = 16

DONE, PAUSED = "done", "paused"
"""What an engine answers at the end of a block, and at the end of a turn within one."""


def main(job_file: Path, result_file: Path) -> None:
    """Serve a job.

    The job is JSON: ``model``, ``engine`` (arguments of ``vllm.LLM``), ``max_tokens``,
    ``temperature``, ``passes`` and ``turn_seconds``; a pass has ``concurrency`` and ``blocks``, and
    a block is a list of ``{"set": ..., "prompt": ..., "seed": ...}``, of which all end before the
    next block. Without ``turn_seconds`` it serves at once, else in turns (``_Turns``).
    """
    job = json.loads(job_file.read_text(encoding="utf-8"))
    turns = _Turns(job.get("turn_seconds"))
    began = time.perf_counter()
    serving = _Serving(job, turns)
    result: dict[str, Any] = {"start_seconds": time.perf_counter() - began, "passes": []}
    serving.block([{"set": "warm-up", "prompt": WARM_UP}], 1, WARM_UP_TOKENS)
    for one in job["passes"]:
        before = serving.counters()
        served = []
        for block in one["blocks"]:
            turns.await_next(DONE)
            served += serving.block(block, one["concurrency"], job["max_tokens"])
        counters = {k: v - before.get(k, 0.0) for k, v in serving.counters().items()}
        result["passes"].append(
            {"concurrency": one["concurrency"], "requests": served, "counters": counters}
        )
        result_file.write_text(json.dumps(result), encoding="utf-8")
    serving.close()
    result_file.write_text(json.dumps(result), encoding="utf-8")
    # To end takes seconds of the cores on which others still serve.
    turns.await_next(DONE)


class _Turns:
    """Several engines on the same cores, of which one at a time works.

    When it has started, when a block is served and when its turn is over, an engine says so by a
    line on the standard output, and goes on after a line on the standard input. Time stands still
    in between.

    Args:
        seconds: Of a turn; None = there are no others.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._waited = 0.0
        # No turn has begun: what is served before the first one is not paused.
        self._began = math.inf
        # What vLLM prints is no answer: it goes where its log goes.
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def now(self) -> float:
        """Return the seconds of a clock that runs in turns alone."""
        return time.perf_counter() - self._waited

    def pause_if_over(self) -> None:
        """Let others work, if the turn has lasted long enough."""
        if self._seconds is not None and time.perf_counter() - self._began >= self._seconds:
            self.await_next(PAUSED)

    def await_next(self, answer: str) -> None:
        """Say how far it has come, and wait for the next turn."""
        if self._seconds is None:
            return
        began = time.perf_counter()
        self.tell(answer)
        if not sys.stdin.readline():
            raise SystemExit("nobody gives turns any more")
        self._began = time.perf_counter()
        self._waited += self._began - began

    def tell(self, answer: str) -> None:
        """Say how far it has come."""
        if self._seconds is not None:
            self._answers.write(f"{answer}\n")
            self._answers.flush()


class _Serving:
    """vLLM in this process."""

    def __init__(self, job: Mapping[str, Any], turns: _Turns) -> None:
        # Here alone: the module must be importable, and checked, without vLLM.
        from vllm import LLM, SamplingParams

        self._llm = LLM(job["model"], disable_log_stats=False, **job["engine"])
        self._engine: Any = self._llm.llm_engine
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._params = SamplingParams
        self._turns = turns
        self._temperature = float(job.get("temperature", 0.0))
        self._stream = job.get("stream")
        self._num_requests = 0

    def block(
        self, prompts: Sequence[Mapping[str, Any]], concurrency: int, max_tokens: int
    ) -> list[dict[str, Any]]:
        """Serve prompts, at most ``concurrency`` at a time, and return one record each.

        Seconds of a request run from its sending to its end; ``block_seconds`` is the block's.
        """
        waiting = list(prompts)[::-1]
        running: dict[str, dict[str, Any]] = {}
        done: list[dict[str, Any]] = []
        began = self._turns.now()
        while waiting or running:
            self._turns.pause_if_over()
            while waiting and len(running) < concurrency:
                self._send(waiting.pop(), running, max_tokens)
            for output in self._engine.step():
                if output.finished and output.request_id in running:
                    record = running.pop(output.request_id)
                    record["token_ids"] = list(output.outputs[0].token_ids)
                    record["seconds"] = self._turns.now() - record["seconds"]
                    done.append(record)
        seconds = self._turns.now() - began
        return [record | {"block_seconds": seconds} for record in done]

    def _send(
        self, prompt: Mapping[str, Any], running: dict[str, dict[str, Any]], max_tokens: int
    ) -> None:
        self._num_requests += 1
        request_id = str(self._num_requests)
        messages = [{"role": "user", "content": prompt["prompt"]}]
        token_ids = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True
        )["input_ids"]
        params = self._params(
            temperature=self._temperature,
            max_tokens=max_tokens,
            seed=prompt.get("seed"),
            extra_args={"draftloop_stream": self._stream} if self._stream else None,
        )
        running[request_id] = {"set": prompt["set"], "index": prompt.get("index", -1)}
        running[request_id]["seconds"] = self._turns.now()
        self._engine.add_request(request_id, {"prompt_token_ids": list(token_ids)}, params)

    def counters(self) -> dict[str, float]:
        """Return vLLM's counters of speculation, and the proposer's own times."""
        found = {
            metric.name: float(metric.value)
            for metric in self._llm.get_metrics()
            if "spec_decode" in metric.name and hasattr(metric, "value")
        }
        return found | dict(_own_counters())

    def close(self) -> None:
        """Let the proposer send what it has."""
        drafter = self._drafter()
        if drafter is not None and hasattr(drafter, "close"):
            drafter.close()

    def _drafter(self) -> Any:
        core = getattr(self._engine.engine_core, "engine_core", None)
        worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
        runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
        return getattr(runner, "drafter", None)


def _own_counters() -> Iterator[tuple[str, float]]:
    """Yield the proposer's counters, which vLLM's registry holds in this process."""
    from prometheus_client import REGISTRY

    for family in REGISTRY.collect():
        if family.name.startswith("draftloop_vllm_"):
            for sample in family.samples:
                if sample.name.endswith("_total"):
                    name = family.name.removeprefix("draftloop_vllm_")
                    yield f"{name}/{sample.labels.get('drafter', '')}", float(sample.value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
