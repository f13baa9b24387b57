"""The replay command: read a log, sum it up in the terminal, write page and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from learner.selection import DEFAULT_POLICY
from pipeline.json_files import write_json
from pipeline.releases.release_rows import release_rows
from replay.analysis import Analysis, ReplayOptions, analyse
from replay.report import write_report
from replay.summary import ReplaySummary
from replay.walks import WalkOptions

REQUESTS_PER_TICK = 20

SEED = 0
"""Seeds coins and bootstrap, so that two replays of one log agree to the last digit."""


DEFAULT_POLICIES = (DEFAULT_POLICY, "normal_hedge")
"""Re-run where none is asked for: what the worker does by default, and HedgeSpec's learner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest:
    """What the command was asked.

    Attributes:
        policies: Specifications; empty = ``DEFAULT_POLICIES``.
        num_speculative_tokens: Levels of the re-runs, at most; None = the logged ones.
        drafter_ids, streams: Only these; empty = all.
        report: Where to write the page; None writes none.
        png: Folder for the plots as PNG files; None writes none.
        json_file: Where to write the summary; None writes none.
    """

    policies: Sequence[str] = ()
    num_speculative_tokens: int | None = None
    drafter_ids: Sequence[str] = ()
    streams: Sequence[str] = ()
    report: Path | None = None
    png: Path | None = None
    json_file: Path | None = None

    @property
    def options(self) -> ReplayOptions:
        """The same, as replay takes it."""
        return ReplayOptions(
            walks=WalkOptions(
                policies=tuple(dict.fromkeys(self.policies or DEFAULT_POLICIES)),
                num_speculative_tokens=self.num_speculative_tokens,
                drafter_ids=tuple(dict.fromkeys(self.drafter_ids)) or None,
            ),
            streams=tuple(dict.fromkeys(self.streams)) or None,
        )


def replay_log(log: Path, asked: ReplayRequest, *, console: Console) -> Analysis:
    """Analyse a log, show it, and write what was asked for.

    Args:
        log: Data folder, its ``events`` folder, or one file.
        asked: What to do with it.
        console: Where the terminal summary goes.

    Raises:
        ReplayError: If there is nothing to read, or a name is unknown.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("reading requests", total=None)
        count = 0

        def on_request() -> None:
            nonlocal count
            count += 1
            if count % REQUESTS_PER_TICK == 0:
                progress.update(task, description=f"reading requests: {count:,}")

        generator = np.random.default_rng(SEED)
        analysis = analyse(log, generator, options=asked.options, on_request=on_request)
        summary = replace(analysis.summary, releases=release_rows(log))
        analysis = replace(analysis, summary=summary)
        if asked.report is not None:
            progress.update(task, description="writing the report")
            write_report(analysis, asked.report)
        if asked.png is not None:
            progress.update(task, description="drawing the plots")
            _write_plots(analysis, asked.png)
    show_summary(analysis.summary, console)
    if asked.report is not None:
        console.print(f"report: {asked.report}", soft_wrap=True)
    if asked.png is not None:
        console.print(f"plots: {asked.png}", soft_wrap=True)
    if asked.json_file is not None:
        write_json(asked.json_file, analysis.summary.to_json())
        console.print(f"numbers: {asked.json_file}", soft_wrap=True)
    return analysis


def _write_plots(analysis: Analysis, folder: Path) -> None:
    # Imported where it is needed: matplotlib takes a second to start.
    from replay.png import write_plots

    write_plots(analysis, folder)


def show_summary(summary: ReplaySummary, console: Console) -> None:
    """Print the tables of a replay."""
    console.print(_stream_table(summary))
    console.print(_drafter_table(summary))
    if summary.regrets:
        console.print(_regret_table(summary))
    if summary.policies:
        console.print(_policy_table(summary))
    if summary.off_policy:
        console.print(_off_policy_table(summary))
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


def _policy_table(summary: ReplaySummary) -> Table:
    table = _table(
        "Other policies on the same text, against the log (95 % interval)",
        *("policy", "MAT", "to log", "low", "high", "tokens/s", "estimated"),
    )
    for row in summary.policies:
        table.add_row(
            row.policy,
            _number(row.mean_acceptance_length, 3),
            *(_number(value, 3) for value in (row.ratio, row.ratio_low, row.ratio_high)),
            _number(row.tokens_per_second, 1),
            "–" if row.estimated_share is None else f"{row.estimated_share:.1%}",
        )
    return table


def _off_policy_table(summary: ReplaySummary) -> Table:
    table = _table(
        "Other policies, estimated from what was played",
        *("policy", "doubly robust", "95 % interval", "weighted", "worth rounds"),
    )
    for row in summary.off_policy:
        interval = f"{_number(row.doubly_robust_low, 3)} .. {_number(row.doubly_robust_high, 3)}"
        table.add_row(
            row.policy,
            _number(row.doubly_robust, 3),
            interval,
            _number(row.importance_weighted, 3),
            _number(row.effective_sample_size, 0),
        )
    return table


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"
