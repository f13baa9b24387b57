"""The vLLM benchmark: an unmodified vLLM with its own methods and with Draftloop, side by side.

Every engine is a process of vLLM's own environment (``pipeline.bench.vllm.engines``), one per
method and ordering; those of an ordering serve in turns. All get the same prompts in the same order
and the same K. Two Draftloops are measured: one with a head released before (trained on other
prompts of the same sets, by the target's own answers), and one whose head learns from nothing
during the run, with the learner on the same cores.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from inference.model_files import resolve_target
from inference.target import Target
from pipeline.bench.vllm.engines import Engine
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
    equal_share,
    summary,
    table,
)
from pipeline.configuration.gate_settings import GateSection
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import (
    ContentSettings,
    FeatureSettings,
    LearnerSettings,
    Settings,
    WorkerSettings,
)
from pipeline.json_files import write_json
from pipeline.wiring import open_target

STREAM = "bench"
HEAD = "head"
METHODS = (NONE, NGRAM, SUFFIX, DRAFTLOOP, LEARNING)
PROPOSER = "inference.vllm_plugin.DraftloopProposer"

TRAINING_POSITIONS, TRAINING_LEVELS, EVENTS_PER_RELEASE = 192, 2, 8
"""Per weight update, of which there is one per event, and events between two releases.

