"""``docs/events.md`` is right: its snippet runs, and its tables name every field."""

from __future__ import annotations

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from schemas import topics
from schemas.arrow import events_to_table, write_table
from tests.schemas.builders import make_event, make_logged, make_policy, make_release

DOCUMENT = (Path(__file__).parents[2] / "docs" / "events.md").read_text(encoding="utf-8")
MESSAGES = [make_event(with_content=True), make_policy(), make_release()]


def section(title: str) -> str:
    """Return the text under a heading."""
    return re.split(r"^## ", DOCUMENT.split(f"\n## {title}\n")[1], flags=re.MULTILINE)[0]


def field_names(message: Any) -> set[str]:
    """Return the names of all fields, nested ones too."""
    names = {field.name for field in fields(message)}
    for name in list(names):
        child = getattr(message, name)
        if is_dataclass(child):
            names |= field_names(child)
    return names


def test_the_snippet_reads_a_log_with_plain_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "events" / "date=2026-03-29" / "hour=01"
    folder.mkdir(parents=True)
    events = [make_event(sequence=sequence, num_windows=4) for sequence in range(3)]
    write_table(events_to_table(make_logged(events)), folder / "part.parquet")
    (folder / "_being_written.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    snippet = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)[0]
    namespace: dict[str, Any] = {}
    exec(compile(snippet, "docs/events.md", "exec"), namespace)
    assert namespace["scores"].shape == (4, 4, 3)
    assert namespace["scores"].tobytes() == events[0].windows.acceptance_probability.tobytes()
    assert "mean acceptance length" in capsys.readouterr().out


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_field_is_in_the_table_of_its_message(message: Any) -> None:
    text = section(type(message).__name__)
    missing = {name for name in field_names(message) if not re.search(rf"\b{name}\b", text)}
    # The two parts of a watermark are described where it first occurs.
    assert missing <= {"partition_to_offset", "worker_to_sequence"}


def test_every_topic_is_named() -> None:
    for name, topic in vars(topics).items():
        if name.isupper():
            assert f"`{topic}`" in DOCUMENT
