"""Every plot of the page is a PNG file too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from replay.analysis import Analysis, analyse
from replay.errors import ReplayError
from replay.plots import report_views
from replay.png import drawn, look, write_plots
from tests.replay.logs import rich_events
from tests.replay.synthetic import log, make_request, window_rows, write_log
from tests.replay.test_analysis import zero_rounds


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    data = tmp_path_factory.mktemp("rich")
    write_log(data, log(rich_events()))
    return analyse(data, np.random.default_rng(0), policies=["hedge", "fixed:suffix"])


def test_every_plot_and_every_state_of_its_switch_is_a_picture(
    analysis: Analysis, tmp_path: Path
) -> None:
    paths = write_plots(analysis, tmp_path / "new" / "plots")
    assert {path.stem for path in paths} == {
        *("selection", "selection-2", "length", "length-2", "regret", "regret-2"),
        *("dynamic", "dynamic-2", "policies", "policies-2", "calibration"),
    }
    for path in paths:
        picture = imread(path)
        assert picture.shape[1] == 1100
        # Not a white page, and more than axes and letters.
        assert (picture[:, :, :3].min(axis=2) < 0.9).mean() > 0.02, path.name


def test_pictures_show_what_the_page_shows(analysis: Analysis) -> None:
    plots = {plot.id: plot for plot in report_views(analysis)[0].plots}
    length = plots["length"]
    axes = drawn(length, length.variants[0]).axes[0]
    assert axes.get_title(loc="left") == length.title
    labels = axes.get_legend_handles_labels()[1]
    assert set(labels) == {trace.name for trace in length.variants[0].traces}
    policies = plots["policies"]
    bars = drawn(policies, policies.variants[0]).axes[0]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["hedge", "fixed:suffix"]


def test_a_log_with_nothing_to_draw_has_no_pictures(tmp_path: Path) -> None:
    write_log(tmp_path / "log", log([zero_rounds()]))
    found = analyse(tmp_path / "log", np.random.default_rng(0))
    assert write_plots(found, tmp_path / "plots") == []


def test_a_log_without_scoring_has_those_of_what_was_played(tmp_path: Path) -> None:
    event = make_request()
    event = replace(event, windows=window_rows(event.windows, 0, 0))
    write_log(tmp_path / "log", log([event]))
    found = analyse(tmp_path / "log", np.random.default_rng(0))
    names = {path.stem for path in write_plots(found, tmp_path / "plots")}
    assert names == {"selection", "selection-2"}


def test_drafters_are_told_apart_by_colour_and_dashes() -> None:
    looks = [look(f"drafter-{index}") for index in range(22)]
    assert len(set(looks)) == 22
    assert look("none") != look("played")


def test_invalid_place_for_the_pictures_is_refused(analysis: Analysis, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReplayError, match=r"cannot write the plots.*choose another place"):
        write_plots(analysis, tmp_path / "file" / "plots")
