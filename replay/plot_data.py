"""The data of the report's plots: binned, rounded, and independent of any plotting library.

A plot has variants (a switch above it), a variant has traces. Colours are roles, not values, so
that the page can show them in light and in dark.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotTrace:
    """One line, area, row of marks, or set of bars.

    ``color`` is a role, for marks one each; ``x`` None = the variant's. Bars lie: ``y`` is their
    length, ``text`` what they stand for, ``low`` and ``high`` the ends of intervals.
    """

    name: str
    kind: Literal["line", "area", "marks", "dots", "bars"]
    color: str | list[str]
    y: list[float | None]
    x: list[float] | None = None
    text: list[str] | None = None
    low: list[float | None] | None = None
    high: list[float | None] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One state of a plot's switch; ``level`` draws a thin line at this y, or x with bars."""

    label: str
    x_title: str
    y_title: str
    x: list[float]
    traces: list[PlotTrace]
    level: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One plot; ``empty`` says why there is nothing to draw."""

    id: str
    title: str
    note: str
    variants: list[Variant]
    empty: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """The plots of one stream, or of all."""

    label: str
    plots: list[Plot]
