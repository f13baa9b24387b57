"""One engine under stress, in vLLM's own environment: ``python -m tests.integration.vllm_stress``.

It reads a job, serves its requests, ends some of them early, and writes what the client saw: the
tokens of every request, the seconds of every step and the drafter's share of them, the memory of
the process, and vLLM's own counters. Nothing but vLLM serves here.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STEPS_PER_LOOK = 25
"""Memory is looked at once in so many steps."""

OWN_MODULES = ("inference", "learner", "pipeline", "replay", "schemas")


def main(job_file: Path, result_file: Path) -> None:
    """Serve a job.

    The job is JSON: ``model``, ``engine`` (arguments of ``vllm.LLM``), ``num_running`` (requests
    in the engine at a time, those that wait included), ``adapter`` (folder of a LoRA adapter, or
    null) and ``requests`` (``tests.integration.vllm_requests``).
    """
    job = json.loads(job_file.read_text(encoding="utf-8"))
    serving = Serving(job)
    serving.run()
    result_file.write_text(json.dumps(serving.result()), encoding="utf-8")


class Serving:
    """vLLM in this process, and what its client sees."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        # Here alone: the module must be importable, and checked, without vLLM.
        from vllm import LLM

        self._llm = LLM(job["model"], disable_log_stats=False, **job["engine"])
        self._engine: Any = self._llm.llm_engine
        self._waiting = list(job["requests"])[::-1]
        self._num_running = int(job["num_running"])
        self._adapter = str(job.get("adapter"))
        self._running: dict[str, dict[str, Any]] = {}
        self._outputs: dict[str, dict[str, Any]] = {}
        self._steps: list[list[float]] = []
        self._resident: list[int] = []
        self._own = [0.0, 0.0]
        self._drafter = drafter_of(self._engine)
        if self._drafter is not None:
            self._drafter.propose = self._clocked(self._drafter.propose)

    def run(self) -> None:
        """Serve all requests."""
        while self._waiting or self._running:
            while self._waiting and len(self._running) < self._num_running:
                self._send(self._waiting.pop())
            self._step()
            self._abort()
        # vLLM takes the last requests off its runner with a step of others alone.
        close = getattr(self._drafter, "close", None)
        if close is not None:
            close()

    def result(self) -> dict[str, Any]:
        """Return what was seen, as JSON."""
        loaded = {name.split(".", 1)[0] for name in sys.modules}
        return {
            "outputs": self._outputs,
            "steps": self._steps,
            "resident": self._resident,
            "counters": {
                metric.name: float(metric.value)
                for metric in self._llm.get_metrics()
                if hasattr(metric, "value")
            },
            "own_modules": sorted(loaded.intersection(OWN_MODULES)),
        }

    def _clocked(self, propose: Any) -> Any:
        def clocked(*args: Any, **kwargs: Any) -> Any:
            began, used = time.perf_counter(), time.thread_time()
            try:
                return propose(*args, **kwargs)
            finally:
                self._own = [time.perf_counter() - began, time.thread_time() - used]

        return clocked

    def _send(self, request: dict[str, Any]) -> None:
        request["steps"] = 0
        self._running[request["id"]] = request
        self._outputs[request["id"]] = {"tokens": {}, "finish": {}}
        self._engine.add_request(
            request["id"],
            {"prompt_token_ids": request["prompt"]},
            sampling_params(request),
            lora_request=self._lora() if request["is_adapted"] else None,
        )

    def _lora(self) -> Any:
        from vllm.lora.request import LoRARequest

        return LoRARequest(Path(self._adapter).name, 1, self._adapter)

    def _step(self) -> None:
        self._own = [0.0, 0.0]
        began = time.perf_counter()
        outputs = self._engine.step()
        self._steps.append([time.perf_counter() - began, *self._own])
        for output in outputs:
            self._note(output)
        if len(self._steps) % STEPS_PER_LOOK == 0:
            self._resident.append(resident_bytes())

    def _note(self, output: Any) -> None:
        seen = self._outputs[output.request_id]
        for one in output.outputs:
            seen["tokens"][str(one.index)] = list(one.token_ids)
            if one.finish_reason is not None:
                seen["finish"][str(one.index)] = one.finish_reason
        if output.finished:
            self._running.pop(output.request_id, None)

    def _abort(self) -> None:
        """End the requests whose client has had enough."""
        for request in list(self._running.values()):
            request["steps"] += 1
            num_tokens = max(map(len, self._outputs[request["id"]]["tokens"].values()), default=0)
            after_tokens, after_steps = request["abort_after_tokens"], request["abort_after_steps"]
            has_enough = after_tokens is not None and num_tokens >= after_tokens
            if has_enough or (after_steps is not None and request["steps"] >= after_steps):
                self._engine.abort_request([request["id"]])
                del self._running[request["id"]]
                self._outputs[request["id"]]["finish"]["all"] = "abort"


def sampling_params(request: Mapping[str, Any]) -> Any:
    """Return vLLM's parameters of a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    grammar = request["grammar"]
    return SamplingParams(
        n=request["n"],
        temperature=request["temperature"],
        max_tokens=request["max_tokens"],
        ignore_eos=request["ignores_end"],
        stop_token_ids=request["stop_token_ids"],
        structured_outputs=StructuredOutputsParams(regex=grammar) if grammar else None,
        extra_args={"draftloop_stream": request["stream"]} if request["stream"] else None,
    )


def drafter_of(engine: Any) -> Any:
    """Return the drafter of an engine in this process; None if it has none."""
    core = getattr(engine.engine_core, "engine_core", None)
    worker = getattr(getattr(core, "model_executor", None), "driver_worker", None)
    runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
    return getattr(runner, "drafter", None)


def resident_bytes() -> int:
    """Return the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
    # What vLLM leaves running is its own; the result is on disk.
    sys.stdout.flush()
    os._exit(0)
