"""The replay command: read a log, sum it up in the terminal, write page and JSON."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from pipeline.json_files import write_json
from replay.analysis import Analysis, analyse
from replay.report import write_report
from replay.summary import ReplaySummary

SEED = 0
"""Seeds coins and bootstrap, so that two replays of one log agree to the last digit."""


def replay_log(
    log: Path, *, report: Path | None, json_file: Path | None, console: Console
) -> Analysis:
    """Analyse a log and show it.

    Args:
        log: Data folder, its ``events`` folder, or one file.
        report: Where to write the page; None writes none.
        json_file: Where to write the summary; None writes none.
        console: Where the terminal summary goes.

    Raises:
        ReplayError: If there is nothing to read.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading requests", total=None)
        count = 0

        def on_request() -> None:
            nonlocal count
            count += 1
            progress.update(task, description=f"reading requests: {count:,}")

        analysis = analyse(log, np.random.default_rng(SEED), on_request=on_request)
        if report is not None:
            progress.update(task, description="writing the report")
            write_report(analysis, report)
    show_summary(analysis.summary, console)
    if report is not None:
        console.print(f"report: {report}", soft_wrap=True)
    if json_file is not None:
        write_json(json_file, analysis.summary.to_json())
        console.print(f"numbers: {json_file}", soft_wrap=True)
    return analysis


def show_summary(summary: ReplaySummary, console: Console) -> None:
    """Print the tables of a replay."""
    console.print(_stream_table(summary))
    console.print(_drafter_table(summary))
    if summary.regrets:
        console.print(_regret_table(summary))
    check = summary.check
    console.print(
        f"re-run of the log: {check.num_checked:,} of {check.num_rounds:,} rounds rebuilt, "
        f"{check.num_selections_checked:,} selection probabilities, "
        f"{check.num_disagreements:,} disagreements"
    )
    for note in (*check.examples, *summary.notes):
        console.print(f"- {note}", markup=False, highlight=False, soft_wrap=True)


def _stream_table(summary: ReplaySummary) -> Table:
    table = _table("Streams", "stream", "requests", "tokens", "rounds", "MAT", "tokens/s")
    for row in (*summary.streams, summary.total):
        table.add_row(
            row.stream or "all",
            f"{row.num_requests:,}",
            f"{row.num_tokens:,}",
            f"{row.num_rounds:,}",
            _number(row.mean_acceptance_length),
            _number(row.tokens_per_second, 1),
        )
    return table


def _drafter_table(summary: ReplaySummary) -> Table:
    table = _table("Drafters", "drafter", "windows", "expected", "played", "rounds", "accepted")
    for row in summary.drafters:
        if row.stream is None:
            table.add_row(
                row.drafter_id,
                f"{row.num_windows:,}",
                _number(row.exact_length),
                _number(row.played_length),
                f"{row.num_rounds:,}",
                _number(row.acceptance_rate),
            )
    return table


def _regret_table(summary: ReplaySummary) -> Table:
    table = _table("Regret in tokens", "against", "switches", "tokens", "95 % interval")
    for row in summary.regrets:
        if row.stream is None:
            interval = f"{_number(row.tokens_low, 0)} .. {_number(row.tokens_high, 0)}"
            table.add_row(row.comparator, f"{row.path_length:,}", _number(row.tokens, 0), interval)
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
