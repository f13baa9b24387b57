"""The learning benchmark for people: a table on the console, and acceptance along the streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from pipeline.bench.learning.keys import Runs
from pipeline.bench.learning.plan import AT_ONCE, STATIC
from pipeline.bench.learning.streams import STREAMS
from pipeline.json_files import OutputError
from replay.png import DPI, DRAFTER_COLORS, INK, SOFT

SMOOTHING = 20
"""Requests over which the curves are averaged."""

GOALS: Mapping[str, float] = {
    "abrupt_after_switch_vs_static": 1.24,
    "stationary_vs_static": 0.99,
    "recurring_second_visit": 0.97,
    "time_included_vs_static": 1.13,
    "ensemble_vs_best_fixed_step": 0.97,
    "delay16_share_of_gain": 0.80,
    "optimistic_vs_gradient_gradual": 1.0,
    "poison_lowest_window_vs_static": 0.97,
}
"""What each key should be at least."""


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the runs stream by stream, the convex game, costs, and the keys against their goals."""
    table = result["table"]
    console.print(_runs_table(table["runs"]))
    console.print(_convex_table(table["convex"]))
    costs = table["costs"]
    console.print(
        f"a round: {1e3 * costs['verify_seconds']:.1f} ms to verify, "
        f"{1e3 * costs['draft_seconds']:.1f} ms to draft; plain decoding "
        f"{1e3 * costs['plain_seconds']:.1f} ms a token: speculation pays from "
        f"{costs['break_even_length']:.2f} tokens per verification"
    )
    if table["equality"]:
        found = table["equality"]
        console.print(
            f"real engine, float32, {found['num_swaps']} swaps within requests: "
            f"{found['num_outputs_equal']} of {found['num_requests']} outputs and "
            f"{found['num_rounds_equal']} of {found['num_rounds']} rounds equal"
        )
    for key, goal in GOALS.items():
        if key in result:
            interval = f"[{result[f'{key}_low']:.3f}, {result[f'{key}_high']:.3f}]"
            verdict = "[green]met[/green]" if result[key] >= goal else "[red]missed[/red]"
            console.print(f"{key}: {result[key]:.3f} {interval}, goal {goal:.2f} {verdict}")


def _runs_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Learning runs", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("stream", "policy", "feedback"):
        table.add_column(name)
    for name in ("MAT", "vs static", "after switch", "time counted", "ms/update", "break-even"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["stream"],
            row["policy"],
            row["order"],
            f"{row['mean_acceptance_length']:.2f}",
            _interval(row, "vs_static"),
            _interval(row, "after_switch_vs_static"),
            _interval(row, "time_included_vs_static"),
            f"{1e3 * row['update_seconds']:.0f}" if "update_seconds" in row else "",
            _number(row.get("break_even_verifications")) if row["policy"] != STATIC else "",
        )
    return table


def _convex_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    title = "Convex drafter: dynamic regret beside its bound"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("rule")
    for name in ("delay", "rounds", "regret", "bound", "path length", "hint error", "kept"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["rule"],
            str(row["delay"]),
            str(row["num_rounds"]),
            f"{row['regret']:.2f}",
            _number(row["bound"]),
            f"{row['path_length']:.2f}",
            _number(row["hint_error"]),
            "yes" if row["keeps_bound"] else "no",
        )
    return table


def _interval(row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        return ""
    return f"{row[key]:.3f} [{row[f'{key}_low']:.3f}, {row[f'{key}_high']:.3f}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def write_picture(runs: Runs, path: Path) -> None:
    """Draw acceptance along every stream, a line per policy, mean over seeds.

    Raises:
        OutputError: If the file cannot be written.
    """
    names = [name for name in STREAMS if any(one.stream == name for one in runs.results)]
    figure = Figure(figsize=(11.0, 3.2 * max(len(names), 1)), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(len(names), 1, index + 1)
        axes.set_title(name, loc="left", color=INK, fontweight="bold")
        axes.set_ylabel("tokens per verification", color=SOFT)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e3e6eb", linewidth=0.8)
        for place, (label, curve) in enumerate(_curves(runs, name).items()):
            color = INK if label == STATIC else DRAFTER_COLORS[place % len(DRAFTER_COLORS)]
            axes.plot(curve, label=label, color=color, linewidth=1.6)
        for switch in _switches(runs, name):
            axes.axvline(switch, color=SOFT, linewidth=0.9, linestyle="dashed")
        axes.legend(loc="upper left", fontsize=8, frameon=False, ncols=4)
    if names:
        figure.axes[-1].set_xlabel(f"request (mean over {SMOOTHING})", color=SOFT)
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror}): name a file in a folder that exists"
        ) from error


def _curves(runs: Runs, stream: str) -> dict[str, NDArray[np.float64]]:
    """Return tokens per verification along a stream, by policy, feedback at once."""
    specs = [one for one in runs.results if (one.stream, one.order) == (stream, AT_ONCE)]
    policies = dict.fromkeys(one.policy for one in specs if not one.policy.startswith("fixed"))
    tokens = {one.seed: runs.results[one].num_tokens for one in specs}
    curves = {STATIC: _curve([(tokens[s], runs.static[s, stream]) for s in sorted(tokens)])}
    for policy in policies:
        results = [runs.results[spec] for spec in runs.of(stream, policy)]
        curves[policy] = _curve([(one.num_tokens, one.num_rounds) for one in results])
    return curves


def _curve(
    pairs: Sequence[tuple[NDArray[np.int64], NDArray[np.int64]]],
) -> NDArray[np.float64]:
    tokens = np.sum([tokens for tokens, _ in pairs], axis=0)
    rounds = np.sum([rounds for _, rounds in pairs], axis=0)
    kernel = np.ones(min(SMOOTHING, len(tokens)))
    found = np.convolve(tokens, kernel, "valid") / np.convolve(rounds, kernel, "valid")
    # A point stands at the last of its requests.
    return np.concatenate([np.full(len(kernel) - 1, np.nan), found])


def _switches(runs: Runs, stream: str) -> list[int]:
    found = next(one for (_, name), one in runs.streams.items() if name == stream)
    if stream == "poison":
        return [int(np.argmax(found.is_poisoned))]
    return [t for t in range(1, len(found.visits)) if found.visits[t] != found.visits[t - 1]]
