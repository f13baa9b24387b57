"""What serving over HTTP costs beside decoding, and what taking turns costs beside one at a time.

``overhead_share`` is the time of a request that is not spent in its rounds (parse, queue, hand
over, select, record, write), over the time of its rounds, alone on the server.
``tokens_per_second_ratio`` is the throughput of eight clients at once over that of one client,
whose requests follow one another. Both are played for the same requests, one after the other and in
alternating order, so that a noisy machine disturbs both alike; every request is a stream of its
own, so that what selection and drafters learn from one request helps none of the others, which
would favour whoever comes later. The clients are a process of their own.

Wall times of a machine that does other things as well say little; ``overhead_cpu_share`` is the
processor time of all other threads of the server over that of the thread that decodes.
"""

from __future__ import annotations

import itertools
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from pipeline.bench.client import Play, play
from pipeline.configuration.server_settings import ServerSettings
from pipeline.configuration.settings import Settings
from pipeline.json_files import write_json
from pipeline.prompts import read_prompts
from pipeline.serving import Served, served
from pipeline.wiring import open_target

NUM_CLIENTS = 8
START_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingBench:
    """What is measured: blocks of requests, each played by one client and by eight."""

    num_blocks: int = 6
    max_tokens: int = 48


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """What one block of requests gave; each number is one of the results."""

    overhead_share: float
    overhead_cpu_share: float
    tokens_per_second_ratio: float
    last_first_token_over_fair_share: float

    @property
    def in_words(self) -> str:
        """The two numbers that are asked for, for the progress line."""
        return (
            f"overhead {self.overhead_share:.2%} of decoding, "
            f"{NUM_CLIENTS} at once {self.tokens_per_second_ratio:.3f} of one at a time"
        )


def run_serving_bench(
    settings: Settings, bench: ServingBench, *, console: Console, json_file: Path | None
) -> None:
    """Measure, show, and write the numbers."""
    settings = settings.model_copy(update={"server": ServerSettings(port=0)})
    prompts = itertools.cycle([prompt.text for prompt in read_prompts(None)])
    # Spawned: a fork would take the server's threads half with it.
    spawning = multiprocessing.get_context("spawn")
    target = open_target(settings)
    with (
        served(settings, target) as ready,
        _listening(ready) as port,
        ProcessPoolExecutor(1, mp_context=spawning) as process,
    ):

        def clients(bodies: Sequence[Mapping[str, Any]], num_clients: int) -> Play:
            return process.submit(play, port, bodies, num_clients).result()

        bodies = _requests(ready, bench, prompts)
        clients(bodies("warm-up"), NUM_CLIENTS)
        blocks = []
        for number in range(bench.num_blocks):
            bodies = _requests(ready, bench, prompts)
            blocks.append(_block(ready, bodies, clients, is_one_first=bool(number % 2)))
            console.print(f"block {number + 1} of {bench.num_blocks}: {blocks[-1].in_words}")
    result = summary(blocks)
    _show(result, console)
    if json_file is not None:
        write_json(json_file, result)


def _requests(
    ready: Served, bench: ServingBench, prompts: Iterator[str]
) -> Callable[[str], list[dict[str, Any]]]:
    """Return the next block of requests, as a function of what their streams are called."""
    chosen = list(itertools.islice(prompts, NUM_CLIENTS))
    return lambda stream: [
        {
            "model": f"{ready.options.model_name}:{stream}-{place}",
            "prompt": prompt,
            "max_tokens": bench.max_tokens,
            "min_tokens": bench.max_tokens,
            "temperature": 0,
        }
        for place, prompt in enumerate(chosen)
    ]


def _block(
    ready: Served,
    bodies: Callable[[str], list[dict[str, Any]]],
    clients: Callable[[Sequence[Mapping[str, Any]], int], Play],
    *,
    is_one_first: bool,
) -> Block:
    clients_to_play: dict[int, Play] = {}
    overhead, cpu_overhead = 0.0, 0.0
    for num_clients in (1, NUM_CLIENTS) if is_one_first else (NUM_CLIENTS, 1):
        before = _Clocks.of(ready)
        found = clients(bodies(f"bench-{time.monotonic_ns()}"), num_clients)
        spent = _Clocks.of(ready).since(before)
        clients_to_play[num_clients] = found
        if num_clients == 1:
            seconds = sum(one.seconds for one in found.answers)
            overhead = seconds / spent.round_seconds - 1.0
            cpu_overhead = spent.process_seconds / spent.decoding_thread_seconds - 1.0
    one, eight = clients_to_play[1], clients_to_play[NUM_CLIENTS]
    alone = sum(answer.first_token_seconds for answer in one.answers) / NUM_CLIENTS
    last = max(answer.first_token_seconds for answer in eight.answers)
    return Block(
        overhead_share=overhead,
        overhead_cpu_share=cpu_overhead,
        tokens_per_second_ratio=eight.tokens_per_second / one.tokens_per_second,
        last_first_token_over_fair_share=last / (NUM_CLIENTS * alone),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Clocks:
    """Wall seconds of all rounds, and processor seconds of the process and its decoding thread."""

    round_seconds: float
    process_seconds: float
    decoding_thread_seconds: float

    @classmethod
    def of(cls, ready: Served) -> _Clocks:
        """Read the clocks once nothing is at work: the last event follows the last chunk."""
        while ready.scheduler.num_running:
            time.sleep(0.001)
        (thread,) = [one for one in threading.enumerate() if one.name == "scheduler"]
        assert thread.ident is not None
        return cls(
            round_seconds=ready.metrics.phase_seconds,
            process_seconds=time.process_time(),
            decoding_thread_seconds=time.clock_gettime(time.pthread_getcpuclockid(thread.ident)),
        )

    def since(self, before: _Clocks) -> _Clocks:
        """Return what has passed."""
        return _Clocks(
            round_seconds=self.round_seconds - before.round_seconds,
            process_seconds=self.process_seconds - before.process_seconds,
            decoding_thread_seconds=self.decoding_thread_seconds - before.decoding_thread_seconds,
        )


def summary(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the mean of every number over the blocks, with Student intervals of 95 %."""
    result: dict[str, Any] = {}
    for name in Block.__dataclass_fields__:
        values = np.array([getattr(block, name) for block in blocks])
        half = np.inf
        if len(values) > 1:
            error = values.std(ddof=1) / np.sqrt(len(values))
            half = float(student.ppf(0.975, len(values) - 1) * error)
        mean = float(values.mean())
        result |= {name: mean, f"{name}_low": mean - half, f"{name}_high": mean + half}
        result[f"{name}_per_block"] = values.tolist()
    return result | {"num_blocks": len(blocks)}


def _show(result: Mapping[str, Any], console: Console) -> None:
    table = Table("number", "mean", "low", "high")
    for name in Block.__dataclass_fields__:
        ends = [f"{result[name + end]:.4f}" for end in ("", "_low", "_high")]
        table.add_row(name, *ends)
    console.print(table)


@contextmanager
def _listening(ready: Served) -> Iterator[int]:
    """Listen on a free port for the length of the block."""
    config = uvicorn.Config(ready.app, port=0, log_config=None, access_log=False, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield int(server.servers[0].sockets[0].getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
