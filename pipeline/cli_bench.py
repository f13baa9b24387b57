"""The benchmark that needs a broker, as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

NUM_EVENTS = 16
NUM_WINDOWS = 64


def add_bench_commands(bench: typer.Typer) -> None:
    """Register the commands."""
    bench.command(
        "pipeline",
        epilog="Example: [bold]draftloop bench pipeline --kafka 127.0.0.1:9092[/bold]",
    )(bench_pipeline)


def bench_pipeline(
    kafka: Annotated[str, typer.Option(help="host:port of a broker that holds nothing else.")],
    num_events: Annotated[int, typer.Option(min=10, help="Events per measurement.")] = 2000,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the numbers to this file.")
    ] = None,
) -> None:
    """Measure encoding, learning, and the way over a broker against its bare client."""
    from pipeline.bench_events import bench_event
    from pipeline.bench_pipeline import PipelineBench, run_pipeline_bench

    run_pipeline_bench(
        [bench_event(seed, num_windows=NUM_WINDOWS) for seed in range(NUM_EVENTS)],
        kafka,
        PipelineBench(num_events=num_events),
        json_file=json_file,
        console=Console(),
    )
