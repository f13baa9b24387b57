"""Commands that serve and run: ``serve``, ``up``, ``health``, ``doctor``, ``estimate``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.options import ConfigOption, JsonOption
from pipeline.signals import stop_on_signals


def add_commands(app: typer.Typer) -> None:
    """Add the commands to the application."""
    for command, example in (
        (serve, "[bold]draftloop serve --config draftloop.toml[/bold]"),
        (up, "[bold]draftloop up --config draftloop.toml[/bold]"),
        (health, "[bold]draftloop health worker[/bold] ends with status 2 if not."),
        (doctor, "[bold]draftloop doctor[/bold] ends with status 1 if not well."),
        (estimate, "[bold]draftloop estimate --requests-per-second 20[/bold]"),
    ):
        app.command(epilog=f"Example: {example}")(command)


def serve(config: ConfigOption = None) -> None:
    """Serve the OpenAI API with a worker that reports what verification saw.

    It says on which port once it listens; docs/serving.md has a client for it.
    """
    from pipeline.configuration.settings import load_settings
    from pipeline.operations.logs import start_logging
    from pipeline.serving import run_server

    settings = load_settings(config)
    start_logging(settings.logs, "worker")
    run_server(settings, stop_on_signals(), Console(stderr=True))


def up(config: ConfigOption = None) -> None:
    """Run worker, learner and archiver as processes with one merged log, until told to stop."""
    from pipeline.configuration.settings import load_settings
    from pipeline.operations.services import services
    from pipeline.operations.up import printer, run_stack

    settings = load_settings(config)
    width = max(len(one.name) for one in services(settings))
    run_stack(settings, stop_on_signals(), printer(width, sys.stdout))


def health(
    service: Annotated[str, typer.Argument(help="As in docker-compose.yml.")],
    config: ConfigOption = None,
) -> None:
    """Ask a running service whether it does its work."""
    from pipeline.configuration.settings import load_settings
    from pipeline.operations.health import check_health

    Console().print(check_health(service, load_settings(config)))


def doctor(config: ConfigOption = None) -> None:
    """Look at versions, keys, disk, log, topics, registry, clock and model; change nothing."""
    from pipeline.configuration.settings import load_settings
    from pipeline.operations.doctor import examine

    out, is_well = Console(), True
    for finding in examine(load_settings(config)):
        is_well &= finding.is_good
        mark = "ok  " if finding.is_good else "BAD "
        out.print(mark + f"{finding.what}: {finding.text}", soft_wrap=True, markup=False)
    if not is_well:
        raise typer.Exit(1)


def estimate(
    requests_per_second: Annotated[float, typer.Option(min=0.0, help="Of all workers.")],
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Per request.")] = 500,
    output_tokens: Annotated[int, typer.Option(min=1, help="Per request.")] = 300,
    acceptance_length: Annotated[
        float, typer.Option(min=1.0, help="Tokens per verification.")
    ] = 2.0,
    content_share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of requests with content.")
    ] = 0.0,
    hidden_size: Annotated[
        int, typer.Option(min=0, help="Of the target, if features are recorded.")
    ] = 0,
    sampled: Annotated[bool, typer.Option("--sampled", help="Temperature above 0.")] = False,
    vocabulary_size: Annotated[int, typer.Option(min=2, help="Of the target.")] = 49_152,
    json_file: JsonOption = None,
    config: ConfigOption = None,
) -> None:
    """Say what a fleet would write, before capture is turned on."""
    from dataclasses import asdict

    from pipeline.configuration.settings import load_settings
    from pipeline.json_files import write_json
    from pipeline.operations import estimate as estimating

    fleet = estimating.Fleet(
        requests_per_second=requests_per_second,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        acceptance_length=acceptance_length,
        content_share=content_share,
        hidden_size=hidden_size,
        is_sampled=sampled,
        vocabulary_size=vocabulary_size,
    )
    found = asdict(estimating.estimate(load_settings(config), fleet))
    for name, value in found.items():
        shown = in_bytes(value) if "bytes" in name else f"{value:,.3g}"
        Console().print(f"{name:<24} {shown:>10}", highlight=False)
    if json_file is not None:
        write_json(json_file, found)


def in_bytes(value: float) -> str:
    """Return a number of bytes as people read it, in steps of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000.0:
            return f"{value:.3g} {unit}"
        value /= 1000.0
    return f"{value:,.4g} TB"


def add_bench(bench: typer.Typer) -> None:
    """Add the benchmark of serving."""
    example = "[bold]draftloop bench serving --json s.json[/bold]"
    bench.command("serving", epilog=f"Example: {example}")(bench_serving)


def bench_serving(
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of eight requests.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 64,
    json_file: JsonOption = None,
    config: ConfigOption = None,
) -> None:
    """Measure what HTTP costs beside decoding, and eight clients beside one."""
    from pipeline.bench.serving import ServingBench, run_serving_bench
    from pipeline.configuration.settings import load_settings

    run_serving_bench(
        load_settings(config),
        ServingBench(num_blocks=blocks, max_tokens=max_tokens),
        console=Console(),
        json_file=json_file,
    )
