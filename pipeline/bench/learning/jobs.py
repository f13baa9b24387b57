"""What a benchmark gives to several processes: the target's answers, and the runs of the plan.

Every batch of answers and every run is kept, so an interrupted benchmark goes on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from inference.pool import DrafterPool
from inference.target import Target
from pipeline.bench.learning.ground import Ground
from pipeline.bench.learning.plan import RunSpec, policy
from pipeline.bench.learning.run import RunResult, run_stream
from pipeline.bench.learning.service import ReplayedService
from pipeline.bench.learning.streams import STREAMS, Arrivals, Stream, arrivals, stream
from pipeline.bench.learning.traces import RequestTrace, recorded_traces
from pipeline.bench.learning.worker import acceptances
from pipeline.tied import tie_to_parent

MakeGround = Callable[[], Ground]
"""Makes the ground in another process; picklable."""

_ARRAYS = ("num_rounds", "num_tokens", "learning_seconds", "versions", "snapshot_rounds")
OpenTarget = Callable[[], Target]
"""Opens the target in another process; picklable."""

_ground: Ground | None = None
_target: Target | None = None


def stream_of(spec: RunSpec, ground: Ground, num_requests: int) -> Stream:
    """Return the stream of a run: all runs of one seed on one stream have the same."""
    sizes = {domain: len(traces) for domain, traces in ground.test.items()}
    rng = np.random.default_rng([spec.seed, STREAMS.index(spec.stream)])
    return stream(spec.stream, num_requests, sizes, rng)


def traces_of(served: Stream, ground: Ground) -> list[RequestTrace]:
    """Return the recorded answers of a stream, in its order."""
    places = zip(served.domains, served.indices, strict=True)
    return [ground.test[domain][index] for domain, index in places]


def order_of(spec: RunSpec, sizes: Sequence[int]) -> Arrivals:
    """Return when the feedback of a run arrives."""
    return arrivals(spec.order, sizes, np.random.default_rng([spec.seed, 99]))


def run_one(spec: RunSpec, ground: Ground, num_requests: int) -> RunResult:
    """Make one run."""
    torch.set_num_threads(1)
    served = stream_of(spec, ground, num_requests)
    traces = traces_of(served, ground)
    began = time.thread_time()
    service = ReplayedService(ground, policy(spec.policy).settings(spec.seed))
    order = order_of(spec, [len(trace.token_ids) for trace in traces])
    result = run_stream(service, served, traces, order, np.random.default_rng([spec.seed, 7]))
    result.facts["cpu_seconds"] = time.thread_time() - began
    return result


def keep_result(file: Path, result: RunResult) -> None:
    """Write a result under a temporary name and rename it into place."""
    temporary = file.with_name(f"_{os.getpid()}-{file.name}")
    arrays = {name: getattr(result, name) for name in _ARRAYS}
    np.savez(temporary, facts=np.array(json.dumps(result.facts)), **arrays)
    temporary.replace(file)


def read_result(file: Path) -> RunResult:
    """Read a result."""
    with np.load(file, allow_pickle=False) as found:
        arrays = {name: found[name] for name in _ARRAYS}
        return RunResult(**arrays, facts=json.loads(str(found["facts"])))


def record_all(
    batches: Sequence[Sequence[str]],
    *,
    max_tokens: int,
    cache: Path | None,
    open_target: OpenTarget,
    num_processes: int,
) -> Iterator[None]:
    """Let the target answer batches of prompts that the cache lacks; yield after each.

    Args:
        batches: Of ``traces.missing_batches``, at least one.
        max_tokens: Tokens per answer.
        cache: Folder of the cache; None for the user's own.
        open_target: For each process.
        num_processes: No more are started than there are batches.
    """
    # The longest prompts first: whoever is given the last batch should not keep the others waiting.
    ordered = sorted(batches, key=lambda batch: max(map(len, batch)), reverse=True)
    with ProcessPoolExecutor(
        min(num_processes, len(batches)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_recording,
        initargs=(open_target,),
    ) as executor:
        for done in as_completed(
            [executor.submit(_record, batch, max_tokens, cache) for batch in ordered]
        ):
            done.result()
            yield


def _begin_recording(open_target: OpenTarget) -> None:
    global _target
    tie_to_parent()
    _target = open_target()


def _record(batch: Sequence[str], max_tokens: int, cache: Path | None) -> None:
    assert _target is not None  # the initializer has run
    recorded_traces(
        _target, batch, max_tokens=max_tokens, cache=cache, what="", console=Console(quiet=True)
    )


def run_all(
    specs: Sequence[RunSpec],
    ground: Ground,
    folder: Path,
    *,
    num_requests: int,
    make_ground: MakeGround,
    num_processes: int,
) -> Iterator[RunSpec]:
    """Make the runs that the folder lacks; yield every one when it is there.

    Args:
        specs: In the order in which they are begun.
        ground: For this process.
        folder: Where results are kept.
        num_requests: Of every stream.
        make_ground: For other processes.
        num_processes: 1 = this one alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    missing = [spec for spec in specs if not (folder / spec.file_name).exists()]
    yield from (spec for spec in specs if spec not in missing)
    if num_processes == 1:
        for spec in missing:
            keep_result(folder / spec.file_name, run_one(spec, ground, num_requests))
            yield spec
        return
    with ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(make_ground,),
    ) as executor:
        jobs = {executor.submit(_job, spec, folder, num_requests): spec for spec in missing}
        for done in as_completed(jobs):
            done.result()
            yield jobs[done]


def _begin(make_ground: MakeGround) -> None:
    global _ground
    tie_to_parent()
    torch.set_num_threads(1)
    _ground = make_ground()


def _job(spec: RunSpec, folder: Path, num_requests: int) -> None:
    assert _ground is not None  # the initializer has run
    # Another benchmark on the same folder may have made it meanwhile.
    if not (folder / spec.file_name).exists():
        keep_result(folder / spec.file_name, run_one(spec, _ground, num_requests))


def static_rounds(ground: Ground) -> dict[str, NDArray[np.int64]]:
    """Return the verifications that the static head needs for every test answer, by domain."""
    pool = DrafterPool([ground.drafter(ground.static)])
    return {
        domain: np.array([one.num_rounds for one in acceptances(pool, traces, ground.rows)])
        for domain, traces in ground.test.items()
    }
