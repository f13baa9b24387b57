"""``draftloop topics``: make, check and describe the topics of the event log."""

from __future__ import annotations

import typer
from rich.console import Console
from rich.table import Table

from pipeline.commands.options import ConfigOption

topics = typer.Typer(help="The topics of the event log, from one declaration.")


@topics.command(epilog="Example: [bold]draftloop topics create --config draftloop.toml[/bold]")
def create(config: ConfigOption = None) -> None:
    """Create the topics that are missing; refuse those that exist with another shape."""
    from pipeline.configuration.settings import load_settings
    from pipeline.messaging.event_logs import bare_log, topic_plan
    from pipeline.messaging.topics import create_topics

    settings = load_settings(config)
    with bare_log(settings) as log:
        create_topics(log, topic_plan(settings))
        Console().print(f"{len(topic_plan(settings).declared())} topics are as declared")


@topics.command(epilog="Example: [bold]draftloop topics check[/bold] ends with status 1 if not.")
def check(config: ConfigOption = None) -> None:
    """Compare the topics, and a registry's schemas, with what is declared; change nothing."""
    from pipeline.configuration.settings import load_settings
    from pipeline.messaging.event_logs import bare_log, check_schemas, topic_plan
    from pipeline.messaging.topics import check_topics

    settings = load_settings(config)
    with bare_log(settings) as log:
        differences = [*check_topics(log, topic_plan(settings)), *check_schemas(settings)]
    for difference in differences:
        Console().print(difference, highlight=False, soft_wrap=True)
    if differences:
        raise typer.Exit(1)
    Console().print("all topics are as declared")


@topics.command(epilog="Example: [bold]draftloop topics describe[/bold]")
def describe(config: ConfigOption = None) -> None:
    """Show the topics that are there, with their settings and how much they hold."""
    from pipeline.configuration.settings import load_settings
    from pipeline.messaging.event_logs import bare_log, topic_plan
    from pipeline.messaging.topics import description

    settings = load_settings(config)
    with bare_log(settings) as log:
        rows = description(log, topic_plan(settings))
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*row.values())
    Console().print(table)
