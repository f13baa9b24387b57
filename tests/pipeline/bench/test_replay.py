"""The benchmark's log is a valid one, and its numbers are what they claim to be."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from learner.selection import policy_names
from pipeline.bench.replay import ReplayBench, run_replay_bench, with_interval
from pipeline.bench.replay_log import LogShape, write_synthetic_log
from replay.analysis import Analysis, analyse

SHAPE = LogShape(
    num_windows=6000,
    num_drafters=4,
    num_speculative_tokens=3,
    mean_request_tokens=200,
    regime_tokens=150,
    requests_per_file=5,
)


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Analysis:
    folder = tmp_path_factory.mktemp("log")
    count = write_synthetic_log(folder, SHAPE, np.random.default_rng(0))
    found = analyse(folder, np.random.default_rng(0), policies=["normal_hedge", "fixed_share"])
    assert found.summary.num_windows == count >= SHAPE.num_windows
    return found


def test_the_synthetic_log_is_whole_and_agrees_with_itself(analysis: Analysis) -> None:
    summary = analysis.summary
    assert summary.notes == ()
    assert summary.log.problems == ()
    check = summary.check
    assert check.num_disagreements == 0
    assert check.num_checked == check.num_rounds
    assert check.num_selections_checked == check.num_selections > 1000


def test_the_synthetic_log_has_what_replay_is_for(analysis: Analysis) -> None:
    summary = analysis.summary
    assert summary.log.num_files > 4 == len(summary.streams)
    assert summary.log.num_events > 3 * summary.total.num_requests
    logged, tracking = summary.policies
    assert logged.ratio == pytest.approx(1.0, abs=0.02)
    assert tracking.ratio is not None and tracking.ratio > 1.02


def test_the_numbers_that_are_asked_for_are_written(tmp_path: Path) -> None:
    output = io.StringIO()
    options = ReplayBench(num_windows=20_000, num_policy_windows=10_000, num_repeats=2)
    file = tmp_path / "replay.json"
    result = run_replay_bench(options, json_file=file, console=Console(file=output, width=120))
    assert json.loads(file.read_text()) == result
    for key in (
        *("slowest_policy_windows_per_second", "default_windows_per_second"),
        *("normal_hedge_windows_per_second", "scan_seconds_10m"),
    ):
        assert result[f"{key}_low"] + result[f"{key}_high"] > 0
        assert result[f"{key}_low"] <= result[key] <= result[f"{key}_high"]
    assert result["report_seconds_10m"] > result["scan_seconds_10m"] > 0
    assert 5e7 < result["report_peak_bytes_10m"] < 2e9
    assert result["report_vs_scan"] > 1
    names = [row["policy"] for row in result["table"]]
    assert names == ["fixed:drafter-0", *policy_names()]
    rates = [row["windows_per_second"] for row in result["table"]]
    assert result["slowest_policy_windows_per_second"] == min(rates)
    assert all(name in output.getvalue() for name in names)


def test_intervals_are_those_of_students_distribution() -> None:
    found = with_interval("x", [1.0, 2.0, 3.0])
    assert found["x"] == 2.0
    assert found["x_high"] == pytest.approx(2.0 + 4.30 / np.sqrt(3))
    assert with_interval("x", [1.0]) == {"x": 1.0, "x_low": None, "x_high": None}
