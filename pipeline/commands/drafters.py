"""``draftloop drafters``: look at the versions of drafters, and overrule what was decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from pipeline.commands.options import ConfigOption
from pipeline.releases.export_formats import ExportFormat, refuse_other_than_eagle3

if TYPE_CHECKING:
    from pipeline.releases.drafter_versions import DrafterVersions, VersionRow
    from pipeline.releases.release_history import ReleaseStep
    from schemas.events import DrafterReleased, GateEvidence, StreamComparison

drafters = typer.Typer(help="The versions of the drafters: what is live, on trial, withdrawn.")

DrafterArgument = Annotated[str, typer.Argument(help="Id of the drafter.")]
VersionArgument = Annotated[int, typer.Argument(min=0, help="Number of the version.")]
ReasonOption = Annotated[str, typer.Option(help="Why; it stands in the release.")]


@drafters.command("list", epilog="Example: [bold]draftloop drafters list[/bold]")
def list_versions(config: ConfigOption = None) -> None:
    """List every stored version with its state and what it gave."""
    with _versions(config) as versions:
        rows = versions.rows()
    table = Table("drafter", "version", "state", "tokens per verification", "reason")
    for row in rows:
        table.add_row(row.drafter_id, str(row.version), row.state, _evidence(row), _reason(row))
    Console().print(table)


@drafters.command(epilog="Example: [bold]draftloop drafters show head-replay --last 50[/bold]")
def show(
    drafter_id: DrafterArgument,
    last: Annotated[int, typer.Option(min=1, help="Steps of the history, the newest.")] = 20,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write versions and history to this file.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Show all that is known of a drafter's versions, and the steps that their releases took."""
    console = Console()
    with _versions(config) as versions:
        rows = versions.rows(drafter_id)
        steps = versions.history(drafter_id, last=last)
    if json_file is not None:
        _write_history(json_file, drafter_id, rows, steps)
    for row in rows:
        release = row.release
        console.print(f"[bold]{row.drafter_id} version {row.version}[/bold]: {row.state}")
        if release is not None:
            console.print(
                f"  since {release.produced_at:%Y-%m-%d %H:%M:%S} UTC, parent "
                f"{release.parent_version}, {release.architecture}\n"
                f"  reason: {release.reason}\n  evidence: {_evidence(row)}\n{_streams(row)}"
                f"  artifact: {release.artifact_uri}\n  target: {release.target_fingerprint}\n"
                f"  trained up to: {dict(release.training_window.partition_to_offset)}",
                highlight=False,
                soft_wrap=True,
            )
    table = Table("when (UTC)", "version", "parent", "state", "reason", title="history")
    for step in steps:
        when = step.produced_at[:19].replace("T", " ")
        table.add_row(when, str(step.version), str(step.parent_version), step.state, step.reason)
    console.print(table)


@drafters.command(epilog="Example: [bold]draftloop drafters promote head-replay 7[/bold]")
def promote(
    drafter_id: DrafterArgument,
    version: VersionArgument,
    reason: ReasonOption = "",
    config: ConfigOption = None,
) -> None:
    """Make a stored version live without asking the gate."""
    with _versions(config) as versions:
        versions.promote(drafter_id, version, reason)
    Console().print(f"{drafter_id} version {version} is live")


@drafters.command(epilog="Example: [bold]draftloop drafters rollback head-replay --to 5[/bold]")
def rollback(
    drafter_id: DrafterArgument,
    to: Annotated[
        int | None, typer.Option(min=0, help="Version to go back to; default: the one before.")
    ] = None,
    reason: ReasonOption = "",
    config: ConfigOption = None,
) -> None:
    """Withdraw the live version; weights, optimizer and meta state of an older one come back."""
    with _versions(config) as versions:
        withdrawn, restored = versions.rollback(drafter_id, to, reason)
    Console().print(f"{drafter_id} version {withdrawn} is withdrawn, version {restored} is live")


@drafters.command(epilog="Example: [bold]draftloop drafters retire head-recent[/bold]")
def retire(
    drafter_id: DrafterArgument, reason: ReasonOption = "", config: ConfigOption = None
) -> None:
    """Take a drafter out of service; promote one of its versions to bring it back."""
    with _versions(config) as versions:
        version = versions.retire(drafter_id, reason)
    Console().print(f"{drafter_id} is retired, its last version was {version}")


