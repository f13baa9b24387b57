"""Plots of what the tables hold: policies side by side, and how right scores are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from replay.binning import rounded_or_none
from replay.plot_data import Plot, PlotTrace, Variant
from replay.summary import CalibrationRow, PolicyRow, ReplaySummary

MAX_BARS = 40


def table_plots(summary: ReplaySummary) -> list[Plot]:
    """Return the plots of a summary; a plot says why it is empty."""
    return [_policy_plot(summary), _calibration_plot(summary)]


def _policy_plot(summary: ReplaySummary) -> Plot:
    title = "Other policies on the same text"
    note = (
        "Each request decoded again on paper, all policies with the same coins. Whiskers: 95 % "
        "paired block bootstrap against the log. The line is what was logged."
    )
    rows = [row for row in summary.policies if row.mean_acceptance_length is not None][:MAX_BARS]
    if not rows:
        empty = "no policy could be re-run"
        return Plot(id="policies", title=title, note=note, variants=[], empty=empty)
    total = summary.total
    variants = [
        _bars("Tokens per verification", "length", rows, total.mean_acceptance_length),
        _bars("Tokens per second", "speed", rows, total.tokens_per_second),
    ]
    return Plot(
        id="policies",
        title=title,
        note=note,
        variants=[variant for variant in variants if variant.traces],
    )


def _bars(label: str, kind: str, rows: Sequence[PolicyRow], logged: float | None) -> Variant:
    """Return bars of all policies that have a value; intervals are those of the ratio."""
    values = [
        (row.policy, row.mean_acceptance_length, row.ratio, row.ratio_low, row.ratio_high)
        if kind == "length"
        else (
            row.policy,
            row.tokens_per_second,
            row.speed_ratio,
            row.speed_ratio_low,
            row.speed_ratio_high,
        )
        for row in rows
    ]
    known = [one for one in values if one[1] is not None]
    ends = [
        (
            [None, None]
            if low is None or high is None or not ratio or value is None
            else [value * low / ratio, value * high / ratio]
        )
        for _, value, ratio, low, high in known
    ]
    traces = [
        PlotTrace(
            name=label.lower(),
            kind="bars",
            color="comparator-2",
            y=_rounded([value for _, value, *_ in known]),
            text=[policy for policy, *_ in known],
            low=_rounded([low for low, _ in ends]),
            high=_rounded([high for _, high in ends]),
        )
    ]
    return Variant(
        label=label,
        x_title=label.lower(),
        y_title="",
        x=[],
        traces=traces if known else [],
        level=None if logged is None else float(f"{logged:.5g}"),
    )


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return rounded_or_none(np.array([np.nan if one is None else one for one in values], float))


def _calibration_plot(summary: ReplaySummary) -> Plot:
    title = "Accepted as often as scored"
    note = (
        "Accepted over predicted acceptance in the rounds in which the drafter was played, by "
        "place in the draft. 1 = the scores are right; the table says which differ beyond chance."
    )
    traces = list(_ratio_traces(summary.calibration, [row.drafter_id for row in summary.drafters]))
    if not traces:
        empty = "no scored round in which a drafter was played"
        return Plot(id="calibration", title=title, note=note, variants=[], empty=empty)
    variant = Variant(
        label="Ratio",
        x_title="place in the draft",
        y_title="accepted / predicted",
        x=[],
        traces=traces,
        level=1.0,
    )
    return Plot(id="calibration", title=title, note=note, variants=[variant])


def _ratio_traces(
    rows: Sequence[CalibrationRow], drafter_ids: Sequence[str]
) -> Iterator[PlotTrace]:
    """Yield a line per drafter that was played, in the colour it has everywhere."""
    for index, drafter_id in enumerate(dict.fromkeys(drafter_ids)):
        own = [row for row in rows if row.drafter_id == drafter_id and row.ratio is not None]
        if own:
            yield PlotTrace(
                name=drafter_id,
                kind="line",
                color=f"drafter-{index}",
                x=[float(row.level) for row in own],
                y=_rounded([row.ratio for row in own]),
                low=_rounded([row.ratio_low for row in own]),
                high=_rounded([row.ratio_high for row in own]),
            )
