"""The prompts of MBPP."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.mbpp import read_mbpp
from pipeline.prompts import PromptsError


def test_prompts_come_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mbpp.json"
    path.write_text(json.dumps([{"prompt": "b", "code": "x"}, {"prompt": "a"}]))
    assert read_mbpp(path) == ["b", "a"]


def test_invalid_missing_file_is_named_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"absent\.json: No such file.*--prompts"):
        read_mbpp(tmp_path / "absent.json")


@pytest.mark.parametrize("text", ["[", "3", '["a"]', '[{"text": "a"}]', '{"prompt": "a"}'])
def test_invalid_files_of_another_shape_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mbpp.json"
    path.write_text(text)
    with pytest.raises(PromptsError, match=r"mbpp\.json: not a JSON array of objects"):
        read_mbpp(path)