@drafters.command(epilog="Example: [bold]draftloop drafters export head-replay 7 folder[/bold]")
def export(
    drafter_id: DrafterArgument,
    version: VersionArgument,
    folder: Annotated[Path, typer.Argument(help="New folder for the version.")],
    layout: Annotated[
        ExportFormat,
        typer.Option(
            "--format", help="draftloop comes back by import; eagle3 is for vLLM, SGLang."
        ),
    ] = ExportFormat.DRAFTLOOP,
    config: ConfigOption = None,
) -> None:
    """Copy a version to a folder, with all that its reader needs, checked."""
    with _versions(config) as versions:
        if layout is ExportFormat.EAGLE3:
            _export_eagle3(versions.stored(drafter_id, version), folder, config)
            return
        files = versions.export(drafter_id, version, folder)
    for path in files:
        Console().print(str(path), highlight=False, soft_wrap=True)


@drafters.command("import", epilog="Example: [bold]draftloop drafters import folder[/bold]")
def bring(
    folder: Annotated[Path, typer.Argument(help="Folder that export has written.")],
    as_id: Annotated[
        str, typer.Option("--as", help="Id of the drafter; default: the exported one.")
    ] = "",
    config: ConfigOption = None,
) -> None:
    """Store an exported version under the next number; promote it to use it."""
    with _versions(config) as versions:
        drafter_id, version = versions.bring(folder, as_id or None)
    Console().print(
        f"stored as {drafter_id} version {version}; draftloop drafters promote {drafter_id} "
        f"{version} makes it live",
        soft_wrap=True,
    )


def _export_eagle3(release: DrafterReleased, folder: Path, config: Path | None) -> None:
    """Write a version as vLLM and SGLang read it, and say what reading it back gave."""
    from pipeline.releases.drafter_versions import refuse_filled

    refuse_other_than_eagle3(release.drafter_id, release.version, release.architecture)
    refuse_filled(folder)
    from pipeline.configuration.settings import load_settings
    from pipeline.releases.eagle3_export import export_eagle3
    from pipeline.releases.registry import DrafterRegistry
    from pipeline.wiring import open_target

    settings = load_settings(config)
    registry = DrafterRegistry(str(settings.data))
    found = export_eagle3(release, open_target(settings), registry, folder)
    console = Console()
    for path in found.files:
        console.print(str(path), highlight=False, soft_wrap=True)
    console.print(
        f"read back: {found.num_logits} logits within {found.largest_difference:.1e} of the "
        "largest, d2t and t2d name the head's own tokens",
        highlight=False,
        soft_wrap=True,
    )


def _write_history(
    path: Path, drafter_id: str, rows: Sequence[VersionRow], steps: Sequence[ReleaseStep]
) -> None:
    from dataclasses import asdict

    from pipeline.json_files import write_json

    versions = [{"version": row.version, "state": row.state} for row in rows]
    history = [asdict(step) for step in steps]
    write_json(path, {"drafter_id": drafter_id, "versions": versions, "history": history})


@contextmanager
def _versions(config: Path | None) -> Iterator[DrafterVersions]:
    from contextlib import closing

    from pipeline.clock import utc_now
    from pipeline.configuration.settings import load_settings
    from pipeline.messaging.event_logs import open_log
    from pipeline.releases.drafter_versions import DrafterVersions
    from pipeline.releases.registry import DrafterRegistry
    from pipeline.releases.release_history import ReleaseHistory, release_board

    settings = load_settings(config)
    root = str(settings.data)
    with closing(open_log(settings)) as log:
        board = release_board(settings, log, "draftloop drafters")
        history = ReleaseHistory(root)
        yield DrafterVersions(DrafterRegistry(root), board, now=utc_now, history=history)


def _reason(row: VersionRow) -> str:
    return "" if row.release is None else row.release.reason


def _evidence(row: VersionRow) -> str:
    evidence = None if row.release is None else row.release.evidence
    return "" if evidence is None else f"{_compared(evidence)}, {evidence.num_windows} windows)"


def _streams(row: VersionRow) -> str:
    """Return one line per stream of the evidence."""
    evidence = None if row.release is None else row.release.evidence
    return "".join(
        f"    {one.stream or f'{one.num_streams} other streams'}: {_compared(one)}, "
        f"{one.num_windows} windows of {one.num_requests} requests)\n"
        for one in (() if evidence is None else evidence.streams)
    )


def _compared(one: GateEvidence | StreamComparison) -> str:
    return (
        f"{one.new_acceptance_length:.3f} against {one.old_acceptance_length:.3f} "
        f"({one.difference_low:+.3f}..{one.difference_high:+.3f}"
    )
