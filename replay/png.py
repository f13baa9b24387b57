"""The plots of the report as PNG files, for places that cannot show the page."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replay.analysis import Analysis
from replay.errors import ReplayError
from replay.plot_data import Plot, PlotTrace, Variant
from replay.plots import report_views

DRAFTER_COLORS = (
    *("#2456c8", "#c2571a", "#0b8a5f", "#b8348b", "#7a5cd6", "#0b8199", "#927300", "#d0383f"),
)
COMPARATOR_COLORS = ("#16191f", "#7c8494", "#5b4bb7", "#a24fb5", "#d06a8c", "#c98a2b")
DASHES = ("solid", "dashed", "dotted", "dashdot")
INK, SOFT = "#16191f", "#5b6472"
WIDTH, HEIGHT, DPI = 10.0, 4.6, 110


def write_plots(analysis: Analysis, folder: Path) -> list[Path]:
    """Write every plot of all streams together, ``<plot>.png``, one per state of its switch.

    Plots with nothing to draw are left out.

    Raises:
        ReplayError: If the folder cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in report_views(analysis)[0].plots:
            for index, variant in enumerate(plot.variants):
                name = plot.id if index == 0 else f"{plot.id}-{index + 1}"
                path = folder / f"{name}.png"
                drawn(plot, variant).savefig(path, dpi=DPI)
                written.append(path)
    except OSError as error:
        raise ReplayError(
            f"cannot write the plots to {folder} ({error.strerror}); choose another place"
        ) from error
    return written


def drawn(plot: Plot, variant: Variant) -> Figure:
    """Return a figure of one plot in one state of its switch."""
    is_bars = any(trace.kind == "bars" for trace in variant.traces)
    height = HEIGHT if not is_bars else 1.6 + 0.36 * len(variant.traces[0].y)
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(plot.title, loc="left", color=INK, fontweight="bold")
    axes.set_xlabel(variant.x_title, color=SOFT)
    axes.set_ylabel(variant.y_title, color=SOFT)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#e3e6eb", linewidth=0.8)
    axes.set_axisbelow(True)
    if variant.level is not None:
        along = axes.axvline if is_bars else axes.axhline
        along(variant.level, color=INK, linewidth=1.2, linestyle="dotted")
    _draw_areas(axes, variant)
    for trace in variant.traces:
        if trace.kind != "area":
            _draw(axes, variant, trace)
    if len(variant.traces) > 1:
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, labelcolor=INK, fontsize=9
        )
    return figure


def look(role: str) -> tuple[str, str]:
    """Return colour and dashes of a role, the same as the page's in light mode."""
    if role in ("none", "played"):
        return ("#a3abb8" if role == "none" else INK), "solid"
    kind, _, number = role.partition("-")
    colors = COMPARATOR_COLORS if kind == "comparator" else DRAFTER_COLORS
    index = int(number)
    return colors[index % len(colors)], DASHES[index // len(colors) % len(DASHES)]


def _draw_areas(axes: Axes, variant: Variant) -> None:
    areas = [trace for trace in variant.traces if trace.kind == "area"]
    if areas:
        axes.stackplot(
            variant.x,
            [_numbers(trace.y) for trace in areas],
            labels=[trace.name for trace in areas],
            colors=[look(str(trace.color))[0] for trace in areas],
            step="mid",
        )
        axes.set_ylim(0.0, 1.0)


def _draw(axes: Axes, variant: Variant, trace: PlotTrace) -> None:
    x = trace.x if trace.x is not None else variant.x
    y = _numbers(trace.y)
    if trace.kind == "bars":
        places = range(len(y))
        axes.barh(places, y, color=look(str(trace.color))[0], xerr=_whiskers(trace), capsize=3)
        axes.set_yticks(places, trace.text or [])
        axes.invert_yaxis()
    elif trace.kind == "marks":
        colors = [look(role)[0] for role in trace.color]
        axes.scatter(x, y, c=colors, marker="^", s=30, label=trace.name, zorder=3)
    else:
        color, dashes = look(str(trace.color))
        marker = "o" if trace.kind == "dots" else None
        width = 2.4 if trace.color == "played" else 1.5
        axes.errorbar(
            x,
            y,
            yerr=_whiskers(trace),
            color=color,
            linestyle=dashes,
            linewidth=width,
            elinewidth=0.8,
            marker=marker,
            markersize=4,
            label=trace.name,
        )


def _numbers(values: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _whiskers(trace: PlotTrace) -> list[list[float]] | None:
    """Return distances to the ends of the intervals, lower ones first; 0 where there is none."""
    if trace.low is None or trace.high is None:
        return None
    rows = list(zip(trace.y, trace.low, trace.high, strict=True))
    return [
        [0.0 if y is None or low is None else max(0.0, y - low) for y, low, _ in rows],
        [0.0 if y is None or high is None else max(0.0, high - y) for y, _, high in rows],
    ]
