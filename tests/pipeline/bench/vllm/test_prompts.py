"""The nine prompt sets of the vLLM benchmark: complete, apart, and refused where one is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.bench.domains import SPEC_BENCH
from pipeline.bench.vllm.prompts import GROUPS, MAX_PROMPT_CHARACTERS, read_prompt_sets
from pipeline.prompts import PromptsError
from tests.pipeline.domain_files import write_domain_files, write_lines


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = write_domain_files(tmp_path)
    categories = [*GROUPS[1:], "writing", "coding"]
    rows = [
        {"category": category, "turns": [f"{category} {number} " + "word " * 600, "more"]}
        for number in range(8)
        for category in categories
    ]
    write_lines(folder / SPEC_BENCH, rows)
    return folder


def test_there_are_nine_sets_and_training_prompts_are_never_measured(folder: Path) -> None:
    sets = read_prompt_sets(folder)
    assert [one.name for one in sets] == ["mbpp", "gsm8k", "spider", *GROUPS]
    for one in sets:
        assert one.train
        assert one.test
        assert not set(one.train) & set(one.test)


def test_the_categories_of_mt_bench_are_one_group_and_long_prompts_are_cut(folder: Path) -> None:
    groups = {one.name: one for one in read_prompt_sets(folder)}
    assert len(groups["mt_bench"].test) + len(groups["mt_bench"].train) == 16
    assert max(map(len, groups["rag"].test)) <= MAX_PROMPT_CHARACTERS


def test_invalid_spec_bench_without_a_group_names_it(folder: Path) -> None:
    lines = (folder / SPEC_BENCH).read_text().splitlines()
    (folder / SPEC_BENCH).write_text("\n".join(one for one in lines if '"qa"' not in one))
    with pytest.raises(PromptsError, match="no question of group 'qa'"):
        read_prompt_sets(folder)
