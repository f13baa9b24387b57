"""The statistics and the plan of the vLLM benchmark; the engines themselves are in integration."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.bench.vllm import benchmark
from pipeline.bench.vllm.benchmark import METHODS, VllmBench, engine_arguments, run_vllm_bench
from pipeline.bench.vllm.prompts import PromptSet, blocks
from pipeline.bench.vllm.result import (
    DRAFTLOOP,
    LEARNING,
    NGRAM,
    NONE,
    SUFFIX,
    Served,
    VllmBenchError,
    equal_share,
    summary,
    table,
)
from pipeline.settings import ModelSettings, Settings

SETS = ("left", "right")
METHOD_TO_SPEED = {NONE: 50.0, NGRAM: 60.0, SUFFIX: 80.0, DRAFTLOOP: 100.0, LEARNING: 90.0}


def served(method: str, ordering: int, concurrency: int, speed: float) -> Served:
    rng = np.random.default_rng([ordering, concurrency])
    requests = []
    for index in range(8):
        size = int(rng.integers(40, 60))
        name = SETS[index % 2]
        seconds = size / speed * float(rng.uniform(0.9, 1.1))
        requests.append(
            {
                "set": name,
                "index": index,
                "token_ids": list(range(size)),
                "seconds": seconds,
                "block_seconds": 4 * 50 / speed,
            }
        )
    counters = {"own_seconds/draft": 1.0, "own_seconds/take_in": 0.5, "step_seconds/": 10.0}
    return Served(
        method=method,
        ordering=ordering,
        concurrency=concurrency,
        requests=requests,
        counters=counters if method == DRAFTLOOP else {},
    )


@pytest.fixture
def passes() -> list[Served]:
    return [
        served(method, ordering, concurrency, speed)
        for method, speed in METHOD_TO_SPEED.items()
        for ordering in range(3)
        for concurrency in (1, 4)
    ]


def test_ratios_are_to_the_best_and_lie_in_their_intervals(passes: list[Served]) -> None:
    found = summary(passes, SETS, np.random.default_rng(0))
    assert found["vs_best_builtin_1"] == pytest.approx(100 / 80, rel=0.05)
    assert found["vs_none_4"] == pytest.approx(2.0, rel=0.05)
    assert found["worst_set_vs_best_builtin"] == pytest.approx(100 / 80, rel=0.1)
    assert found["learning_second_half_vs_best_builtin_1"] == pytest.approx(90 / 80, rel=0.1)
    assert found["overhead_share_1"] == pytest.approx(0.15)
    for key in [key for key in found if f"{key}_low" in found]:
        assert found[f"{key}_low"] <= found[key] <= found[f"{key}_high"]


def test_what_was_not_measured_has_no_key(passes: list[Served]) -> None:
    few = [one for one in passes if one.method in (NONE, DRAFTLOOP) and one.concurrency == 1]
    assert summary(few, SETS, np.random.default_rng(0)) == {}
    assert len(table(few, METHODS, SETS)) == 2


def test_equal_answers_are_counted_against_no_speculation(passes: list[Served]) -> None:
    assert equal_share(passes, SUFFIX) == 1.0
    other = served(NGRAM, 0, 1, 60.0)
    requests = [dict(one) for one in other.requests]
    requests[0]["token_ids"] = [1]
    changed = Served(method="other", ordering=0, concurrency=1, requests=requests)
    assert equal_share([*passes, changed], "other") == pytest.approx(7 / 8)


def test_the_table_is_json(passes: list[Served]) -> None:
    rows = table(passes, METHODS, SETS)
    assert [row["method"] for row in rows] == [*METHODS, *METHODS]
    json.dumps(rows)


def test_passes_share_no_prompt_and_orderings_only_change_the_order() -> None:
    sets = [
        PromptSet(name=name, train=(), test=tuple(f"{name} {i}" for i in range(6))) for name in SETS
    ]

    def prompts(first: int, ordering: int, *, is_mixed: bool) -> list[str]:
        made = blocks(sets, first=first, count=3, ordering=ordering, is_mixed=is_mixed)
        return [str(one["prompt"]) for block in made for one in block]

    first, second = prompts(0, 0, is_mixed=True), prompts(3, 0, is_mixed=False)
    assert not set(first) & set(second)
    assert sorted(prompts(0, 1, is_mixed=True)) == sorted(first)
    assert {one.split()[0] for one in first[:2]} == set(SETS)
    assert {one.split()[0] for one in second[:3]} in ({"left"}, {"right"})
    with pytest.raises(ValueError, match="6 test prompts, needed 7"):
        blocks(sets, first=4, count=3, ordering=0, is_mixed=False)


def test_every_method_gets_the_same_number_of_tokens_to_draft() -> None:
    bench = VllmBench(data=Path(), python=Path(), num_speculative_tokens=5)
    found = {method: engine_arguments(bench, method) for method in METHODS}
    assert found[NONE]["speculative_config"] is None
    others = [found[one]["speculative_config"] for one in METHODS if one != NONE]
    assert [one["num_speculative_tokens"] for one in others] == [5] * 4


ENGINE = """#!{python}
import json, sys
job = json.load(open(sys.argv[4]))
assert sys.argv[1:4] == ["-P", "-m", "pipeline.bench.vllm.runner"], sys.argv
passes = []
for one in job["passes"]:
    requests = [
        {{
            "set": p["set"],
            "index": p["index"],
            "token_ids": [1, 2],
            "seconds": 0.5,
            "block_seconds": 1.0,
        }}
        for block in one["blocks"]
        for p in block
    ]
    passes.append({{"concurrency": one["concurrency"], "requests": requests, "counters": {{}}}})
