"""Bad logs through the command line: a clear sentence, partial results marked, never a NaN."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from schemas.columns import COLUMNS
from schemas.events import VerificationEvent
from tests.integration.commands import Commands, open_commands
from tests.replay.logs import rich_events
from tests.replay.synthetic import log, make_request, split, window_rows, write_log
from tests.replay.test_analysis import without_drafters, zero_rounds


@dataclass(frozen=True, slots=True)
class Replay:
    """Runs ``draftloop replay`` on the log in a folder."""

    commands: Commands
    folder: Path

    def __call__(self, *options: str) -> tuple[str, dict[str, Any]]:
        """Return what was printed and the numbers, after checking that both are whole."""
        arguments = ("replay", "log", "--report", "page.html", "--json", "numbers.json", *options)
        status, output, complaint = self.commands.run(self.folder, *arguments)
        assert status == 0, complaint
        text = (self.folder / "numbers.json").read_text()
        page = (self.folder / "page.html").read_text("utf-8")
        tables = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", page, flags=re.DOTALL)
        for shown in (output, text, tables):
            assert not re.search(r"\b(nan|NaN|inf|Infinity|None)\b", shown)
        numbers: dict[str, Any] = json.loads(text)
        assert all(note in page.replace("&#x27;", "'") for note in numbers["notes"][:1])
        return output, numbers

    def refusal(self, *options: str) -> str:
        """Run a replay that must refuse, and return the line that says why."""
        status, output, complaint = self.commands.run(self.folder, "replay", "log", *options)
        lines = [line for line in complaint.splitlines() if line.strip()]
        assert (status, output.strip(), len(lines)) == (2, "", 1), complaint
        return lines[0].removeprefix("draftloop: ")


@pytest.fixture(scope="module")
def commands() -> Iterator[Commands]:
    with open_commands() as opened:
        yield opened


@pytest.fixture
def replay(commands: Commands, tmp_path: Path) -> Replay:
    return Replay(commands, tmp_path)


def write(
    replay: Replay, events: list[VerificationEvent], *, rows_per_file: int = 1000
) -> list[Path]:
    return write_log(replay.folder / "log", log(events), rows_per_file=rows_per_file)


def test_an_unknown_policy_is_refused_with_the_known_ones(replay: Replay) -> None:
    write(replay, [make_request()])
    line = replay.refusal("--policy", "normal_hedge", "--policy", "best")
    assert line.startswith("cannot re-run best: unknown policy 'best', expected one of: fixed:")
    assert "normal_hedge" in line
    line = replay.refusal("--policy", "hedge:learning_speed=1")
    assert "unknown key 'learning_speed', expected one of: learning_rate" in line
    line = replay.refusal("--policy", "hedge:scope=town")
    assert "scope='town', expected request or stream or both" in line


def test_unknown_drafters_and_streams_are_refused_with_the_known_ones(replay: Replay) -> None:
    write(replay, rich_events(6))
    known = "the log has: prompt-lookup, suffix, hydra-code"
    for options in (("--policy", "fixed:eagle"), ("--drafter", "eagle")):
        assert known in replay.refusal(*options)
    line = replay.refusal("--drafter", "suffix", "--policy", "fixed:hydra-code")
    assert line == "fixed:hydra-code is not among the drafters asked for: suffix"
    line = replay.refusal("--stream", "tenant-d.law")
    assert line == (
        "unknown stream 'tenant-d.law', the log has: tenant-a.code, tenant-b.maths, tenant-c.chat"
    )


def test_a_part_of_a_log_is_replayed_with_a_part_of_the_pool(replay: Replay) -> None:
    write(replay, rich_events(12))
    output, numbers = replay(
        *("--stream", "tenant-a.code", "--drafter", "suffix", "--drafter", "hydra-code"),
        *("--policy", "fixed_share:share=0.02", "--policy", "fixed:suffix"),
        *("--num-speculative-tokens", "2"),
    )
    assert numbers["log"]["streams"] == ["tenant-a.code"]
    assert [row["policy"] for row in numbers["policies"]] == [
        "fixed_share:share=0.02",
        "fixed:suffix",
    ]
    assert {row["num_speculative_tokens"] for row in numbers["policies"]} == {2}
    assert all(row["mean_acceptance_length"] <= 3.0 for row in numbers["policies"])
    assert "fixed:suffix" in output


def test_a_log_of_mixed_schema_versions_is_read_and_said(replay: Replay) -> None:
    paths = write(replay, rich_events(12), rows_per_file=4)
    table = pq.read_table(paths[0], partitioning=None)
    old = table.drop_columns([column.name for column in COLUMNS if column.since > 1])
    old = old.set_column(0, "schema_version", pa.array([1] * old.num_rows, pa.int32()))
    pq.write_table(old.replace_schema_metadata({b"draftloop.schema_version": b"1"}), paths[0])
    output, numbers = replay()
    assert numbers["log"]["schema_versions"] == [1, 2]
    assert not numbers["is_partial"] or "incomplete" in numbers["notes"][0]
    assert numbers["total"]["num_requests"] == 12
    assert "Mixed schema versions (1, 2)" in output


def test_a_file_of_a_newer_schema_is_left_out_with_the_cure(replay: Replay) -> None:
    paths = write(replay, rich_events(12), rows_per_file=4)
    table = pq.read_table(paths[1], partitioning=None)
    newer = table.set_column(0, "schema_version", pa.array([99] * table.num_rows, pa.int32()))
    pq.write_table(newer, paths[1])
    _, numbers = replay()
    (problem,) = numbers["log"]["problems"]
    assert "schema_version: found 99" in problem["reason"] and "upgrade" in problem["reason"]
    assert numbers["is_partial"]


def test_a_log_without_scoring_gives_estimates_and_says_so(replay: Replay) -> None:
    events = [
        make_request(num_tokens=150, sequence=index, request_id=f"r{index}") for index in range(12)
    ]
    write(replay, [replace(one, windows=window_rows(one.windows, 0, 0)) for one in events])
    output, numbers = replay("--policy", "fixed:drafter-0")
    assert any("No scoring" in note for note in numbers["notes"])
    assert numbers["policies"][0]["estimated_share"] > 0.9
    assert numbers["off_policy"][0]["doubly_robust"] > 1.0
    assert numbers["regrets"] == []
    assert "estimated from what was played" in output


def test_one_drafter_only_is_said(replay: Replay) -> None:
    write(replay, [make_request(hit_rates=[0.7])])
    output, numbers = replay()
    assert "One drafter only: all comparators are that drafter." in numbers["notes"]
    assert {row["tokens"] for row in numbers["regrets"]} == {0.0}
    assert "One drafter only" in output


@pytest.mark.parametrize(
    ("event", "note"),
    [
        (zero_rounds(), "No rounds"),
        (without_drafters(make_request(no_drafter_share=1.0)), "No drafters"),
    ],
)
def test_a_log_with_nothing_to_compare_is_said(
    replay: Replay, event: VerificationEvent, note: str
) -> None:
    write(replay, [event])
    output, numbers = replay()
    assert any(text.startswith(note) for text in numbers["notes"])
    assert numbers["regrets"] == []
    assert note in output


def test_a_log_cut_in_the_middle_is_marked_as_partial(replay: Replay) -> None:
    events = rich_events(12)
    head, _ = split(events[5], 4)
    events[5] = head
    paths = write(replay, events, rows_per_file=4)
    paths[2].write_bytes(paths[2].read_bytes()[: paths[2].stat().st_size // 2])
    output, numbers = replay()
    assert numbers["is_partial"]
    assert numbers["notes"][0].startswith("Partial: 1 unreadable file")
    assert numbers["notes"][1].startswith("Partial: 1 of 8 requests are incomplete")
    assert "Partial: 1 unreadable file" in output


def test_a_damaged_row_is_named_with_its_place(replay: Replay) -> None:
    paths = write(replay, rich_events(12), rows_per_file=6)
    table = pq.read_table(paths[0], partitioning=None)
    positions = table["num_positions"].to_pylist()
    positions[2] += 1
    at = table.schema.get_field_index("num_positions")
    field = table.schema.field(at)
    pq.write_table(table.set_column(at, field, pa.array(positions, field.type)), paths[0])
    _, numbers = replay()
    (problem,) = numbers["log"]["problems"]
    assert re.match(r"left after 2 events: [\w.-]+/0/2\.num_positions: found", problem["reason"])
    assert numbers["log"]["num_events"] == 8


@pytest.mark.parametrize("content", ["", "not a log"])
def test_what_is_no_log_is_refused(replay: Replay, content: str) -> None:
    assert replay.refusal() == "log does not exist; give the data folder or its events folder"
    (replay.folder / "log").mkdir()
    assert "log holds no events (no *.parquet)" in replay.refusal()
    (replay.folder / "log" / "x.parquet").write_text(content)
    assert "log holds no events: 1 unreadable" in replay.refusal()
