"""Commands that serve and run: ``serve``, ``up``, ``doctor``, ``estimate``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import Annotated

import typer
from rich.console import Console

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file; default: $DRAFTLOOP_CONFIG, draftloop.toml."),
]


def add_commands(app: typer.Typer, stop_on_signals: Callable[[], Event], console: Console) -> None:
    """Add the commands to the application.

    Args:
        app: The application.
        stop_on_signals: Returns an event that SIGTERM and SIGINT set.
        console: Where progress goes.
    """

    @app.command(epilog="Example: [bold]draftloop serve --config draftloop.toml[/bold]")
    def serve(config: ConfigOption = None) -> None:
        """Serve the OpenAI API with a worker that reports what verification saw."""
        from pipeline.logs import start_logging
        from pipeline.serving import run_server
        from pipeline.settings import load_settings

        settings = load_settings(config)
        start_logging(settings.logs, "worker")
        run_server(settings, stop_on_signals(), console)

    @app.command(epilog="Example: [bold]draftloop up --config draftloop.toml[/bold]")
    def up(config: ConfigOption = None) -> None:
        """Run worker, learner and archiver as processes with one merged log, until told to stop."""
        from pipeline.services import services
        from pipeline.settings import load_settings
        from pipeline.up import printer, run_stack

        settings = load_settings(config)
        width = max(len(one.name) for one in services(settings))
        run_stack(settings, stop_on_signals(), printer(width, sys.stdout))

    @app.command(epilog="Example: [bold]draftloop health worker[/bold] ends with status 2 if not.")
    def health(
        service: Annotated[str, typer.Argument(help="worker, learner, trainer or archiver.")],
        config: ConfigOption = None,
    ) -> None:
        """Ask a running service whether it does its work."""
        from pipeline.health import check_health
        from pipeline.settings import load_settings

        Console().print(check_health(service, load_settings(config)))
