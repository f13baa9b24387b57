"""The command line. Every known failure is one line that names the thing and the cure, status 2."""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from pipeline.commands.bench import add_bench_commands
from pipeline.commands.data import add_data_commands
from pipeline.commands.drafters import drafters
from pipeline.commands.options import ConfigOption, JsonOption
from pipeline.commands.serving import add_bench, add_commands
from pipeline.commands.topics import topics
from pipeline.configuration.settings import Settings, load_settings
from pipeline.signals import stop_on_signals
from schemas.errors import KnownError

app = typer.Typer(
    name="draftloop",
    help="Drafters of speculative decoding that keep learning from production traffic.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
bench = typer.Typer(help="Measure; each command prints what it saw and can write JSON.")
app.add_typer(bench, name="bench", no_args_is_help=True)
add_bench_commands(bench)
app.add_typer(topics, name="topics", no_args_is_help=True)
app.add_typer(drafters, name="drafters", no_args_is_help=True)

console = Console(stderr=True)


@app.command(
    epilog="Example: [bold]draftloop demo --dtype float32 --check[/bold] proves every output equal."
)
def demo(
    data: Annotated[
        Path, typer.Option(help="Folder for the run's log, weights and report.")
    ] = Path("draftloop-data"),
    prompts: Annotated[
        Path | None, typer.Option(help="Your own prompts: JSON lines or one a line.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 (fast) or float32 (exact).")] = "bfloat16",
    check: Annotated[
        bool, typer.Option("--check", help="Compare every output with plain decoding (slow).")
    ] = False,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 96,
    phase_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens per phase; repeat for more phases.")
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=0.0, help="Longest time of serving; 0 = no limit.")
    ] = 4.0,
    gate: Annotated[
        bool, typer.Option("--gate", help="New weights pass the gate before they serve (slower).")
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Watch drafters learn from traffic and follow a domain shift on a real model.

    Starts the real services (worker, learner, archiver) over the embedded event log, serves the
    prompts domain by domain, and writes the replay report.
    """
    from pipeline.demo.demo import DemoOptions, run_demo

    # Ended like any command, so that learner and archiver are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    run_demo(
        DemoOptions(
            data=data,
            prompts=prompts,
            dtype=dtype,
            checks_all=check,
            max_tokens=max_tokens,
            phase_tokens=tuple(phase_tokens or ()),
            minutes=0.0 if check else minutes,
            json_file=json_file,
            has_gate=gate,
        ),
        Console(),
    )


@app.command(epilog="Example: [bold]draftloop learner --config draftloop.toml[/bold]")
def learner(config: ConfigOption = None) -> None:
    """Learn selection and weights from verification events until told to stop."""
    from pipeline.learning import LEARNER, run_learner
    from pipeline.messaging.outages import open_log_patiently
    from pipeline.operations.logs import start_logging
    from pipeline.operations.services import open_page

    settings = _settings(config)
    start_logging(settings.logs, "learner")
    stop = stop_on_signals()
    with open_page(settings, LEARNER) as page:
        log = open_log_patiently(settings, stop, page.loops.loop(LEARNER))
        if log is None:
            return
        with closing(log):
            run_learner(settings, log, stop, progress=console.log, page=page)


@app.command(epilog="Example: [bold]draftloop scheduler --config draftloop.toml[/bold]")
def scheduler(config: ConfigOption = None) -> None:
    """Refresh heads, compact the log and report regret by the clock until told to stop."""
    from pipeline.operations.services import open_page
    from pipeline.schedule import run_scheduler

    settings = _settings(config)
    with open_page(settings, "scheduler") as page:
        run_scheduler(settings, stop_on_signals(), page)


@app.command(epilog="Example: [bold]draftloop archiver --config draftloop.toml[/bold]")
def archiver(config: ConfigOption = None) -> None:
    """Write verification events to the Parquet log until told to stop."""
    from pipeline.archiving import build_archiver
    from pipeline.messaging.outages import open_log_patiently
    from pipeline.operations.logs import start_logging
    from pipeline.operations.service_watch import ArchiverMetrics
    from pipeline.operations.services import open_page

    settings = _settings(config)
    start_logging(settings.logs, "archiver")
    stop = stop_on_signals()
    with open_page(settings, "archiver") as page:
        loop = page.loops.loop("archiver")
        log = open_log_patiently(settings, stop, loop)
        if log is None:
            return
        with (
            closing(log),
            build_archiver(settings, log) as service,
            page.showing(ArchiverMetrics(service)),
        ):
            service.run(stop, loop)


@app.command(
    epilog="Example: [bold]draftloop worker --prompts prompts.jsonl --stream support[/bold]"
)
def worker(
    prompts: Annotated[Path, typer.Option(help="Prompts to serve: JSON lines or one a line.")],
    stream: Annotated[
        str, typer.Option(help="Stream of all requests; default: each prompt's domain.")
    ] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    config: ConfigOption = None,
) -> None:
    """Serve a file of prompts and report what verification saw. Answers go to standard output."""
    from pipeline.batch import serve_prompts

    serve_prompts(
        _settings(config),
        prompts,
        stream=stream,
        max_tokens=max_tokens,
        temperature=temperature,
        stop=stop_on_signals(),
        console=console,
        out=Console(),
    )


@app.command(
    epilog="Example: [bold]draftloop replay draftloop-data --policy hedge --policy fixed:suffix "
    "--report report.html[/bold]"
)
def replay(
    log: Annotated[Path, typer.Argument(help="Data folder, its events folder, or one file.")],
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policy to re-run, name:key=value,...; repeat for more."),
    ] = None,
    num_speculative_tokens: Annotated[
        int | None, typer.Option(min=1, help="Levels of the re-runs, at most; default: the logged.")
    ] = None,
    drafter: Annotated[
        list[str] | None, typer.Option(help="Re-run with this drafter only; repeat for more.")
    ] = None,
    stream: Annotated[
        list[str] | None, typer.Option(help="Read this stream only; repeat for more.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the interactive page to this file.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write the plots as PNG files to this folder.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Replay logged traffic: what was played, what it cost, and what would have been best."""
    from pipeline.replaying import ReplayRequest, replay_log

    asked = ReplayRequest(
        policies=policy or (),
        num_speculative_tokens=num_speculative_tokens,
        drafter_ids=drafter or (),
        streams=stream or (),
        report=report,
        png=png,
        json_file=json_file,
    )
    replay_log(log, asked, console=Console())


@app.command(epilog="Example: [bold]draftloop record prompts.jsonl --out recorded[/bold]")
def record(
    prompts: Annotated[
        Path, typer.Argument(help="Prompts, or conversations as JSON lines with turns.")
    ],
    out: Annotated[Path, typer.Option(help="Folder of the recording; read it with replay.")],
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after an interruption.")] = False,
    json_file: JsonOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve prompts and write what verification saw of every drafter straight to a Parquet log."""
    from pipeline.record_prompts import record_prompts

    record_prompts(
        _settings(config),
        prompts,
        out,
        max_tokens=max_tokens,
        temperature=temperature,
        resume=resume,
        stop=stop_on_signals(),
        console=console,
        json_file=json_file,
    )


@bench.command("replay", epilog="Example: [bold]draftloop bench replay --json replay.json[/bold]")
def bench_replay(
    windows: Annotated[int, typer.Option(min=20_000, help="Windows of the log.")] = 10_000_000,
    policy_windows: Annotated[
        int, typer.Option(min=10_000, help="Windows that every policy re-runs.")
    ] = 500_000,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each policy.")] = 3,
    json_file: JsonOption = None,
) -> None:
    """Measure replay on a synthetic log: every policy from Parquet, and a whole report."""
    from pipeline.bench.replay import ReplayBench, run_replay_bench

    run_replay_bench(
        ReplayBench(num_windows=windows, num_policy_windows=policy_windows, num_repeats=repeats),
        json_file=json_file,
        console=Console(),
    )


@bench.command("pool", epilog="Example: [bold]draftloop bench pool --out recorded[/bold]")
def bench_pool(
    out: Annotated[Path, typer.Option(help="Folder of the recording; read it with replay.")],
    data: Annotated[Path, typer.Option(help="Folder of the prompt sets.")] = Path("../shared/data"),
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    per_domain: Annotated[int, typer.Option(min=0, help="Steady requests per domain.")] = 20,
    shifts: Annotated[int, typer.Option(min=0, help="Conversations A, B, A.")] = 18,
    twos: Annotated[int, typer.Option(min=0, help="Prompts with two tasks.")] = 12,
    documents: Annotated[int, typer.Option(min=0, help="Texts of three subjects.")] = 6,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after an interruption.")] = False,
    json_file: JsonOption = None,
    config: ConfigOption = None,
) -> None:
    """Record test prompts of seven domains with a pool of 22 drafters, trained first if need be."""
    from pipeline.bench.traffic import TrafficSize, record_bench_pool

    record_bench_pool(
        _settings(config),
        data,
        out,
        TrafficSize(
            num_per_domain=per_domain, num_shifts=shifts, num_twos=twos, num_documents=documents
        ),
        temperature=temperature,
        resume=resume,
        stop=stop_on_signals(),
        console=console,
        json_file=json_file,
    )


@bench.command(
    "selection",
    epilog="Example: [bold]draftloop bench selection --source recorded --recording DIR[/bold]",
)
def bench_selection(
    source: Annotated[str, typer.Option(help="synthetic or recorded.")] = "synthetic",
    recording: Annotated[
        Path | None, typer.Option(help="Folder that 'bench pool' has written; for recorded.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Folder of prompt sets, for starts from real ones; for synthetic."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=2, help="Seeds; intervals are over them.")] = 5,
    json_file: JsonOption = None,
) -> None:
    """Compare every selection policy on the same windows, paired by seed."""
    from pipeline.bench.selection_report import run_selection_bench

    run_selection_bench(
        source,
        recording=recording,
        prompts=prompts,
        num_seeds=seeds,
        console=Console(),
        json_file=json_file,
    )


@bench.command("engine", epilog="Example: [bold]draftloop bench engine --json engine.json[/bold]")
def bench_engine(
    prompts: Annotated[
        Path, typer.Option(help="MBPP as JSON (sanitized-mbpp.json), for training and test.")
    ] = Path("../shared/data/mbpp_sanitized.json"),
    num_test: Annotated[int, typer.Option(min=1, help="Held-out prompts.")] = 12,
    num_train: Annotated[int, typer.Option(min=1, help="Prompts that train the heads.")] = 160,
    max_tokens: Annotated[int, typer.Option(min=8, help="Tokens per answer.")] = 96,
    json_file: JsonOption = None,
    config: ConfigOption = None,
) -> None:
    """Compare speculative with plain decoding and with transformers' prompt lookup."""
    from pipeline.bench.engine import EngineBench, run_engine_bench

    run_engine_bench(
        _settings(config),
        EngineBench(prompts=prompts, num_test=num_test, num_train=num_train, max_tokens=max_tokens),
        json_file=json_file,
        console=Console(),
    )


def main() -> None:
    """Run the command line."""
    # Nothing may ask a model hub; what is not on this machine is an error, not a download.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Their bars would break up our own.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s %(name)s %(levelname)s: %(message)s"
    )
    try:
        app(prog_name="draftloop")
    except KnownError as error:
        console.print(
            f"[red]draftloop:[/red] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(2)


def _settings(config: Path | None) -> Settings:
    return load_settings(config)


add_commands(app)
add_data_commands(app)
add_bench(bench)


if __name__ == "__main__":
    main()
