"""A soak in small: everything that the long one does, and all that it counts."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.bench.soak import run_soak
from pipeline.configuration.settings import EventLogSettings, Settings
from tests.integration.broker import blank_broker, kafka_settings

NUM_WINDOWS = 100_000


@pytest.mark.external_service
def test_a_hundred_thousand_windows_are_learned_and_stored_once_and_as_large_as_planned(
    tmp_path: Path,
) -> None:
    with blank_broker(tmp_path) as servers:
        settings = Settings(
            event_log=EventLogSettings(url=f"kafka://{servers}"), kafka=kafka_settings(servers)
        )
        results = run_soak(
            settings,
            NUM_WINDOWS,
            json_file=tmp_path / "soak.json",
            console=Console(file=io.StringIO()),
        )
    assert json.loads((tmp_path / "soak.json").read_text()) == results
    assert results["num_windows"] >= NUM_WINDOWS
    assert results["num_events_learned"] == results["num_rows"] == results["num_events"] > 1000
    for name in ("worker", "learner", "archiver"):
        assert results[f"{name}_memory_megabytes"] > 10
