"""The learning benchmark: drafters that learn from real traffic against a well-trained static one.

The target answers real prompts once; learning is then replayed on the recorded answers many times
(``pipeline.bench.learning.run``), with the trainer, the gate and the selection of production. What
the streams, policies and figures are is in docs/learning.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from inference.drafters.frozen_rows import FrozenRows
from inference.drafters.hydra import HydraDrafter
from inference.drafters.hydra_training import TrainableHydra
from inference.model_files import default_cache
from inference.target import Target
from learner.examples import ExampleMemory
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.rule import Weights
from pipeline.bench.domains import Domain, read_domains
from pipeline.bench.learning.convex import ConvexGame, convex_rows, worst_share
from pipeline.bench.learning.costs import RoundSeconds, measured_costs
from pipeline.bench.learning.equality import Equality, compared
from pipeline.bench.learning.ground import (
    HEAD,
    Ground,
    GroundSize,
    asked_prompts,
    learning_ground,
    segment,
)
from pipeline.bench.learning.jobs import (
    MakeGround,
    read_result,
    record_all,
    run_all,
    static_rounds,
    stream_of,
)
from pipeline.bench.learning.keys import Runs, ensemble_by_stream, flat_keys, run_rows
from pipeline.bench.learning.plan import SEEDS, RunSpec, planned_runs
from pipeline.bench.learning.report import show, write_picture
from pipeline.bench.learning.streams import AWAY, HOME
from pipeline.bench.learning.traces import missing_batches, recorded_traces
from pipeline.bench.learning.worker import NUM_SPECULATIVE_TOKENS
from pipeline.configuration.settings import Settings
from pipeline.json_files import write_json
from pipeline.wiring import open_target

RECIPE = 3
"""Counts the versions of how runs are made; a new one makes them afresh."""

NUM_SWAPPED_STEPS = 20
"""Steps that the second head of the equality check is ahead of the static one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningBench:
    """How much is measured.

    Attributes:
        size: Of the recording and the static head.
        num_requests: Of every stream.
        seeds: Test seeds.
        has_further: Whether runs are made that the table has and the keys do not need.
        game: Of the convex drafter.
        num_compared: Requests through the real engine.
        compared_tokens: Tokens of their answers.
        num_processes: For the runs.
    """

    size: GroundSize = field(default_factory=GroundSize)
    num_requests: int = 400
    seeds: Sequence[int] = SEEDS
    has_further: bool = True
    game: ConvexGame = field(default_factory=ConvexGame)
    num_compared: int = 20
    compared_tokens: int = 24
    num_processes: int = 2


QUICK = LearningBench(
    size=GroundSize(
        num_training=128,
        num_tuning=32,
        num_home=96,
        num_away=64,
        num_elsewhere=32,
        num_steps=240,
        num_snapshots=4,
    ),
    num_requests=96,
    seeds=SEEDS[:1],
    has_further=False,
    game=ConvexGame(num_rounds=20, max_steps=200),
    compared_tokens=16,
)
"""One seed and shorter streams: every key, with wide intervals."""


def run_learning_bench(
    settings: Settings,
    data: Path,
    bench: LearningBench,
    *,
    json_file: Path | None,
    picture: Path | None,
    console: Console,
) -> dict[str, Any]:
    """Measure, show, and write the result; what an earlier run has left is not made again.

    Args:
        settings: Target and cache.
        data: Folder of the prompt sets.
        bench: How much.
        json_file: Where to write the numbers.
        picture: Where to draw acceptance along the streams.
        console: Where progress and results go.
    """
    domains, cache = read_domains(data), settings.cache
    target = _open(settings, console)
    _record(target, domains, bench, settings, console)
    ground = learning_ground(target, domains, bench.size, cache=cache, console=console)
    costs = measured_costs(target, ground.drafter(ground.static), ground.test[HOME][0])
    del target
    again = partial(_ground_again, settings, data, bench.size)
    runs = made_runs(ground, bench, costs, cache=cache, make_ground=again, console=console)
    exact = settings.model.model_copy(update={"dtype": "float32"})
    target = _open(settings.model_copy(update={"model": exact}), console)
    proof = equality(target, domains, ground, bench, cache=cache, console=console)
    result = bench_result(runs, ground, bench, proof, console=console)
    show(result, console)
    if picture is not None:
        write_picture(runs, picture)
        console.print(f"drawn to {picture}")
    if json_file is not None:
        write_json(json_file, result)
        console.print(f"written to {json_file}")
    return result


def made_runs(
    ground: Ground,
    bench: LearningBench,
    costs: RoundSeconds,
    *,
    cache: Path | None,
    make_ground: MakeGround,
    console: Console,
) -> Runs:
    """Make all runs of the plan, or read them, and return them beside the static head.

    Args:
        ground: What they stand on.
        bench: Which.
        costs: Of a round.
        cache: Folder of the cache; None for the user's own.
        make_ground: Makes the ground in another process.
        console: Where progress goes.
    """
    specs = planned_runs(bench.seeds, has_further=bench.has_further)
    folder = work_folder(ground, bench, cache)
    ready = run_all(
        specs,
        ground,
        folder,
        num_requests=bench.num_requests,
        make_ground=make_ground,
        num_processes=bench.num_processes,
    )
    for _ in track(ready, "learning runs", total=len(specs), console=console):
        pass
    return collected(specs, ground, folder, bench, costs)


