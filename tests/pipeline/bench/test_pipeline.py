"""The pipeline benchmark, in small: every key is there, and nothing is left out of a quantile."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pipeline.bench.events import bench_event
from pipeline.bench.pipeline import PipelineBench, run_pipeline_bench
from pipeline.cli import app
from pipeline.local_broker import local_broker
from schemas.codec import decode_verification_event, encode

KEYS = {
    "encode_windows_per_second",
    "decode_windows_per_second",
    "apply_windows_per_second",
    "end_to_end_share_of_bare",
    "end_to_end_share_of_bare_in_one_process",
    "publish_delay_p99_seconds",
    "emission_share",
}


def test_events_of_the_benchmark_are_valid_and_of_one_size() -> None:
    values = [encode(bench_event(seed, num_windows=5)) for seed in range(2)]
    shapes = {
        decode_verification_event(value).windows.acceptance_probability.shape for value in values
    }
    assert shapes == {(5, 8, 8)}


@pytest.mark.external_service
def test_a_small_run_writes_every_key(tmp_path: Path) -> None:
    events = [bench_event(seed, num_windows=4) for seed in range(4)]
    bench = PipelineBench(num_events=100, num_repeats=1, delay_seconds=0.5)
    with local_broker(tmp_path) as servers:
        console = Console(file=io.StringIO())
        results = run_pipeline_bench(
            events,
            servers,
            bench,
            json_file=tmp_path / "out.json",
            console=console,
            may_delete=True,
        )
    assert json.loads((tmp_path / "out.json").read_text()) == results
    assert results.keys() >= KEYS
    assert all(value > 0.0 for value in results.values())


def test_without_broker_and_package_one_line_says_what_to_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pipeline.local_broker.find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["bench", "pipeline"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "pass --kafka host:port, or pip install noida-db" in result.output