json.dump({{"passes": passes}}, open(sys.argv[5], "w"))
sys.exit({status})
"""


def fake_vllm(folder: Path, *, status: int = 0) -> Path:
    """Return an interpreter that serves any job at once."""
    file = folder / "python"
    file.write_text(ENGINE.format(python=sys.executable, status=status))
    file.chmod(0o755)
    return file


@pytest.fixture(autouse=True)
def any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "resolve_target", lambda path, cache: Path(path))


@pytest.fixture
def two_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [
        PromptSet(name=name, train=(), test=tuple(f"{name} {i}" for i in range(9))) for name in SETS
    ]
    monkeypatch.setattr(benchmark, "read_prompt_sets", lambda folder: sets)


def plan(tmp_path: Path, python: Path) -> VllmBench:
    methods = (NONE, NGRAM, SUFFIX, DRAFTLOOP)
    return VllmBench(
        data=tmp_path,
        python=python,
        work=tmp_path / "work",
        num_prompts=3,
        num_orderings=2,
        num_steps=0,
        methods=methods,
    )


@pytest.mark.usefixtures("two_sets")
def test_a_whole_run_writes_every_key_that_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "vllm.json"
    console = Console(file=io.StringIO(), width=300)
    run_vllm_bench(
        Settings(model=ModelSettings(path=str(tmp_path))),
        plan(tmp_path, fake_vllm(tmp_path)),
        console=console,
        json_file=file,
    )
    found = json.loads(file.read_text())
    keys = ("vs_best_builtin_1", "vs_best_builtin_4", "vs_none_16", "worst_set_vs_best_builtin")
    for key in keys:
        assert found[key] == found[f"{key}_low"] == found[f"{key}_high"] == 1.0
    assert len(found["table"]) == 12
    assert found["num_orderings"] == 2


@pytest.mark.usefixtures("two_sets")
def test_an_engine_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(VllmBenchError, match=r"none: the engine failed, see .*engine.log"):
        run_vllm_bench(
            Settings(model=ModelSettings(path=str(tmp_path))),
            plan(tmp_path, fake_vllm(tmp_path, status=3)),
            console=Console(quiet=True),
            json_file=None,
        )


def test_without_vllms_environment_the_cure_is_told(tmp_path: Path) -> None:
    bench = VllmBench(data=tmp_path, python=tmp_path / "python")
    with pytest.raises(VllmBenchError, match="make vllm-venv"):
        run_vllm_bench(Settings(), bench, console=Console(quiet=True), json_file=None)
