"""The engine benchmark: how much speculation with a trained head gains, and what the rest costs.

All ways decode the same held-out prompts on the same target in one process, one after the other
prompt by prompt, so that a slow minute of the machine slows all of them. Speeds are ratios of sums;
intervals are bootstrapped over prompts.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from inference.drafters.hydra import HydraDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.emission import Emitter
from inference.engine import EngineOptions, RequestRun
from inference.plain import plain_greedy
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.sampling import SamplingParams
from inference.target import Target
from inference.worker import Request, Worker, WorkerOptions
from learner.request_selector import RequestSelector
from pipeline.bench.heads import BenchHeads, trained_heads
from pipeline.configuration.settings import Settings
from pipeline.features import FeatureRecorder
from pipeline.json_files import write_json
from pipeline.mbpp import read_mbpp
from pipeline.messaging.boards import LogEventSender
from pipeline.messaging.event_logs import open_log
from pipeline.wiring import open_target
from schemas.events import FinishReason, PolicyPublished

NUM_SPECULATIVE_TOKENS = 4
NUM_RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineBench:
    """Which prompts, how many, how long."""

    prompts: Path
    num_test: int
    num_train: int
    max_tokens: int


class PassCounter:
    """Counts the target's forward passes, whoever makes them."""

    def __init__(self, target: Target) -> None:
        self.count = 0
        target.model.register_forward_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


@dataclass(slots=True)
class Way:
    """Measurements of one way to decode, one element per prompt."""

    name: str
    num_tokens: list[int] = field(default_factory=list)
    wall_seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    num_passes: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass, the prompt's own left out."""
        first_tokens = len(self.num_tokens)
        return (sum(self.num_tokens) - first_tokens) / max(self.num_passes - first_tokens, 1)

    def measure(self, passes: PassCounter, decode: Callable[[], Sequence[int]]) -> None:
        """Decode one prompt and keep what it took."""
        before = passes.count
        wall, cpu = time.perf_counter(), time.thread_time()
        tokens = decode()
        self.cpu_seconds.append(time.thread_time() - cpu)
        self.wall_seconds.append(time.perf_counter() - wall)
        self.num_passes += passes.count - before
        self.num_tokens.append(len(tokens))
        self.outputs.append(tuple(tokens))


@dataclass(slots=True)
class Shares:
    """Seconds of the worker's rounds, and of the parts of interest."""

    round_seconds: float = 0.0
    score_seconds: float = 0.0
    emit_seconds: float = 0.0
    num_emitted_tokens: int = 0
    num_rounds: int = 0


def run_engine_bench(
    settings: Settings, bench: EngineBench, *, json_file: Path | None, console: Console
) -> None:
    """Train or load the heads, decode all prompts in every way, and show the ratios."""
    prompts = read_mbpp(bench.prompts)
    target = open_target(settings, progress=console.log)
    heads = trained_heads(
        target,
        prompts[: bench.num_train],
        cache=settings.cache,
        max_tokens=bench.max_tokens,
        console=console,
    )
    ways, shares = _measure(target, heads, prompts[-bench.num_test :], bench, console)
    result = _result(ways, shares)
    _show(result, console)
    if json_file is not None:
        write_json(json_file, result)


def _measure(
    target: Target, heads: BenchHeads, prompts: Sequence[str], bench: EngineBench, console: Console
) -> tuple[dict[str, Way], Shares]:
    params = SamplingParams(max_tokens=bench.max_tokens)
    best = heads.drafters[-1]
    passes, shares = PassCounter(target), Shares()
    ways = {name: Way(name) for name in ("plain", "hf_prompt_lookup", "head", "worker")}
    plain_greedy(target, target.encode(prompts[0]), params)  # warm caches belong to nobody
    with _worker(target, heads) as worker:
        for index, prompt in enumerate(track(prompts, "decoding in four ways", console=console)):
            ids = target.encode(prompt)
            request = Request(
                request_id=f"bench-{index}",
                stream="bench",
                prompt_token_ids=ids,
                params=params,
                has_consent=True,
            )
            decoders: list[tuple[str, Callable[[], Sequence[int]]]] = [
                ("plain", partial(_plain, target, ids, params)),
                ("hf_prompt_lookup", partial(_hf_prompt_lookup, target, ids, params)),
                ("head", partial(_with_one_head, target, best, ids, params)),
                ("worker", partial(_with_worker, worker, request, shares)),
            ]
            # Each way is the first as often as the others, whatever the machine is up to.
            for turn in range(len(decoders)):
                name, decode = decoders[(turn + index) % len(decoders)]
                ways[name].measure(passes, decode)
        shares.emit_seconds = worker.emission_seconds
    return ways, shares


def _plain(target: Target, ids: list[int], params: SamplingParams) -> Sequence[int]:
    return plain_greedy(target, ids, params).token_ids


def _hf_prompt_lookup(target: Target, ids: list[int], params: SamplingParams) -> list[int]:
    output = target.model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        max_new_tokens=params.max_tokens,
        do_sample=False,
        prompt_lookup_num_tokens=NUM_SPECULATIVE_TOKENS,
        pad_token_id=0,
    )
    return list(output[0, len(ids) :].tolist())


def _with_one_head(
    target: Target, head: HydraDrafter, ids: list[int], params: SamplingParams
) -> list[int]:
    """Speculate with one head and nothing else: no scoring, no events."""
    run = RequestRun(
        target,
        DrafterPool([head]),
        ids,
        params,
        EngineOptions(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, score_block=0),
        RequestSelector.fresh("fixed:0", 1, NUM_SPECULATIVE_TOKENS),
        stream="bench",
        seed=np.random.SeedSequence(SEED),
    )
    while run.finish_reason is FinishReason.UNFINISHED:
        run.step()
    return run.output_token_ids


