"""The vLLM benchmark: an unmodified vLLM with its own methods and with Draftloop, side by side.

Every engine is a process of vLLM's own environment (``pipeline.bench.vllm.runner``), one per method
and ordering, the methods in turns. All get the same prompts in the same order and the same K. Two
Draftloops are measured: one with a head released before (trained on other prompts of the same
sets, by the target's own answers), and one whose head learns from nothing during the run, with
the learner on the same cores.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from inference.model_files import resolve_target
from inference.target import Target
from pipeline.bench.vllm.heads import (
    DRAFT_VOCABULARY_SIZE,
    INNER_SIZE,
    release_head,
    trained_head,
)
from pipeline.bench.vllm.prompts import PromptSet, blocks, read_prompt_sets
from pipeline.bench.vllm.result import (
    DRAFTLOOP,
    LEARNING,
    NGRAM,
    NONE,
    SUFFIX,
    Served,
    VllmBenchError,
    summary,
    table,
)
from pipeline.json_files import write_json
from pipeline.pool_settings import DrafterSettings
from pipeline.settings import (
    ContentSettings,
    FeatureSettings,
    LearnerSettings,
    Settings,
    WorkerSettings,
    service_environment,
)
from pipeline.wiring import open_target

STREAM = "bench"
HEAD = "head"
METHODS = (NONE, NGRAM, SUFFIX, DRAFTLOOP, LEARNING)
RUNNER = "pipeline.bench.vllm.runner"
PROPOSER = "inference.vllm_plugin.DraftloopProposer"
ENGINE_SECONDS = 3600.0
"""Longest that one engine may take."""

TRAINING_POSITIONS = 64
"""Per weight update: an update takes a fraction of the time in which its event was served."""

NICENESS = 10
"""Of the learner on the engine's cores: serving goes first."""

LOOKUPS = (
    DrafterSettings(drafter_id="none", kind="none"),
    DrafterSettings(drafter_id="prompt-lookup", kind="prompt_lookup"),
    DrafterSettings(drafter_id="suffix", kind="suffix"),
    DrafterSettings(drafter_id=HEAD, kind="hydra", inner_size=INNER_SIZE),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmBench:
    """What is measured.

    Attributes:
        data: Folder of the prompt sets.
        python: The interpreter of vLLM's environment.
        work: Folder for jobs, logs and event logs; None = a temporary one.
        concurrencies: Most requests at a time, one pass each.
        num_prompts: Per set and pass.
        num_orderings: Repetitions in other orders.
        max_tokens: Per answer.
        num_speculative_tokens: K, of every method.
        num_train, num_steps: Training of the released head.
        methods: Of ``METHODS``.
        dtype: Number format of the target.
    """

    data: Path
    python: Path
    work: Path | None = None
    concurrencies: tuple[int, ...] = (1, 4, 16)
    num_prompts: int = 20
    num_orderings: int = 3
    max_tokens: int = 96
    num_speculative_tokens: int = 4
    num_train: int = 40
    num_steps: int = 400
    methods: tuple[str, ...] = METHODS
    dtype: str = "bfloat16"


def run_vllm_bench(
    settings: Settings, bench: VllmBench, *, console: Console, json_file: Path | None
) -> dict[str, Any]:
    """Measure, print the table, and write the numbers.

    Raises:
        PromptsError: If a prompt set is missing.
        VllmBenchError: If vLLM's environment is missing, or an engine fails.
    """
    if not bench.python.is_file():
        raise VllmBenchError(f"{bench.python}: no such interpreter: run 'make vllm-venv' first")
    sets = read_prompt_sets(bench.data)
    head = _Head.trained(settings, bench, sets, console)
    passes: list[Served] = []
    with _folder(bench) as work:
        for ordering in range(bench.num_orderings):
            turn = ordering % len(bench.methods)
            for method in bench.methods[turn:] + bench.methods[:turn]:
                console.log(f"ordering {ordering + 1} of {bench.num_orderings}: {method}")
                own = _settings(settings, bench, work / f"{method}-{ordering}")
                if method == DRAFTLOOP and head is not None:
                    release_head(own, head.target, HEAD, head.tensors)
                with _learner(own, method):
                    passes += _measured(bench, own, method, ordering, sets, settings)
                _write(passes, bench, sets, json_file)
    found = _write(passes, bench, sets, json_file)
    _print(found, console)
    return found


@dataclass(frozen=True, slots=True)
class _Head:
    """The head that is released before the engines start, and the target it is for."""

    target: Target
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def trained(
        cls, settings: Settings, bench: VllmBench, sets: Sequence[PromptSet], console: Console
    ) -> _Head | None:
        if DRAFTLOOP not in bench.methods or not bench.num_steps:
            return None
        target = open_target(settings, progress=console.log)
        tensors = trained_head(
            target,
            sets,
            num_train=bench.num_train,
            num_steps=bench.num_steps,
            cache=settings.cache,
            console=console,
        )
        return cls(target, tensors)


@contextmanager
def _folder(bench: VllmBench) -> Iterator[Path]:
    if bench.work is not None:
        bench.work.mkdir(parents=True, exist_ok=True)
        yield bench.work.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="draftloop-vllm-") as folder:
        yield Path(folder)


