"""More benchmarks: the pipeline on a broker, vLLM in its own environment, and learning."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich.console import Console

from pipeline.commands.options import ConfigOption, EmptyKafkaOption, JsonOption

NUM_EVENTS = 16
NUM_WINDOWS = 64


def add_bench_commands(bench: typer.Typer) -> None:
    """Register the commands."""
    bench.command(
        "pipeline",
        epilog="Example: [bold]draftloop bench pipeline --json pipeline.json[/bold]",
    )(bench_pipeline)
    bench.command(
        "soak",
        epilog="Example: [bold]draftloop bench soak --json soak.json[/bold]",
    )(bench_soak)
    bench.command(
        "vllm",
        epilog="Example: [bold]draftloop bench vllm --quick --json vllm.json[/bold]",
    )(bench_vllm)
    bench.command(
        "learning",
        epilog="Example: [bold]draftloop bench learning --quick --json learning.json[/bold]",
    )(bench_learning)
    bench.command("scaling", epilog="Example: [bold]draftloop bench scaling --json s.json[/bold]")(
        bench_scaling
    )
    bench.command("outage", epilog="Example: [bold]draftloop bench outage --json o.json[/bold]")(
        bench_outage
    )


def bench_pipeline(
    kafka: Annotated[
        str,
        typer.Option(
            help="host:port of a broker that holds nothing else; without it one is started here, "
            "if noida-db is installed."
        ),
    ] = "",
    num_events: Annotated[int, typer.Option(min=100, help="Events per measurement.")] = 4000,
    repeats: Annotated[int, typer.Option(min=1, help="Passages over the broker.")] = 3,
    json_file: JsonOption = None,
) -> None:
    """Measure encoding, learning, and the way over a broker against its bare client."""
    from pipeline.bench.events import bench_event
    from pipeline.bench.pipeline import PipelineBench, run_pipeline_bench
    from pipeline.local_broker import local_broker

    events = [bench_event(seed, num_windows=NUM_WINDOWS) for seed in range(NUM_EVENTS)]
    bench = PipelineBench(num_events=num_events, num_repeats=repeats)
    with _missing_broker(), ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        servers = kafka or stack.enter_context(local_broker(folder))
        run_pipeline_bench(
            events,
            servers,
            bench,
            json_file=json_file,
            console=Console(),
            may_delete=not kafka,
        )


def bench_soak(
    kafka: Annotated[
        str,
        typer.Option(
            help="host:port of a broker that holds nothing else; default: that of the settings, "
            "else one that is started here, if noida-db is installed."
        ),
    ] = "",
    windows: Annotated[int, typer.Option(min=10_000, help="Windows to send.")] = 2_000_000,
    json_file: JsonOption = None,
    config: Annotated[
        Path | None,
        typer.Option("--config", help="Settings file, for a broker with TLS or a password."),
    ] = None,
) -> None:
    """Send windows through worker stub, broker, learner and archiver, and hold them to the plan.

    Each is a process. Memory may grow by 10 % after the first quarter, every event must be learned
    and stored once, and topic and files be as large as estimated; otherwise the status is 2.
    """
    from pipeline.bench.soak import run_soak
    from pipeline.configuration.settings import load_settings
    from pipeline.local_broker import NoBrokerError, local_broker

    settings = load_settings(config)
    try:
        with ExitStack() as stack:
            if not kafka and not settings.event_log.url.startswith("kafka://"):
                kafka = stack.enter_context(
                    local_broker(Path(stack.enter_context(TemporaryDirectory())))
                )
            if kafka:
                log = settings.event_log.model_copy(update={"url": f"kafka://{kafka}"})
                settings = settings.model_copy(update={"event_log": log})
            run_soak(settings, windows, json_file=json_file, console=Console())
    except NoBrokerError as error:
        raise typer.BadParameter(str(error), param_hint="--kafka") from None


def bench_vllm(
    data: Annotated[
        Path, typer.Option(help="Folder with MBPP, GSM8K, Spider and Spec-Bench.")
    ] = Path("../shared/data"),
    python: Annotated[
        Path, typer.Option(help="Interpreter of vLLM's environment ('make vllm-venv').")
    ] = Path(".venv-vllm/bin/python"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Few prompts, one ordering, one and four at a time.")
    ] = False,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only this method; repeat for more. Default: all five."),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts per set and pass (20; quick: 3).")
    ] = None,
    num_orderings: Annotated[
        int | None, typer.Option(min=1, help="Repetitions in other orders (3; quick: 1).")
    ] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a draft, for every method.")
    ] = 4,
    work: Annotated[
        Path | None,
        typer.Option(
            help="Keep all in this folder, new for every version of the code: what was "
            "interrupted goes on there."
        ),
    ] = None,
    json_file: JsonOption = None,
    config: ConfigOption = None,
) -> None:
    """Compare Draftloop inside an unmodified vLLM with vLLM's own methods, on first-seen prompts.

    Wants quiet cores and about two hours. The first run trains the head that is released, some ten
    minutes more; it is kept.
    """
    from pipeline.bench.vllm.benchmark import METHODS, VllmBench, run_vllm_bench
    from pipeline.configuration.settings import load_settings

    methods = tuple(method) if method else METHODS
    unknown = [one for one in methods if one not in METHODS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: known methods are {', '.join(METHODS)}")
    bench = VllmBench(
        data=data,
        python=python,
        work=work,
        concurrencies=(1, 4) if quick else (1, 4, 16),
        num_prompts=num_prompts or (3 if quick else 20),
        num_orderings=num_orderings or (1 if quick else 3),
        max_tokens=64,
        exact_tokens=0 if quick else 32,
        num_train=12 if quick else 160,
        num_steps=150 if quick else 1200,
        num_speculative_tokens=num_speculative_tokens,
        methods=methods,
    )
    run_vllm_bench(load_settings(config), bench, console=Console(), json_file=json_file)


def bench_scaling(
    kafka: EmptyKafkaOption = "",
    num_events: Annotated[int, typer.Option(min=100, help="Backlog to catch up with.")] = 6000,
    repetitions: Annotated[int, typer.Option(min=1, help="Measurements of each group.")] = 5,
    json_file: JsonOption = None,
) -> None:
    """Measure how much faster three learners catch up than one, and compare what they learned."""
    from pipeline.bench.scaling import ScalingBench, run_scaling_bench

    bench = ScalingBench(num_events=num_events, repetitions=repetitions)
    with _missing_broker():
        run_scaling_bench(bench, json_file=json_file, console=Console(), servers=kafka)


def bench_outage(
    kafka: EmptyKafkaOption = "",
    stop_command: Annotated[
        str, typer.Option(help="Stops the broker of --kafka, by a shell, and returns.")
    ] = "",
    start_command: Annotated[
        str, typer.Option(help="Starts it again on the same data, and returns.")
    ] = "",
    outage_seconds: Annotated[
        float, typer.Option(min=1.0, help="How long the broker is away.")
    ] = 60.0,
    steady_seconds: Annotated[
        float, typer.Option(min=1.0, help="How long it serves before, and after.")
    ] = 60.0,
    json_file: JsonOption = None,
) -> None:
    """Serve while the broker is stopped and started again: latency, memory, drops, recovery."""
    from pipeline.bench.given_broker import GivenBroker
    from pipeline.bench.outage import OutageBench, run_outage_bench

    if len({bool(kafka), bool(stop_command), bool(start_command)}) > 1:
        raise typer.BadParameter(
            "--kafka, --stop-command and --start-command go together", param_hint="--kafka"
        )
    given = GivenBroker(kafka, stop_command, start_command) if kafka else None
    bench = OutageBench(outage_seconds=outage_seconds, steady_seconds=steady_seconds)
    with _missing_broker():
        run_outage_bench(bench, json_file=json_file, console=Console(), given=given)


@contextmanager
def _missing_broker() -> Iterator[None]:
    """Say in one line that there is no broker, and which option names one."""
    from pipeline.local_broker import NoBrokerError

    try:
        yield
    except NoBrokerError as error:
        raise typer.BadParameter(str(error), param_hint="--kafka") from None


def bench_learning(
    data: Annotated[Path, typer.Option(help="Folder of the prompt sets.")] = Path("../shared/data"),
    quick: Annotated[
        bool, typer.Option("--quick", help="One seed and shorter streams: minutes, not an hour.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, help="Runs that are made at a time.")] = 2,
    json_file: JsonOption = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw acceptance along the streams to this PNG file.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Compare heads that learn online with a well-trained one that does not, on real traffic.

    Answers, the static head and every finished run are kept in the cache: a benchmark that was
    interrupted goes on where it was.
    """
    from dataclasses import replace

    from pipeline.bench.learning.benchmark import QUICK, LearningBench, run_learning_bench
    from pipeline.configuration.settings import load_settings

    bench = QUICK if quick else LearningBench()
    run_learning_bench(
        load_settings(config),
        data,
        replace(bench, num_processes=processes),
        json_file=json_file,
        picture=picture,
        console=Console(),
    )