def _with_worker(worker: Worker, request: Request, shares: Shares) -> Sequence[int]:
    """Serve as in production: the whole pool, selection, scoring of all, events with content."""
    completion = worker.serve(request)
    for verified in completion.rounds[1:]:  # the first reads the prompt
        shares.num_rounds += 1
        shares.num_emitted_tokens += verified.num_emitted_tokens
        shares.score_seconds += verified.score_seconds
        shares.round_seconds += verified.seconds
    return completion.token_ids


@contextmanager
def _worker(target: Target, heads: BenchHeads) -> Iterator[Worker]:
    """Build a worker as in production, with a real event log and recorded features."""
    drafters: list[Drafter] = [
        PromptLookupDrafter(),
        SuffixDrafter(share_history=False),
        *heads.drafters,
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data=Path(folder))
        features = FeatureRecorder(folder, worker_id="bench", worker_epoch=0, max_bytes=2**30)
        emitter = Emitter(
            LogEventSender(lambda: open_log(settings), source="bench"),
            capacity=1000,
            prepare=features.prepare,
        )
        yield Worker(
            target,
            DrafterPool(drafters),
            WorkerOptions(
                worker_id="bench",
                worker_epoch=0,
                engine=EngineOptions(num_speculative_tokens=NUM_SPECULATIVE_TOKENS),
            ),
            sink=emitter,
            inbox=_EmptyInbox(),
            recorder=features,
        )
        emitter.close(timeout_seconds=10.0)


class _EmptyInbox:
    """Nothing ever arrives."""

    def take_policies(self) -> Sequence[PolicyPublished]:
        """Return nothing."""
        return ()

    def take_drafters(self) -> Sequence[Drafter]:
        """Return nothing."""
        return ()


def _result(ways: dict[str, Way], shares: Shares) -> dict[str, Any]:
    plain, rng = ways["plain"], np.random.default_rng(SEED)
    result: dict[str, Any] = {}
    for key, way, against in (
        ("speedup_vs_plain", ways["head"], plain),
        ("speedup_vs_hf_prompt_lookup", ways["head"], ways["hf_prompt_lookup"]),
        ("worker_speedup_vs_plain", ways["worker"], plain),
        ("worker_speedup_vs_hf_prompt_lookup", ways["worker"], ways["hf_prompt_lookup"]),
    ):
        for clock in ("wall", "cpu"):
            name = key if clock == "wall" else f"{key}_cpu"
            value, low, high = _speedup(way, against, clock, rng)
            result |= {name: value, f"{name}_low": low, f"{name}_high": high}
    result |= {
        "mean_acceptance_length": ways["head"].mean_acceptance_length,
        "worker_mean_acceptance_length": ways["worker"].mean_acceptance_length,
        "scoring_share": shares.score_seconds / shares.round_seconds,
        "emission_share": shares.emit_seconds / shares.round_seconds,
        "num_prompts": len(plain.num_tokens),
        "num_tokens": sum(plain.num_tokens),
        "ways": {name: _way_result(way, plain) for name, way in ways.items()},
    }
    return result


def _way_result(way: Way, plain: Way) -> dict[str, Any]:
    tokens = sum(way.num_tokens)
    equal = sum(a == b for a, b in zip(way.outputs, plain.outputs, strict=True))
    return {
        "tokens_per_second": tokens / sum(way.wall_seconds),
        "tokens_per_cpu_second": tokens / sum(way.cpu_seconds),
        "mean_acceptance_length": way.mean_acceptance_length,
        "num_outputs_equal_to_plain": equal,
    }


def _speedup(
    way: Way, against: Way, clock: str, rng: np.random.Generator
) -> tuple[float, float, float]:
    """Return the ratio of tokens per second and its 95 % interval over prompts."""

    def columns(one: Way) -> NDArray[np.float64]:
        seconds = one.wall_seconds if clock == "wall" else one.cpu_seconds
        return np.array([one.num_tokens, seconds], dtype=np.float64)

    ours, theirs = columns(way), columns(against)
    drawn = rng.integers(0, ours.shape[1], (NUM_RESAMPLES, ours.shape[1]))
    ratios = _ratio(ours[:, drawn].sum(-1), theirs[:, drawn].sum(-1))
    low, high = np.quantile(ratios, (0.025, 0.975))
    return float(_ratio(ours.sum(-1), theirs.sum(-1))), float(low), float(high)


def _ratio(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray((ours[0] / ours[1]) / (theirs[0] / theirs[1]))


def _show(result: dict[str, Any], console: Console) -> None:
    table = Table(title="Ways to decode", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("way")
    for name in ("tokens/s", "tokens/CPU s", "MAT", "outputs as plain"):
        table.add_column(name, justify="right")
    for name, way in result["ways"].items():
        length = way["mean_acceptance_length"]
        table.add_row(
            name,
            f"{way['tokens_per_second']:.1f}",
            f"{way['tokens_per_cpu_second']:.1f}",
            "–" if length is None else f"{length:.2f}",
            f"{way['num_outputs_equal_to_plain']} of {result['num_prompts']}",
        )
    console.print(table)
    for key in ("speedup_vs_plain", "speedup_vs_hf_prompt_lookup", "worker_speedup_vs_plain"):
        interval = f"[{result[f'{key}_low']:.2f}, {result[f'{key}_high']:.2f}]"
        console.print(f"{key}: {result[key]:.2f} {interval}, CPU {result[f'{key}_cpu']:.2f}")
    console.print(f"scoring_share: {result['scoring_share']:.1%} of a round, 6 drafters, 4 heads")
    console.print(f"emission_share: {result['emission_share']:.2%} of a round")
