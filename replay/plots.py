"""The plots over time, of all streams together and of the largest ones."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from replay.analysis import Analysis
from replay.binning import (
    MOVING_SHARE,
    bin_centres,
    binned_means,
    bins_of,
    moving_means,
    moving_sums,
    num_bins,
    rounded,
    rounded_or_none,
)
from replay.comparators import path_length
from replay.hindsight import CLAIRVOYANT, SWITCHES_SHOWN, Hindsight, switching_name
from replay.plot_data import Plot, PlotTrace, Variant, View
from replay.regret import ComparableRounds, regret
from replay.table_plots import table_plots
from replay.trace import Trace
from schemas.events import NO_DRAFTER

MAX_POINTS = 240
MOVING = f"moving mean over {MOVING_SHARE:.0%} of the tokens"
MAX_TOTAL_POINTS = 200_000
MAX_VERSION_MARKS = 100
NOT_DRAWN = {CLAIRVOYANT, *(switching_name(count) for count in (2, 8, 32, 64))}
"""Comparators that the table shows and the curves of cumulative regret leave out."""

TOKENS_AXIS = "emitted tokens"


@dataclass(frozen=True, slots=True, eq=False)
class _Slice:
    """The part of a log that a view shows, with tokens counted from its own start.

    ``is_round`` and ``is_window`` select; ``round_token`` and ``window_token`` are the selected
    ones' positions on the token axis.
    """

    num_tokens: int
    is_round: NDArray[np.bool_]
    is_window: NDArray[np.bool_]
    round_token: NDArray[np.int64]
    window_token: NDArray[np.int64]
    request_shift: NDArray[np.int64]


def report_views(analysis: Analysis) -> list[View]:
    """Return the plots of all streams together, then of the largest ones if there are several."""
    num_views = 1 + len(analysis.stream_to_best)
    num_lines = num_views * (3 * (len(analysis.trace.drafter_ids) + 1) + 12)
    points = int(np.clip(MAX_TOTAL_POINTS // num_lines, 40, MAX_POINTS))
    views = [_view(analysis, None, points)]
    views.extend(_view(analysis, stream, points) for stream in analysis.stream_to_best)
    views[0].plots.extend(table_plots(analysis.summary))
    return views


def views_to_json(views: list[View]) -> list[dict[str, Any]]:
    """Return the views as JSON types."""
    return [asdict(view) for view in views]


def _view(analysis: Analysis, stream: int | None, points: int) -> View:
    trace = analysis.trace
    rounds = analysis.rounds if stream is None else analysis.rounds.of_stream(stream)
    best = analysis.best if stream is None else analysis.stream_to_best[stream]
    part = _slice(trace, stream)
    plots = [
        _selection_plot(trace, part, points),
        _length_plot(trace, part, stream, points),
        _cumulative_plot(rounds, best, part, points),
        _dynamic_plot(rounds, best),
    ]
    return View(label="All streams" if stream is None else trace.streams[stream], plots=plots)


def _slice(trace: Trace, stream: int | None) -> _Slice:
    is_request = np.ones(trace.request_stream.size, dtype=np.bool_)
    if stream is not None:
        is_request = trace.request_stream == stream
    tokens = np.bincount(
        trace.rounds.request,
        weights=trace.rounds.num_emitted_tokens,
        minlength=is_request.size,
    ).astype(np.int64)
    own = np.where(is_request, tokens, 0)
    # From the log's token count to the view's: minus the tokens of other streams so far.
    shift = (np.cumsum(own) - own) - (np.cumsum(tokens) - tokens)
    is_round, is_window = is_request[trace.rounds.request], is_request[trace.windows.request]
    return _Slice(
        int(own.sum()),
        is_round,
        is_window,
        trace.rounds.token[is_round] + shift[trace.rounds.request[is_round]],
        trace.windows.token[is_window] + shift[trace.windows.request[is_window]],
        shift,
    )


def _selection_plot(trace: Trace, part: _Slice, points: int) -> Plot:
    title = "Which drafter was selected"
    note = (
        f"Share of rounds per drafter, {MOVING}. The other view is the probability that the log "
        "carries for the drafter that was played, at the moment it was."
    )
    drafter = trace.rounds.drafter[part.is_round].astype(np.int64)
    if not drafter.size:
        return Plot(id="selection", title=title, note=note, variants=[], empty="no rounds")
    points = num_bins(part.num_tokens, drafter.size, points)
    bins = bins_of(part.round_token, part.num_tokens, points)
    num_drafters = len(trace.drafter_ids)
    flat = bins * (num_drafters + 1) + np.where(drafter == NO_DRAFTER, num_drafters, drafter)
    shape = (points, num_drafters + 1)
    counts = np.bincount(flat, minlength=points * shape[1]).reshape(shape)
    chances = np.bincount(
        flat,
        weights=trace.rounds.selection_probability[part.is_round],
        minlength=points * shape[1],
    ).reshape(shape)
    there = counts.sum(axis=1) > 0
    smooth = moving_sums(counts)[there]
    shares = smooth / smooth.sum(axis=1, keepdims=True)
    means = moving_means(chances, counts)[there]
    x = rounded(bin_centres(part.num_tokens, points)[there])
    return Plot(
        id="selection",
        title=title,
        note=note,
        variants=[
            Variant(
                label="Share of rounds",
                x_title=TOKENS_AXIS,
                y_title="share of rounds",
                x=x,
                traces=_drafter_traces(trace, shares, "area", skip_unused=True),
            ),
            Variant(
                label="Probability when selected",
                x_title=TOKENS_AXIS,
                y_title="selection probability",
                x=x,
                traces=_drafter_traces(trace, means, "line", skip_unused=True),
            ),
        ],
    )


def _drafter_traces(
    trace: Trace,
    values: NDArray[np.floating[Any]],
    kind: Literal["line", "area"],
    *,
    skip_unused: bool = False,
) -> list[PlotTrace]:
    """Return a trace per column; the column after the drafters, if any, is "no drafter"."""
    names = [*trace.drafter_ids, "no drafter"][: values.shape[1]]
    return [
        PlotTrace(
            name=name,
            kind=kind,
            color="none" if index == len(trace.drafter_ids) else f"drafter-{index}",
            y=rounded_or_none(column),
        )
        for index, (name, column) in enumerate(zip(names, values.T, strict=True))
        if not skip_unused or np.nansum(column) > 0
    ]


def _length_plot(trace: Trace, part: _Slice, stream: int | None, points: int) -> Plot:
    title = "Tokens per verification each drafter would give"
    note = (
        "Expected acceptance length over all scored windows, whoever was played, bonus token "
        f"included, {MOVING}. The thick line is what was played. Triangles mark new weights."
    )
    num_scored = trace.windows.num_scored[part.is_window]
    if not num_scored.size:
        empty = "no scored windows in the log"
        return Plot(id="length", title=title, note=note, variants=[], empty=empty)
    points = num_bins(part.num_tokens, int(num_scored.max(axis=1).sum()), points)
    bins = bins_of(part.window_token, part.num_tokens, points)
    x = rounded(bin_centres(part.num_tokens, points))
    played = binned_means(
        bins_of(part.round_token, part.num_tokens, points),
        trace.rounds.num_emitted_tokens[part.is_round][:, None],
        np.ones((part.round_token.size, 1), dtype=np.int32),
        points,
    )
    played_trace = PlotTrace(
        name="played", kind="line", color="played", y=rounded_or_none(played[:, 0])
    )
    variants = []
    for label, sums in (
        ("Exact estimator", trace.windows.exact_length),
        ("Published estimator", trace.windows.published_length),
    ):
        means = binned_means(bins, sums[part.is_window], num_scored, points)
        traces = [*_drafter_traces(trace, means, "line"), played_trace]
        traces += _version_marks(trace, part, stream, means)
        variants.append(
            Variant(
                label=label,
                x_title=TOKENS_AXIS,
                y_title="tokens per verification",
                x=x,
                traces=traces,
            )
        )
    return Plot(id="length", title=title, note=note, variants=variants)


def _version_marks(
    trace: Trace, part: _Slice, stream: int | None, means: NDArray[np.float64]
) -> list[PlotTrace]:
    """Return triangles on the drafters' own lines where their weights changed."""
    seen: set[tuple[str, str]] = set()
    marks: list[tuple[float, float, str, str]] = []
    for change in trace.version_changes:
        key = (change.stream, change.drafter_id)
        is_first = key not in seen
        seen.add(key)
        if is_first or (stream is not None and change.stream != trace.streams[stream]):
            continue
        token = change.token + int(part.request_shift[_request_at(trace, change.token)])
        row = int(bins_of(np.array([token]), part.num_tokens, means.shape[0])[0])
        drafter = trace.drafter_ids.index(change.drafter_id)
        height = means[row, drafter]
        text = f"{change.drafter_id} version {change.weights_version} in {change.stream}"
        if np.isfinite(height):
            marks.append((float(token), float(height), text, f"drafter-{drafter}"))
    if not marks:
        return []
    step = -(-len(marks) // MAX_VERSION_MARKS)
    tokens, heights, texts, colors = zip(*marks[::step], strict=True)
    return [
        PlotTrace(
            name="new weights",
            kind="marks",
            color=list(colors),
            x=list(tokens),
            y=rounded_or_none(np.array(heights)),
            text=list(texts),
        )
    ]


def _request_at(trace: Trace, token: int) -> int:
    row = int(np.searchsorted(trace.rounds.token, token, side="right")) - 1
    return int(trace.rounds.request[max(row, 0)])


def _cumulative_plot(
    rounds: ComparableRounds, best: Hindsight | None, part: _Slice, points: int
) -> Plot:
    title = "Cumulative regret of what was played"
    note = (
        "Upwards: the comparator would have earned more by here. Downwards: selection beat it. "
        "Comparators know the whole log beforehand."
    )
    if best is None:
        empty = "no rounds that can be compared"
        return Plot(id="regret", title=title, note=note, variants=[], empty=empty)
    rows = np.unique(np.linspace(0, rounds.num_rounds - 1, points).astype(np.int64))
    token = rounds.token[rows] + part.request_shift[rounds.request[rows]]
    tokens_traces: list[PlotTrace] = []
    loss_traces: list[PlotTrace] = []
    drawn = [name for name in best.name_to_sequence if name not in NOT_DRAWN]
    for index, name in enumerate(drawn):
        sequence = best.name_to_sequence[name]
        found = regret(rounds, sequence)
        for values, traces in ((found.tokens, tokens_traces), (found.loss, loss_traces)):
            y = rounded_or_none(np.cumsum(values)[rows])
            traces.append(PlotTrace(name=name, kind="line", color=f"comparator-{index}", y=y))
    variants = [
        Variant(label=label, x_title=TOKENS_AXIS, y_title=y_title, x=rounded(token), traces=traces)
        for label, y_title, traces in (
            ("Tokens", "regret (tokens)", tokens_traces),
            ("Loss", "regret (loss)", loss_traces),
        )
    ]
    return Plot(id="regret", title=title, note=note, variants=variants)


def _dynamic_plot(rounds: ComparableRounds, best: Hindsight | None) -> Plot:
    title = "Dynamic regret by number of switches allowed"
    note = (
        "Regret against the best sequence with at most S switches. Where the curve bends is how "
        "often the best drafter really changed; to the right, comparators fit noise."
    )
    if best is None:
        empty = "no rounds that can be compared"
        return Plot(id="dynamic", title=title, note=note, variants=[], empty=empty)
    loss = rounds.played_losses.sum() - best.switching_losses
    name_to_switches = {switching_name(count): count for count in (0, *SWITCHES_SHOWN)}
    drawn = [name for name in best.name_to_sequence if name in name_to_switches]
    sequences = [best.name_to_sequence[name] for name in drawn]
    tokens = [regret(rounds, sequence).tokens.sum() for sequence in sequences]
    token_variant = _by_switches(
        "Tokens",
        [name_to_switches[name] for name in drawn],
        np.array(tokens),
        [f"path length {path_length(sequence):,}" for sequence in sequences],
    )
    every = list(range(loss.size))
    loss_variant = _by_switches("Loss", every, loss, [f"at most {count}" for count in every])
    return Plot(id="dynamic", title=title, note=note, variants=[token_variant, loss_variant])


def _by_switches(
    label: str, num_switches: list[int], values: NDArray[np.float64], text: list[str]
) -> Variant:
    y = rounded_or_none(values)
    return Variant(
        label=label,
        x_title="switches allowed",
        y_title=f"regret ({label.lower()})",
        x=[float(count) for count in num_switches],
        traces=[PlotTrace(name="regret", kind="dots", color="comparator-0", y=y, text=text)],
    )
