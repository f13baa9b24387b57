"""Plots carry few, finite, true numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replay.analysis import MAX_STREAMS, Analysis, analyse
from replay.plot_data import Plot, Variant, View
from replay.plots import MAX_POINTS, report_views, views_to_json
from tests.replay.logs import rich_events
from tests.replay.synthetic import log, make_request, write_log


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    data = tmp_path_factory.mktemp("rich")
    write_log(data, log(rich_events()))
    return analyse(data, np.random.default_rng(0))


def plot(view: View, name: str) -> Plot:
    return next(plot for plot in view.plots if plot.id == name)


def variant(view: View, name: str, index: int = 0) -> Variant:
    return plot(view, name).variants[index]


def test_there_is_a_view_of_all_and_one_per_stream(analysis: Analysis) -> None:
    views = report_views(analysis)
    assert views[0].label == "All streams"
    assert {view.label for view in views[1:]} == set(analysis.trace.streams)


def test_one_stream_needs_one_view(tmp_path: Path) -> None:
    write_log(tmp_path, log([make_request()]))
    assert len(report_views(analyse(tmp_path, np.random.default_rng(0)))) == 1


def test_shares_add_up_to_one(analysis: Analysis) -> None:
    for view in report_views(analysis):
        shares = variant(view, "selection").traces
        total = np.array([trace.y for trace in shares], dtype=float).sum(axis=0)
        assert np.allclose(total, 1.0, atol=1e-3)


def test_the_mean_of_a_drafters_line_is_its_mean_in_the_table(analysis: Analysis) -> None:
    view = report_views(analysis)[0]
    for row in analysis.summary.drafters:
        if row.stream is None:
            line = next(t for t in variant(view, "length").traces if t.name == row.drafter_id)
            values = [value for value in line.y if value is not None]
            assert np.mean(values) == pytest.approx(row.exact_length, rel=0.1)


def test_a_drafter_has_no_line_before_it_joined(analysis: Analysis) -> None:
    lines = {t.name: t.y for t in variant(report_views(analysis)[0], "length").traces}
    assert lines["hydra-maths"][0] is None
    assert lines["hydra-maths"][-1] is not None
    assert None not in lines["suffix"]


def test_cumulative_regret_ends_at_the_regret_of_the_table(analysis: Analysis) -> None:
    view = report_views(analysis)[0]
    name_to_row = {r.comparator: r for r in analysis.summary.regrets if r.stream is None}
    for index, quantity in enumerate(("tokens", "loss")):
        for trace in variant(view, "regret", index).traces:
            expected = getattr(name_to_row[trace.name], quantity)
            assert trace.y[-1] == pytest.approx(expected, rel=1e-3)


def test_dynamic_regret_grows_with_the_switches_allowed(analysis: Analysis) -> None:
    shown = variant(report_views(analysis)[0], "dynamic", 1)
    values = [value for value in shown.traces[0].y if value is not None]
    assert values == sorted(values)
    assert shown.x[0] == 0.0 and shown.x[-1] == 64.0


def test_new_weights_are_marked_on_the_line_of_their_drafter(analysis: Analysis) -> None:
    for view in report_views(analysis):
        marks = [t for t in variant(view, "length").traces if t.kind == "marks"]
        texts = [text for trace in marks for text in trace.text or []]
        # Five new versions of one head and one of the other after it joined, in three streams.
        expected = [c for c in analysis.trace.version_changes if c.weights_version > 0]
        first = {(c.stream, c.drafter_id) for c in analysis.trace.version_changes}
        assert len(first) == 12
        if view.label == "All streams":
            assert "hydra-code version 3 in tenant-b.maths" in texts
            assert 0 < len(texts) <= len(expected)
        else:
            assert texts and all(text.endswith(view.label) for text in texts)


def test_the_token_axis_of_a_stream_is_its_own(analysis: Analysis) -> None:
    for view in report_views(analysis)[1:]:
        row = next(r for r in analysis.summary.streams if r.stream == view.label)
        for name in ("selection", "length", "regret"):
            x = variant(view, name).x
            assert 0 <= x[0] < x[-1] <= row.num_tokens
            assert x[-1] > 0.9 * row.num_tokens


def test_long_logs_are_thinned_out(tmp_path: Path) -> None:
    one = make_request(num_tokens=1500)
    events = [replace(one, sequence=i, event_id=f"e{i}", request_id=f"r{i}") for i in range(20)]
    write_log(tmp_path, log(events))
    views = report_views(analyse(tmp_path, np.random.default_rng(0)))
    for each in views[0].plots:
        for shown in each.variants:
            assert all(len(trace.y) <= MAX_POINTS for trace in shown.traces)


def test_many_streams_and_drafters_stay_small(tmp_path: Path) -> None:
    events = [
        make_request(
            hit_rates=[0.3] * 22,
            num_tokens=40 + index,
            stream=f"stream-{index:02}",
            request_id=f"r{index}",
            sequence=index,
        )
        for index in range(30)
    ]
    write_log(tmp_path, log(events))
    views = report_views(analyse(tmp_path, np.random.default_rng(0)))
    assert len(views) == 1 + MAX_STREAMS
    assert views[1].label == "stream-29", "the largest come first"
    text = json.dumps(views_to_json(views), allow_nan=False)
    assert len(text) < 2_500_000


def test_an_empty_plot_says_why(tmp_path: Path) -> None:
    event = make_request()
    windows = event.windows
    event = replace(
        event,
        windows=replace(
            windows,
            start=windows.start[:0],
            num_levels=windows.num_levels[:0],
            acceptance_probability=windows.acceptance_probability[:0],
            realised_acceptance=windows.realised_acceptance[:0],
        ),
    )
    write_log(tmp_path, log([event]))
    (view,) = report_views(analyse(tmp_path, np.random.default_rng(0)))
    assert plot(view, "selection").empty is None
    for name in ("length", "regret", "dynamic"):
        assert plot(view, name).empty
        assert plot(view, name).variants == []
