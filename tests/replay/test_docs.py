"""The documentation names every key of the summary."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

from replay.reader import LogSummary, Problem
from replay.summary import (
    CalibrationRow,
    DomainRow,
    DrafterRow,
    OffPolicyRow,
    PolicyRow,
    RegretRow,
    ReleaseRow,
    ReplaySummary,
    RerunCheck,
    StreamRow,
)
from tests.replay.synthetic import log, make_request, write_log

PAGE = Path(__file__).parents[2] / "docs" / "replay.md"


def test_every_key_of_the_json_summary_is_documented() -> None:
    table = PAGE.read_text("utf-8").split("## The summary as JSON")[1]
    for kind in (
        *(LogSummary, Problem, ReplaySummary, StreamRow),
        *(DomainRow, DrafterRow, CalibrationRow, RegretRow, PolicyRow, OffPolicyRow, RerunCheck),
        ReleaseRow,
    ):
        for field in fields(kind):
            assert f"`{field.name}`" in table, f"{kind.__name__}.{field.name}"


def test_the_example_runs(tmp_path: Path) -> None:
    write_log(tmp_path / "data", log([make_request()]))
    example = PAGE.read_text("utf-8").split("```python")[1].split("```")[0]
    example = example.replace('Path("data")', 'tmp_path / "data"')
    example = example.replace('Path("report.html")', 'tmp_path / "report.html"')
    example = example.replace("fixed:suffix", "fixed:drafter-1").split("print(")[0]
    names: dict[str, object] = {"tmp_path": tmp_path}
    exec(compile(example, str(PAGE), "exec"), names)
    assert (tmp_path / "report.html").exists()
