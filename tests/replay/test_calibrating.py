"""Scores that are wrong are found over a whole log, and right ones raise no alarm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from replay.analysis import Analysis, analyse
from replay.table_plots import table_plots
from schemas.events import AcceptanceRule, DrafterVersion, FinishReason, VerificationEvent
from tests.replay.synthetic import log, make_request, split, write_log


def requests(count: int = 30, **options: object) -> list[VerificationEvent]:
    return [
        make_request(
            rule=AcceptanceRule.SPECULATIVE_SAMPLING,
            num_tokens=120,
            sequence=index,
            request_id=f"r{index}",
            **options,  # type: ignore[arg-type]
        )
        for index in range(count)
    ]


def with_wrong_scores(event: VerificationEvent, drafter: int) -> VerificationEvent:
    """Score a drafter's second level and beyond as if it were hardly ever accepted."""
    values = event.windows.acceptance_probability.copy()
    values[:, 1:, drafter] *= np.float16(0.5)
    return replace(event, windows=replace(event.windows, acceptance_probability=values))


def analysis_of(folder: Path, events: Sequence[VerificationEvent]) -> Analysis:
    write_log(folder, log(events))
    return analyse(folder, np.random.default_rng(0), policies=["hedge", "fixed:drafter-0"])


def test_right_scores_raise_no_alarm(tmp_path: Path) -> None:
    rows = analysis_of(tmp_path, requests()).summary.calibration
    assert {(row.drafter_id, row.level) for row in rows} >= {
        (f"drafter-{drafter}", level) for drafter in range(3) for level in range(1, 3)
    }
    assert not any(row.is_off for row in rows)
    for row in rows:
        if row.num_rounds > 100:
            assert row.ratio is not None and row.ratio_low is not None
            assert row.ratio == pytest.approx(row.realised / row.predicted)
            assert row.ratio_low < 1.0 < (row.ratio_high or 0.0)


def test_wrong_scores_are_an_alarm_that_names_drafter_and_level(tmp_path: Path) -> None:
    summary = analysis_of(tmp_path, [with_wrong_scores(one, 0) for one in requests()]).summary
    assert {row.drafter_id for row in summary.calibration if row.is_off} == {"drafter-0"}
    (note,) = (text for text in summary.notes if text.startswith("Alarm"))
    assert "drafter-0 is accepted" in note and "at level 2" in note


def test_rounds_of_different_pools_are_added_up_by_drafter(tmp_path: Path) -> None:
    pool = tuple(DrafterVersion(drafter_id=i, weights_version=0) for i in ("b", "a"))
    swapped = make_request(
        rule=AcceptanceRule.SPECULATIVE_SAMPLING, drafters=pool, hit_rates=[0.5, 0.9], sequence=1
    )
    plain = make_request(
        rule=AcceptanceRule.SPECULATIVE_SAMPLING, drafters=pool[::-1], hit_rates=[0.9, 0.5]
    )
    rows = analysis_of_two(tmp_path, plain, swapped)
    both = {(row[0], row[1]): row[2] for row in rows[0]}
    for drafter in ("a", "b"):
        alone = sum(row[2] for part in rows[1:] for row in part if row[:2] == (drafter, 1))
        assert both[drafter, 1] == alone


def analysis_of_two(
    folder: Path, first: VerificationEvent, second: VerificationEvent
) -> list[list[tuple[str, int, int]]]:
    second = replace(second, request_id="other")
    found = []
    for name, events in (("both", [first, second]), ("first", [first]), ("second", [second])):
        write_log(folder / name, log(events))
        summary = analyse(folder / name, np.random.default_rng(0)).summary
        found.append([(row.drafter_id, row.level, row.num_rounds) for row in summary.calibration])
    return found


def test_requests_that_were_cut_off_do_not_count_where_they_were_cut(tmp_path: Path) -> None:
    (event,) = requests(1)
    aborted = replace(event, finish_reason=FinishReason.ABORTED)
    assert analysis_of(tmp_path / "aborted", [aborted]).summary.calibration == ()
    head, _ = split(event, 20)
    cut = analysis_of(tmp_path / "cut", [head]).summary.calibration
    whole = analysis_of(tmp_path / "whole", [event]).summary.calibration

    def count(rows: Sequence[object]) -> int:
        return sum(row.num_rounds for row in rows if row.level == 1)  # type: ignore[attr-defined]

    assert 5 <= count(cut) <= 12 < count(whole)


def test_what_the_tables_hold_is_drawn(tmp_path: Path) -> None:
    summary = analysis_of(tmp_path, requests()).summary
    policies, ratios = table_plots(summary)
    lengths, speeds = policies.variants
    assert lengths.traces[0].text == speeds.traces[0].text == ["hedge", "fixed:drafter-0"]
    for value, low, high in zip(
        lengths.traces[0].y, lengths.traces[0].low or [], lengths.traces[0].high or [], strict=True
    ):
        assert value is not None and low is not None and high is not None
        assert low < value < high
    assert lengths.level == pytest.approx(summary.total.mean_acceptance_length, rel=1e-4)
    assert [trace.name for trace in ratios.variants[0].traces] == [
        "drafter-0",
        "drafter-1",
        "drafter-2",
    ]
    assert ratios.variants[0].level == 1.0