They bound the learner's share of the cores. Two levels of more positions teach as much as four of
fewer, for two thirds of the time. With less priority than the engine, whose threads
spin, it learns late: in 22 s of serving one version at niceness 10 and two at 0, at equal speed.
"""

LEARNING_INNER_SIZE = 256
"""Of the head that learns: it has too few examples to fill a wider one, which costs more."""

LOOKUPS = (
    DrafterSettings(drafter_id="none", kind="none"),
    DrafterSettings(drafter_id="prompt-lookup", kind="prompt_lookup"),
    DrafterSettings(drafter_id="suffix", kind="suffix"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class VllmBench:
    """What is measured.

    Attributes:
        data: Folder of the prompt sets.
        python: The interpreter of vLLM's environment.
        work: Folder for jobs, logs and event logs; None = a temporary one. Orderings that have
            ended there are not run again, so another version of the proposer wants another folder.
        concurrencies: Most requests at a time, one pass each.
        num_prompts: Per set and pass.
        num_orderings: Repetitions in other orders.
        max_tokens: Per answer.
        num_speculative_tokens: K, of every method.
        num_train, num_steps: Training of the released head.
        methods: Of ``METHODS``.
        dtype: Number format of the target.
        exact_tokens: Per answer where the outputs of float32 engines are compared; 0 = not at all.
    """

    data: Path
    python: Path
    work: Path | None = None
    concurrencies: tuple[int, ...] = (1, 4, 16)
    num_prompts: int = 20
    num_orderings: int = 3
    max_tokens: int = 64
    num_speculative_tokens: int = 4
    num_train: int = 160
    num_steps: int = 1200
    methods: tuple[str, ...] = METHODS
    dtype: str = "bfloat16"
    exact_tokens: int = 32


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
    with _folder(bench) as work, Progress(console=console, transient=True) as progress:
        for ordering in range(bench.num_orderings):
            place = work / f"ordering-{ordering}"
            passes += _served_side_by_side(
                bench, settings, place, bench.methods, ordering, sets, head, progress
            )
            _write(passes, bench, sets, json_file, {})
        exact = _equal_in_float32(bench, sets, settings, head, work, progress)
    found = _write(passes, bench, sets, json_file, exact)
    print_found(found, console)
    return found


def _equal_in_float32(
    bench: VllmBench,
    sets: Sequence[PromptSet],
    settings: Settings,
    head: _Head | None,
    work: Path,
    progress: Progress,
) -> dict[str, float]:
    """Return the share of the prompts of the first pass that float32 engines answer alike."""
    compared = (NONE, DRAFTLOOP)
    if not bench.exact_tokens or not set(compared) <= set(bench.methods):
        return {}
    exact = replace(
        bench,
        dtype="float32",
        max_tokens=bench.exact_tokens,
        concurrencies=bench.concurrencies[:1],
    )
    passes = _served_side_by_side(
        exact, settings, work / "float32", compared, 0, sets, head, progress
    )
    return {"float32_equal_share": equal_share(passes, DRAFTLOOP)}


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


def _settings(settings: Settings, bench: VllmBench, data: Path, method: str) -> Settings:
    """Return the settings of one engine's proposer and learner: their own event log.

    Only what a learner is there for is recorded.
    """
    learns = method == LEARNING
    inner_size = LEARNING_INNER_SIZE if learns else INNER_SIZE
    head = DrafterSettings(drafter_id=HEAD, kind="hydra", inner_size=inner_size)
    return Settings(
        data=data,
        cache=settings.cache,
        model=settings.model,
        drafters=(*LOOKUPS, head),
        worker=WorkerSettings(
            worker_id="vllm", num_speculative_tokens=bench.num_speculative_tokens
        ),
        content=ContentSettings(consenting_streams=(STREAM,) if learns else ()),
        features=FeatureSettings(enabled=learns),
        learner=LearnerSettings(
            draft_vocabulary_size=DRAFT_VOCABULARY_SIZE,
            batch_size=TRAINING_POSITIONS,
            training_levels=TRAINING_LEVELS,
            steps_per_event=1,
            publish_weights_every_events=EVENTS_PER_RELEASE,
        ),
        # A head that starts from nothing is asked only where it earns more than what is there.
        gate=GateSection(enabled=False),
    )


def _served_side_by_side(
    bench: VllmBench,
    settings: Settings,
    work: Path,
    methods: Sequence[str],
    ordering: int,
    sets: Sequence[PromptSet],
    head: _Head | None,
    progress: Progress,
) -> list[Served]:
    """Serve one ordering with an engine per method, or return what was served before.

    The engines take turns within every block, and who begins changes with it.
    """
    jobs = {method: _job(bench, settings, method, ordering, sets) for method in methods}
    done = work / "done.json"
    found = _found_before(done, jobs)
    if found is None:
        # What interrupted engines have left in their event logs is not these ones'.
        shutil.rmtree(work, ignore_errors=True)
        with ExitStack() as stack:
            engines = {}
            for method in methods:
                own = _settings(settings, bench, work / method, method)
                if method == DRAFTLOOP and head is not None:
                    release_head(own, head.target, HEAD, head.tensors)
                job, has_learner = jobs[method], method == LEARNING
                engine = Engine(method, bench.python, own, job, has_learner=has_learner)
                engines[method] = stack.enter_context(closing(engine))
                engine.await_start()
            _take_turns(engines, jobs, ordering, progress)
            found = {method: engine.found() for method, engine in engines.items()}
        write_json(done, {"jobs": jobs, "found": found})
    return [
        Served(
            method=method,
            ordering=ordering,
            concurrency=one["concurrency"],
            requests=one["requests"],
            counters=one["counters"],
        )
        for method in methods
        for one in found[method]["passes"]
    ]


def _take_turns(
    engines: Mapping[str, Engine],
    jobs: Mapping[str, Mapping[str, Any]],
    ordering: int,
    progress: Progress,
) -> None:
    method_to_left = {
        method: sum(len(one["blocks"]) for one in job["passes"]) for method, job in jobs.items()
    }
    blocks_served = progress.add_task(
        f"ordering {ordering + 1}", total=sum(method_to_left.values())
    )
    first = ordering
    while at_work := [method for method, left in method_to_left.items() if left]:
        turn = first % len(at_work)
        at_work = at_work[turn:] + at_work[:turn]
        while at_work:
            for method in tuple(at_work):
                if engines[method].take_turn():
                    at_work.remove(method)
                    method_to_left[method] -= 1
                    progress.advance(blocks_served)
        first += 1


def _job(
    bench: VllmBench, settings: Settings, method: str, ordering: int, sets: Sequence[PromptSet]
) -> dict[str, Any]:
    return {
        "model": str(resolve_target(settings.model.path, settings.cache)),
        "engine": engine_arguments(bench, method),
        "max_tokens": bench.max_tokens,
        "stream": STREAM,
        "passes": _passes(bench, method, ordering, sets),
        # Not the engine's to know: with another head there are other answers to be found.
        "head": [bench.num_train, bench.num_steps],
    }


def _found_before(done: Path, jobs: Mapping[str, Any]) -> Any | None:
    """Return what engines have found for the same jobs in a folder that was kept; else None."""
    if not done.is_file():
        return None
    kept = json.loads(done.read_text(encoding="utf-8"))
    return kept["found"] if kept["jobs"] == jobs else None


def _passes(
    bench: VllmBench, method: str, ordering: int, sets: Sequence[PromptSet]
) -> list[dict[str, Any]]:
    """Return what one engine serves: a pass per concurrency, each of prompts of its own."""
    return [
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


def _write(
    passes: Sequence[Served],
    bench: VllmBench,
    sets: Sequence[PromptSet],
    json_file: Path | None,
    exact: Mapping[str, float],
) -> dict[str, Any]:
    """Write what is known so far: an engine that fails later costs only itself."""
    names = [one.name for one in sets]
    flat = summary(passes, names, np.random.default_rng(0)) | dict(exact)
    for method in (DRAFTLOOP, NGRAM):
        flat[f"equal_share_{method}"] = equal_share(passes, method)
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


def print_found(found: Mapping[str, Any], console: Console) -> None:
    """Print a table per concurrency, a column per method, and the ratios with their intervals."""
    rows = found["table"]
    for concurrency in dict.fromkeys(row["concurrency"] for row in rows):
        here = [row for row in rows if row["concurrency"] == concurrency]
        shown = Table(title=f"tokens per second, {concurrency} at a time")
        shown.add_column("prompts")
        for row in here:
            shown.add_column(str(row["method"]), justify="right", overflow="fold")
        for name in here[0]:
            if name not in ("concurrency", "method", "parts"):
                values = ("–" if row[name] is None else str(row[name]) for row in here)
                shown.add_row(name, *values)
        console.print(shown)
    for key, value in found.items():
        if f"{key}_low" in found:
            low, high = found[f"{key}_low"], found[f"{key}_high"]
            console.print(f"{key} = {value:.3f} ({low:.3f} .. {high:.3f})")
        elif "equal_share" in key:
            console.print(f"{key} = {value:.3f}")
