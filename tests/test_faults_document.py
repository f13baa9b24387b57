"""The document of faults names every case once, and only tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parent
DOCUMENT = (TESTS.parent / "docs" / "faults.md").read_text()
GROUP_TO_LAST = {"A": 22, "B": 12, "C": 11, "D": 12, "E": 13, "H": 9, "I": 9}
"""Cases that must have a row; others may have one."""

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
NAMED_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows() -> list[tuple[str, str, str]]:
    """Return id, case, and what covers it."""
    found = re.findall(r"^\| ([A-I]\d+) \| (.+?) \| (.+) \|$", DOCUMENT, re.MULTILINE)
    lines = [line for line in DOCUMENT.splitlines() if re.match(r"\| [A-I]\d", line)]
    assert len(found) == len(lines), "a row has another number of cells"
    return found


@cache
def names_in(file: str) -> frozenset[str]:
    """Return the names of the test functions of a file; none if there is no such file."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, FUNCTIONS)]
    return frozenset(node.name for node in functions if node.name.startswith("test_"))


def test_every_case_has_exactly_one_row() -> None:
    ids = [case for case, _, _ in rows()]
    assert len(set(ids)) == len(ids)
    wanted = {f"{group}{n}" for group, last in GROUP_TO_LAST.items() for n in range(1, last + 1)}
    assert wanted - set(ids) == set()


def test_every_row_names_a_test_or_a_reason() -> None:
    for case, _, covered in rows():
        reason = NAMED_TEST.sub("", covered).replace("<br>", "").strip()
        assert NAMED_TEST.search(covered) or reason.endswith("."), case


def test_every_named_test_exists() -> None:
    named = NAMED_TEST.findall(DOCUMENT)
    assert len(named) == DOCUMENT.count(".py::"), "a test is named in another form"
    assert len(named) > 100
    assert [f"{file}::{name}" for file, name in named if name not in names_in(file)] == []


def test_cases_that_tests_cite_are_documented_with_that_test() -> None:
    """A docstring that begins with case ids belongs into the rows of those cases."""
    case_to_covered = {case: covered for case, _, covered in rows()}
    for path in TESTS.rglob("test_*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, FUNCTIONS) and node.name.startswith("test_"):
                for case in cited(ast.get_docstring(node) or ""):
                    if case in case_to_covered:
                        assert node.name in case_to_covered[case], f"{node.name} cites {case}"


def cited(docstring: str) -> list[str]:
    """Return the case ids before the first full stop or colon."""
    head = re.match(r"(?:Fault )?([A-I]\d+(?:, [A-I]\d+)*)[:.]", docstring)
    return head[1].split(", ") if head else []