def collected(
    specs: Sequence[RunSpec],
    ground: Ground,
    folder: Path,
    bench: LearningBench,
    costs: RoundSeconds,
) -> Runs:
    """Read the runs that are there, and put the static head beside them."""
    results = {
        spec: read_result(folder / spec.file_name)
        for spec in specs
        if (folder / spec.file_name).exists()
    }
    streams = {
        (spec.seed, spec.stream): stream_of(spec, ground, bench.num_requests) for spec in results
    }
    rounds = static_rounds(ground)
    static = {
        place: np.array(
            [rounds[domain][i] for domain, i in zip(one.domains, one.indices, strict=True)]
        )
        for place, one in streams.items()
    }
    return Runs(results=results, streams=streams, static=static, costs=costs)


def work_folder(ground: Ground, bench: LearningBench, cache: Path | None) -> Path:
    """Return where the runs on this ground are kept."""
    weights = hashlib.sha256()
    for name in sorted(ground.static):
        weights.update(ground.static[name].numpy().tobytes())
    facts = (RECIPE, ground.facts, bench.size, bench.num_requests, weights.hexdigest())
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return (cache or default_cache()) / "learning-runs" / digest


def bench_result(
    runs: Runs, ground: Ground, bench: LearningBench, proof: Equality, *, console: Console
) -> dict[str, Any]:
    """Return the flat keys, and everything else under ``table``."""
    with console.status("regret of the convex drafter"):
        convex = convex_rows(ground, bench.game)
    return {
        **flat_keys(runs),
        "convex_regret_share_of_bound": worst_share(convex),
        "num_seeds": len(bench.seeds),
        "num_requests": bench.num_requests,
        "table": {
            "runs": run_rows(runs),
            "convex": convex,
            "ensemble": [
                {"stream": stream, **found.keys("vs_best_fixed_step")}
                for stream, found in ensemble_by_stream(runs).items()
            ],
            "costs": asdict(runs.costs)
            | {
                "round_seconds": runs.costs.round_seconds,
                "break_even_length": runs.costs.break_even_length,
            },
            "static": {
                "validation_lengths": {str(k): v for k, v in ground.validation_lengths.items()},
                "num_training_answers": len(ground.training),
            },
            "equality": proof.row(),
        },
    }


def equality(
    target: Target,
    domains: Sequence[Domain],
    ground: Ground,
    bench: LearningBench,
    *,
    cache: Path | None,
    console: Console,
) -> Equality:
    """Serve test requests of A and B with the real engine and compare with their replay."""
    by_name = {domain.name: domain for domain in domains}
    half = bench.num_compared // 2
    prompts = [*by_name[HOME].test[:half], *by_name[AWAY].test[: bench.num_compared - half]]
    traces = recorded_traces(
        target,
        prompts,
        max_tokens=bench.compared_tokens,
        cache=cache,
        what="prompts for the comparison",
        console=console,
    )
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, ground.rows.vocabulary)
    heads = [
        HydraDrafter(HEAD, version, weights, rows)
        for version, weights in enumerate((ground.static, _moved_on(ground)))
    ]
    with console.status("the same requests through the engine"):
        return compared(target, traces, heads)


def _moved_on(ground: Ground) -> Weights:
    """Return the static head after a few steps in B."""
    memory = ExampleMemory(max_positions=10**9)
    for index, trace in enumerate(ground.tuning[AWAY]):
        memory.add(segment(index, trace))
    head = TrainableHydra(HEAD, ground.rows, inner_size=ground.inner_size)
    update = OnlineGradient(ground.static, OnlineGradientSettings())
    rng = np.random.default_rng(0)
    for _ in range(NUM_SWAPPED_STEPS):
        batch = memory.draw(64, NUM_SPECULATIVE_TOKENS, rng)
        if batch is not None:
            update.step(partial(head.loss, batch=batch))
    return update.weights


def _record(
    target: Target,
    domains: Sequence[Domain],
    bench: LearningBench,
    settings: Settings,
    console: Console,
) -> None:
    """Record what the cache lacks, in several processes."""
    size = bench.size
    batches = [
        batch
        for prompts in asked_prompts(domains, size).values()
        for batch in missing_batches(
            target, prompts, max_tokens=size.max_tokens, cache=settings.cache
        )
    ]
    if not batches:
        return
    recorded = record_all(
        batches,
        max_tokens=size.max_tokens,
        cache=settings.cache,
        open_target=partial(_target_again, settings),
        num_processes=bench.num_processes,
    )
    for _ in track(recorded, "the target answers", total=len(batches), console=console):
        pass


def _target_again(settings: Settings) -> Target:
    """Open the target in another process."""
    return _open(settings, Console(quiet=True))


def _ground_again(settings: Settings, data: Path, size: GroundSize) -> Ground:
    """Make the ground in another process, from the cache."""
    target, quiet = _target_again(settings), Console(quiet=True)
    return learning_ground(target, read_domains(data), size, cache=settings.cache, console=quiet)


def _open(settings: Settings, console: Console) -> Target:
    target = open_target(settings, progress=console.log)
    # The clock is the CPU time of a thread; processes share the cores, threads would not.
    torch.set_num_threads(1)
    return target
