"""Prompt sets in miniature: every file that ``read_domains`` wants, of letters only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.bench.domains import GSM8K, MBPP, PUBMEDQA, SPEC_BENCH, SPIDER

NUM_PROMPTS = 20
DATABASES = ("a", "b", "c", "d", "e", "f")


def words(domain: str, number: int) -> str:
    """Return a prompt that no other call returns."""
    return f"{domain} {chr(ord('a') + number % 26)}{chr(ord('a') + number // 26)}"


def write_domain_files(folder: Path) -> Path:
    """Write all sets and return the folder."""
    count = range(NUM_PROMPTS)
    mbpp = [{"prompt": words("code", n), "code": "pass"} for n in count]
    (folder / MBPP).write_text(json.dumps(mbpp))
    write_lines(folder / GSM8K, [{"question": words("maths", n), "answer": "1"} for n in count])
    spider = [
        {"db_id": database, "schema": f"t{database}(x)", "question": words("sql", n), "query": "q"}
        for database in DATABASES
        for n in range(5)
    ]
    write_lines(folder / SPIDER, spider)
    pubmed = [{"question": words("medicine", n), "context": f"context {n}"} for n in count]
    write_lines(folder / PUBMEDQA, pubmed)
    spec_bench = [
        {"category": category, "turns": [words(category, n)]}
        for category in ("qa", "translation", "summarization", "rag")
        for n in count
    ]
    write_lines(folder / SPEC_BENCH, spec_bench)
    return folder


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
