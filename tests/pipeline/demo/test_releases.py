"""The demo shows what is on trial, and what became of every version."""

from __future__ import annotations

import io
from contextlib import closing
from datetime import timedelta
from pathlib import Path

from rich.console import Console

from pipeline.demo.releases import ReleaseReport, Trials
from pipeline.demo.traffic import TrafficStatistics
from pipeline.demo.view import DemoView
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.releases.release_history import RecordedReleases, ReleaseHistory
from schemas.events import ReleaseState
from tests.pipeline.messages import open_log
from tests.schemas.builders import PRODUCED_AT, make_event, make_release

HEAD = "drafter-1"
LIFE = (
    *((0, "live", False), (1, "candidate", True), (1, "shadow", True), (1, "canary", True)),
    *((1, "live", False), (0, "shadow", True), (0, "retired", True)),
    *((2, "candidate", True), (2, "shadow", True)),
)


def test_what_is_on_trial_and_what_was_is_told_from_the_board_and_its_history(
    tmp_path: Path,
) -> None:
    history = ReleaseHistory(str(tmp_path / "run"))
    with closing(open_log(tmp_path, num_partitions=1)) as log:
        board = RecordedReleases(LogReleaseBoard(log, source="test"), history)
        for second, (version, state, is_beside) in enumerate(LIFE):
            release = make_release(
                drafter_id=HEAD,
                version=version,
                state=ReleaseState(state),
                produced_at=PRODUCED_AT + timedelta(seconds=second),
            )
            (board.publish_beside if is_beside else board.publish)(release)
        text = io.StringIO()
        statistics = TrafficStatistics()
        statistics.begin_phase("code")
        statistics.add(make_event())
        with DemoView(Console(file=text, width=200), statistics) as view:
            view.trials = Trials(board)
            view.update()
        assert view.trials.now() == {HEAD: "v2 shadow"}
    assert f"{HEAD} v2 shadow" in text.getvalue()
    report = ReleaseReport(history)
    assert report.results() == {
        HEAD: {
            "num_steps": {
                **{"candidate": 2, "shadow": 3, "canary": 1, "live": 2},
                **{"retired": 1, "rolled_back": 0},
            },
            "live_version": 1,
        }
    }
    table = io.StringIO()
    report.show(Console(file=table, width=80))
    assert HEAD in table.getvalue()
    assert "retired" in table.getvalue()
    assert "rolled" not in table.getvalue()
