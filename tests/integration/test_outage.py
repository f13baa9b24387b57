"""The broker goes away while a worker serves, and comes back: serving goes on, learning resumes.

What it costs in time is measured by ``draftloop bench outage``; here only that it happens.
"""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.bench.outage import OutageBench, run_outage_bench
from tests.integration.kafka_client import forgets_sockets, sockets_freed_here

BENCH = OutageBench(
    outage_seconds=5.0, steady_seconds=2.0, warm_seconds=0.0, capacity=3, most_seconds=120.0
)


@pytest.mark.external_service
@forgets_sockets
def test_serving_goes_on_while_the_broker_is_away_and_learning_resumes_by_itself(
    tmp_path: Path,
) -> None:
    # It raises if serving stops, an event is not accounted for, or learning does not resume.
    with sockets_freed_here():
        result = run_outage_bench(
            BENCH, json_file=tmp_path / "out.json", console=Console(file=io.StringIO())
        )
    assert json.loads((tmp_path / "out.json").read_text()) == result
    assert result["num_rounds_outage"] > 0
    assert result["num_dropped_events"] > 0
    assert result["num_sent_events"] > 0
    assert result["num_emitted_events"] == result["num_sent_events"] + result["num_dropped_events"]
    assert result["p99_ratio_low"] <= result["p99_ratio_high"]
    assert {"memory_growth_share", "learning_resumed_seconds", "policy_arrived_seconds"} <= set(
        result
    )
