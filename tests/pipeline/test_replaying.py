"""The replay command shows, writes, and refuses before it writes."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.json_files import OutputError
from pipeline.replaying import DEFAULT_POLICIES, ReplayRequest, replay_log
from replay.errors import ReplayError
from tests.replay.logs import rich_events
from tests.replay.synthetic import log, write_log


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("log")
    write_log(folder, log(rich_events(12)))
    return folder


def test_tables_page_and_numbers_tell_the_same_and_twice_the_same(
    folder: Path, tmp_path: Path
) -> None:
    texts = []
    for name in ("first", "second"):
        output = io.StringIO()
        analysis = replay_log(
            folder,
            ReplayRequest(
                report=tmp_path / f"{name}.html",
                png=tmp_path / f"{name}-plots",
                json_file=tmp_path / f"{name}.json",
            ),
            console=Console(file=output, width=120),
        )
        texts.append(output.getvalue().replace(name, "report"))
    assert texts[0] == texts[1]
    assert (tmp_path / "first.json").read_text() == (tmp_path / "second.json").read_text()
    numbers = json.loads((tmp_path / "first.json").read_text())
    total = analysis.summary.total
    assert numbers["total"]["num_requests"] == total.num_requests == 12
    assert f"{total.num_tokens:,}" in texts[0]
    assert f"{total.mean_acceptance_length:.2f}" in texts[0]
    for stream in ("tenant-a.code", "tenant-b.maths", "tenant-c.chat", "all"):
        assert stream in texts[0]
    assert "0 disagreements" in texts[0]
    assert tuple(row["policy"] for row in numbers["policies"]) == DEFAULT_POLICIES
    assert all(policy in texts[0] for policy in DEFAULT_POLICIES)
    assert (tmp_path / "first-plots" / "regret.png").stat().st_size > 5000
    assert "</html>" in (tmp_path / "first.html").read_text()


def test_without_files_asked_for_none_is_written(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    replay_log(folder, ReplayRequest(), console=Console(file=io.StringIO()))
    assert sorted(folder.rglob("*")) == before


def test_invalid_places_are_named(folder: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(ReplayError, match="absent does not exist"):
        replay_log(tmp_path / "absent", ReplayRequest(), console=console)
    with pytest.raises(ReplayError, match=r"/dev/null/x"):
        replay_log(folder, ReplayRequest(report=Path("/dev/null/x")), console=console)
    with pytest.raises(OutputError, match=r"no/numbers\.json"):
        asked = ReplayRequest(json_file=tmp_path / "no" / "numbers.json")
        replay_log(folder, asked, console=console)
