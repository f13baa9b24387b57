"""What serving over HTTP costs beside decoding, and what taking turns costs beside one at a time.

``overhead_share`` is the time of a request that is not decoding (parse, queue, hand over, write),
over its decoding time, alone on the server. ``tokens_per_second_ratio`` is the throughput of eight
clients at once over that of one client, whose requests follow one another: the same requests, in
the same order, in alternating blocks, so that a noisy machine disturbs both alike.
"""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from rich.console import Console
from rich.table import Table

from pipeline.json_files import write_json
from pipeline.prompts import read_prompts
from pipeline.server_settings import ServerSettings
from pipeline.serving import Served, served
from pipeline.settings import Settings
from pipeline.wiring import open_target

NUM_CLIENTS = 8
START_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingBench:
    """What is measured: blocks of requests, each served by one client and by eight."""

    num_blocks: int = 5
    max_tokens: int = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    """One answered request: seconds as the client saw it, and its tokens."""

    seconds: float
    first_token_seconds: float
    num_tokens: int


def run_serving_bench(
    settings: Settings, bench: ServingBench, *, console: Console, json_file: Path | None
) -> None:
    """Measure, show, and write the numbers."""
    settings = settings.model_copy(update={"server": ServerSettings(port=0)})
    prompts = [prompt.text for prompt in read_prompts(None)][: NUM_CLIENTS * bench.num_blocks]
    target = open_target(settings)
    with served(settings, target) as ready, _listening(ready) as port:
        model = ready.options.model_name
        bodies = [
            {"model": model, "prompt": one, "max_tokens": bench.max_tokens, "temperature": 0}
            for one in prompts
        ]
        _play(port, bodies[:NUM_CLIENTS], NUM_CLIENTS)
        result = _measured(port, bodies, bench, ready)
    table = Table("number", "value")
    for name, value in result.items():
        table.add_row(name, f"{value:.4f}" if isinstance(value, float) else str(value))
    console.print(table)
    if json_file is not None:
        write_json(json_file, result)


def _measured(
    port: int, bodies: Sequence[dict[str, Any]], bench: ServingBench, ready: Served
) -> dict[str, Any]:
    overheads, ratios, fairness = [], [], []
    for number in range(bench.num_blocks):
        block = bodies[number * NUM_CLIENTS : (number + 1) * NUM_CLIENTS]
        if len(block) < NUM_CLIENTS:
            break
        orders = (1, NUM_CLIENTS) if number % 2 else (NUM_CLIENTS, 1)
        clients_to_rate: dict[int, float] = {}
        for num_clients in orders:
            decoding = _decoding_seconds(ready)
            began = time.perf_counter()
            timed = _play(port, block, num_clients)
            seconds = time.perf_counter() - began
            clients_to_rate[num_clients] = sum(one.num_tokens for one in timed) / seconds
            decoding = _decoding_seconds(ready) - decoding
            if num_clients == 1:
                overheads.append(sum(one.seconds for one in timed) / decoding - 1.0)
                alone = statistics.mean(one.first_token_seconds for one in timed)
            else:
                last = max(one.first_token_seconds for one in timed)
        fairness.append(last / (NUM_CLIENTS * alone))
        ratios.append(clients_to_rate[NUM_CLIENTS] / clients_to_rate[1])
    return {
        "overhead_share": statistics.median(overheads),
        "overhead_share_per_block": overheads,
        "tokens_per_second_ratio": statistics.median(ratios),
        "tokens_per_second_ratio_per_block": ratios,
        "last_first_token_over_fair_share": statistics.median(fairness),
        "num_blocks": len(ratios),
    }


def _decoding_seconds(ready: Served) -> float:
    """Return the seconds of all rounds so far, as their events say."""
    while ready.scheduler.num_running:  # the last event is written after the last chunk
        time.sleep(0.001)
    return ready.metrics.phase_seconds


def _play(port: int, bodies: Sequence[dict[str, Any]], num_clients: int) -> list[_Timed]:
    with ThreadPoolExecutor(num_clients) as clients:
        return list(clients.map(lambda body: _ask(port, body), bodies))


def _ask(port: int, body: dict[str, Any]) -> _Timed:
    """Stream one answer and time it."""
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    began = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(asked), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    first, num_tokens = 0.0, 0
    for line in answer:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - began
            usage = json.loads(line[6:]).get("usage")
            num_tokens = usage["completion_tokens"] if usage else num_tokens
    seconds = time.perf_counter() - began
    connection.close()
    return _Timed(seconds=seconds, first_token_seconds=first, num_tokens=num_tokens)


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
