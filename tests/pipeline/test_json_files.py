"""JSON results are whole or not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.json_files import OutputError, write_json


def test_values_are_read_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    for values in ({"a": 1.5, "b": [None, "é"]}, {"a": 2}):
        write_json(path, values)
        assert json.loads(path.read_text(encoding="utf-8")) == values
    assert list(tmp_path.iterdir()) == [path]


def test_invalid_folder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "no" / "numbers.json"
    with pytest.raises(OutputError, match=r"numbers\.json: cannot be written .*a folder that"):
        write_json(path, {"a": 1})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}])
def test_invalid_values_leave_the_old_file_and_nothing_else(tmp_path: Path, value: object) -> None:
    path = tmp_path / "numbers.json"
    write_json(path, {"a": 1})
    with pytest.raises((ValueError, TypeError)):
        write_json(path, {"a": value})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
