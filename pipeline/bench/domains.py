"""The prompts of seven domains, from public sets in one folder: what benchmarks serve.

Train and test prompts are disjoint; for SQL not even a database occurs in both. The sets are not
part of the project: ``FILES`` names what the folder must hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from pipeline.mbpp import read_mbpp
from pipeline.prompts import PromptsError

MBPP, GSM8K, SPIDER = "mbpp_sanitized.json", "gsm8k_test.jsonl", "spider_dev_compact.jsonl"
PUBMEDQA, SPEC_BENCH = "pubmedqa_300.jsonl", "spec_bench_question.jsonl"
FILES = (MBPP, GSM8K, SPIDER, PUBMEDQA, SPEC_BENCH)
"""MBPP (sanitized), GSM8K (test), Spider (dev, schema as text), PubMedQA, Spec-Bench."""

TEST_SHARE = 0.45
"""Share of a domain's prompts, its last, that is kept for tests."""

SPIDER_TEST_EVERY = 3
"""Every third database of Spider is for tests only."""

MAX_DOCUMENT_CHARACTERS = 2400
"""Documents to summarise are cut here, so that reading them does not dwarf writing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Domain:
    """One kind of task; its name is the stream of its requests."""

    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]


def read_domains(folder: Path) -> list[Domain]:
    """Return the seven domains, always in the same order.

    Raises:
        PromptsError: If the folder, a file or a field is missing, in one line.
    """
    if not folder.is_dir():
        raise PromptsError(f"{folder}: no such folder: name the one with {', '.join(FILES)}")
    spec_bench = _spec_bench(folder / SPEC_BENCH)
    return [
        _split("code", read_mbpp(folder / MBPP)),
        _split("maths", _prompts(folder / GSM8K, lambda row: row["question"])),
        _sql(folder / SPIDER),
        _split("medicine", _prompts(folder / PUBMEDQA, _medicine_prompt)),
        _split("translation", spec_bench["translation"]),
        _split("summarisation", [_cut(prompt) for prompt in spec_bench["summarization"]]),
        _split("retrieval", spec_bench["rag"]),
    ]


def _split(name: str, prompts: Sequence[str]) -> Domain:
    distinct = list(dict.fromkeys(prompts))
    num_train = round(len(distinct) * (1.0 - TEST_SHARE))
    return Domain(name=name, train=tuple(distinct[:num_train]), test=tuple(distinct[num_train:]))


def _sql(path: Path) -> Domain:
    """Split by database, and mix the databases so that any part of a list holds many."""
    database_to_prompts: dict[str, list[str]] = {}
    for database, prompt in _rows(path, lambda row: (str(row["db_id"]), _sql_prompt(row))):
        database_to_prompts.setdefault(database, []).append(prompt)
    groups = list(database_to_prompts.values())
    test = groups[SPIDER_TEST_EVERY - 1 :: SPIDER_TEST_EVERY]
    train = [group for group in groups if group not in test]
    return Domain(name="sql", train=_mixed(train), test=_mixed(test))


def _mixed(groups: Sequence[Sequence[str]]) -> tuple[str, ...]:
    turns = (prompt for turn in zip_longest(*groups) for prompt in turn if prompt is not None)
    return tuple(dict.fromkeys(turns))


def _sql_prompt(row: Mapping[str, Any]) -> str:
    return f"Tables: {row['schema']}\n\nWrite an SQL query that answers: {row['question']}"


def _medicine_prompt(row: Mapping[str, Any]) -> str:
    return f"{row['context']}\n\nQuestion: {row['question']} Answer and explain briefly."


def _spec_bench(path: Path) -> dict[str, list[str]]:
    """Return the first turns of the categories that are domains here."""
    category_to_prompts: dict[str, list[str]] = {"translation": [], "summarization": [], "rag": []}
    for category, prompt in _rows(path, lambda row: (str(row["category"]), str(row["turns"][0]))):
        if category in category_to_prompts:
            category_to_prompts[category].append(prompt)
    for category, prompts in category_to_prompts.items():
        if not prompts:
            raise PromptsError(f"{path}: no question of category {category!r}")
    return category_to_prompts


def _cut(prompt: str) -> str:
    if len(prompt) <= MAX_DOCUMENT_CHARACTERS:
        return prompt
    return prompt[:MAX_DOCUMENT_CHARACTERS].rsplit(" ", 1)[0]


def _prompts(path: Path, parse: Callable[[Mapping[str, Any]], Any]) -> list[str]:
    return [str(prompt) for prompt in _rows(path, parse)]


def _rows(path: Path, parse: Callable[[Mapping[str, Any]], Any]) -> Iterator[Any]:
    """Yield what ``parse`` makes of each line of JSON."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise PromptsError(f"{path}: {error.strerror}: put the set there ({path.name})") from error
    except ValueError as error:
        raise PromptsError(f"{path}: not UTF-8: {error}") from error
    if not any(line.strip() for line in lines):
        raise PromptsError(f"{path}: no lines, expected one JSON object each")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield parse(json.loads(line))
        except KeyError as error:
            raise PromptsError(f"{path}, line {number}: missing key {error}") from error
        except (ValueError, TypeError, IndexError) as error:
            raise PromptsError(f"{path}, line {number}: not the expected JSON: {error}") from error
