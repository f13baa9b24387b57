"""What the commands of serving show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.commands.serving import in_bytes


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (999, "999 B"), (18_400, "18.4 kB"), (2.5e9, "2.5 GB"), (1.2e15, "1,200 TB")],
)
def test_bytes_are_shown_in_steps_of_a_thousand(value: float, shown: str) -> None:
    assert in_bytes(value) == shown


def test_an_estimate_shows_bytes_and_writes_plain_numbers(tmp_path: Path) -> None:
    out = tmp_path / "estimate.json"
    result = CliRunner().invoke(
        app, ["estimate", "--requests-per-second", "2", "--json", str(out)], env={}
    )
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text())
    lines = dict(line.split(maxsplit=1) for line in result.output.splitlines() if line)
    assert lines.keys() == found.keys()
    assert lines["log_bytes_per_day"].strip() == in_bytes(found["log_bytes_per_day"])
    assert found["events_per_second"] == pytest.approx(10.0, rel=0.1)