def _settings(settings: Settings, bench: VllmBench, data: Path) -> Settings:
    """Return the settings of one engine's proposer and learner: their own event log."""
    return Settings(
        data=data,
        cache=settings.cache,
        model=settings.model,
        drafters=LOOKUPS,
        worker=WorkerSettings(
            worker_id="vllm", num_speculative_tokens=bench.num_speculative_tokens
        ),
        content=ContentSettings(consenting_streams=(STREAM,)),
        features=FeatureSettings(enabled=True),
        learner=LearnerSettings(
            draft_vocabulary_size=DRAFT_VOCABULARY_SIZE,
            batch_size=TRAINING_POSITIONS,
            publish_weights_every_events=4,
        ),
    )


@contextmanager
def _learner(settings: Settings, method: str) -> Iterator[None]:
    """Run a learner beside the engine that learns from nothing."""
    if method != LEARNING:
        yield
        return
    settings.data.mkdir(parents=True, exist_ok=True)
    with (settings.data / "learner.log").open("ab") as log:
        process = subprocess.Popen(
            ["nice", f"-n{NICENESS}", sys.executable, "-P", "-m", "pipeline.cli", "learner"],
            env=service_environment(settings),
            stdout=log,
            stderr=log,
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait(60.0)


def _measured(
    bench: VllmBench,
    own: Settings,
    method: str,
    ordering: int,
    sets: Sequence[PromptSet],
    settings: Settings,
) -> list[Served]:
    """Serve all passes of one method in one engine."""
    own.data.mkdir(parents=True, exist_ok=True)
    job, result, log = (own.data / name for name in ("job.json", "result.json", "engine.log"))
    passes = [
        {
            "concurrency": concurrency,
            "blocks": blocks(
                sets,
                first=index * bench.num_prompts,
                count=bench.num_prompts,
                ordering=ordering,
                is_mixed=concurrency == 1,
            ),
        }
        for index, concurrency in enumerate(bench.concurrencies)
        # Learning from nothing is measured where one request is served at a time.
        if method != LEARNING or concurrency == 1
    ]
    job.write_text(
        json.dumps(
            {
                "model": str(resolve_target(settings.model.path, settings.cache)),
                "engine": engine_arguments(bench, method),
                "max_tokens": bench.max_tokens,
                "stream": STREAM,
                "passes": passes,
            }
        ),
        encoding="utf-8",
    )
    with log.open("ab") as output:
        try:
            process = subprocess.run(
                [str(bench.python), "-P", "-m", RUNNER, str(job), str(result)],
                env=engine_environment(own),
                stdout=output,
                stderr=output,
                timeout=ENGINE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise VllmBenchError(f"{method}: no end after {ENGINE_SECONDS:.0f} s") from error
    if process.returncode or not result.is_file():
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        raise VllmBenchError(f"{method}: the engine failed, see {log}: {' '.join(last)[:300]}")
    found = json.loads(result.read_text(encoding="utf-8"))
    return [
        Served(
            method=method,
            ordering=ordering,
            concurrency=one["concurrency"],
            requests=one["requests"],
            counters=one["counters"],
        )
        for one in found["passes"]
    ]


def engine_arguments(bench: VllmBench, method: str) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a method."""
    num_tokens = bench.num_speculative_tokens
    method_to_speculation: Mapping[str, dict[str, Any] | None] = {
        NONE: None,
        NGRAM: {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 3},
        SUFFIX: {"method": "suffix"},
        DRAFTLOOP: {"method": "custom_class", "model": PROPOSER},
        LEARNING: {"method": "custom_class", "model": PROPOSER},
    }
    speculation = method_to_speculation[method]
    return {
        "dtype": bench.dtype,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": max(bench.concurrencies),
        "speculative_config": speculation and {**speculation, "num_speculative_tokens": num_tokens},
    }


def engine_environment(settings: Settings) -> dict[str, str]:
    """Return the environment of an engine: the proposer's settings, and vLLM in one process."""
    return service_environment(settings) | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _write(
    passes: Sequence[Served],
    bench: VllmBench,
    sets: Sequence[PromptSet],
    json_file: Path | None,
) -> dict[str, Any]:
    """Write what is known so far: an engine that fails later costs only itself."""
    names = [one.name for one in sets]
    flat = summary(passes, names, np.random.default_rng(0))
    found: dict[str, Any] = {
        key: round(value, 4) for key, value in flat.items() if math.isfinite(value)
    }
    found |= {
        "num_orderings": len({one.ordering for one in passes}),
        "num_prompts_per_set": bench.num_prompts,
        "max_tokens": bench.max_tokens,
        "num_speculative_tokens": bench.num_speculative_tokens,
        "table": _finite(table(passes, bench.methods, names)),
    }
    if json_file is not None:
        write_json(json_file, found)
    return found


def _finite(value: Any) -> Any:
    """Return JSON without NaN, which is not JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


def _print(found: Mapping[str, Any], console: Console) -> None:
    rows = [{k: v for k, v in row.items() if k != "parts"} for row in found["table"]]
    if not rows:
        return
    shown = Table(title="tokens per second")
    for name in rows[0]:
        shown.add_column(name)
    for row in rows:
        shown.add_row(*("–" if value is None else str(value) for value in row.values()))
    console.print(shown)
    for key, value in found.items():
        if f"{key}_low" in found:
            low, high = found[f"{key}_low"], found[f"{key}_high"]
            console.print(f"{key} = {value:.3f} ({low:.3f} .. {high:.3f})")
