"""``draftloop delete``: what has been stored of a stream goes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from pipeline.commands.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from pipeline.archive.log_rewriting import StreamDeletion


def add_data_commands(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command(
        epilog="Example: [bold]draftloop delete --stream tenant-7 --dry-run[/bold] says how much."
    )(delete)


def delete(
    stream: Annotated[
        list[str], typer.Option("--stream", help="Id of a stream; repeat for more of them.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, delete nothing.")] = False,
    json_file: JsonOption = None,
    config: ConfigOption = None,
) -> None:
    """Delete a stream's rows of the Parquet log, and its recorded hidden states.

    Services may run meanwhile. It ends with status 1 if a file cannot be read.
    """
    from rich.progress import track

    from pipeline.archive.log_rewriting import delete_streams
    from pipeline.configuration.settings import load_settings
    from pipeline.json_files import OutputError, write_json
    from schemas.topics import VERIFICATION_EVENTS

    bar = Console(stderr=True)

    def through(paths: Sequence[Path]) -> Iterable[Path]:
        return track(paths, "files of the log", console=bar, disable=not bar.is_terminal)

    data = load_settings(config).data
    if not data.is_dir():
        raise typer.BadParameter(
            f"{data} does not exist; is it the folder that the services use?", param_hint="data"
        )
    try:
        done = delete_streams(
            data, VERIFICATION_EVENTS, stream, is_dry_run=dry_run, through=through
        )
    except OSError as error:
        raise OutputError(f"{data}: {error}; what is deleted stays so, run it again") from error
    if json_file is not None:
        write_json(json_file, {"streams": stream, "is_dry_run": dry_run, **asdict(done)})
    _tell(Console(), data, done, is_dry_run=dry_run)
    if done.unreadable:
        raise typer.Exit(1)


def _tell(console: Console, data: Path, done: StreamDeletion, *, is_dry_run: bool) -> None:
    verb = "would delete" if is_dry_run else "deleted"
    console.print(
        f"{data}: {verb} {done.num_rows} rows in {done.num_files} "
        f"files of events, and {done.num_feature_files} files of hidden states; events that are "
        "not archived yet come later: run it again then, or set schedule.deleted_streams",
        highlight=False,
        soft_wrap=True,
    )
    for name in done.unreadable:
        console.print(
            f"{name} cannot be read and may hold rows of it: remove or restore it, and run again",
            highlight=False,
            soft_wrap=True,
        )
