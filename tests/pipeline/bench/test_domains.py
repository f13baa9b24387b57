"""The prompts of seven domains: apart, mixed, and refused in one line where a set is broken."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.bench.domains import (
    FILES,
    GSM8K,
    MAX_DOCUMENT_CHARACTERS,
    PUBMEDQA,
    SPEC_BENCH,
    SPIDER,
    read_domains,
)
from pipeline.prompts import PromptsError
from tests.pipeline.domain_files import DATABASES, write_domain_files, write_lines

NAMES = ["code", "maths", "sql", "medicine", "translation", "summarisation", "retrieval"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_domain_files(tmp_path)


def test_there_are_seven_domains_whose_train_and_test_prompts_are_apart(folder: Path) -> None:
    domains = read_domains(folder)
    assert [domain.name for domain in domains] == NAMES
    for domain in domains:
        assert domain.train
        assert domain.test
        assert not set(domain.train) & set(domain.test)
        assert len(set(domain.train)) == len(domain.train)
    assert [len(domain.train) for domain in domains if domain.name != "sql"] == [11] * 6
    assert domains == read_domains(folder)


def test_no_database_is_in_both_parts_of_sql_and_each_part_mixes_its_databases(
    folder: Path,
) -> None:
    sql = next(domain for domain in read_domains(folder) if domain.name == "sql")

    def databases(prompts: tuple[str, ...]) -> list[str]:
        return [re.findall(r"Tables: t(.)\(", prompt)[0] for prompt in prompts]

    assert set(databases(sql.test)) == {"c", "f"}
    assert set(databases(sql.train)) == set(DATABASES) - {"c", "f"}
    assert databases(sql.train)[:5] == ["a", "b", "d", "e", "a"]
    assert databases(sql.test)[:3] == ["c", "f", "c"]


def test_documents_are_cut_between_words(folder: Path) -> None:
    write_lines(
        folder / SPEC_BENCH,
        [
            {"category": "translation", "turns": ["Translate"]},
            {"category": "summarization", "turns": ["Summarize: " + "word " * 1000]},
            {"category": "rag", "turns": ["x" * 3000]},
        ],
    )
    summarisation, retrieval = read_domains(folder)[-2:]
    (document,) = summarisation.train + summarisation.test
    assert MAX_DOCUMENT_CHARACTERS - 5 <= len(document) <= MAX_DOCUMENT_CHARACTERS
    assert document.endswith(" word")
    assert [len(prompt) for prompt in retrieval.train + retrieval.test] == [3000]


def test_invalid_missing_folder_is_named_with_the_files_it_should_hold(tmp_path: Path) -> None:
    with pytest.raises(PromptsError, match=r"absent: no such folder: .*mbpp_sanitized\.json"):
        read_domains(tmp_path / "absent")


@pytest.mark.parametrize("name", FILES)
def test_invalid_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(PromptsError, match=re.escape(name) + ".*No such file") as caught:
        read_domains(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key"),
    [(GSM8K, "question"), (SPIDER, "schema"), (PUBMEDQA, "context"), (SPEC_BENCH, "turns")],
)
def test_invalid_missing_field_is_named_with_its_line(folder: Path, name: str, key: str) -> None:
    path = folder / name
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace(f'"{key}"', '"other"')
    path.write_text("\n".join(lines))
    with pytest.raises(PromptsError, match=rf"{re.escape(name)}, line 2: missing key '{key}'"):
        read_domains(folder)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: path.write_text(""), "no lines, expected one JSON object each"),
        (lambda path: path.write_text('{"question": '), "line 1: not the expected JSON"),
        (lambda path: path.write_text("3\n"), "line 1: not the expected JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not UTF-8"),
    ],
)
def test_invalid_files_of_another_shape_are_named(
    folder: Path, damage: Callable[[Path], int], reason: str
) -> None:
    damage(folder / GSM8K)
    with pytest.raises(PromptsError, match=rf"gsm8k_test\.jsonl.*{reason}"):
        read_domains(folder)


def test_invalid_spec_bench_without_a_category_names_it(folder: Path) -> None:
    write_lines(folder / SPEC_BENCH, [{"category": "rag", "turns": ["a"]}])
    with pytest.raises(PromptsError, match="no question of category 'translation'"):
        read_domains(folder)
