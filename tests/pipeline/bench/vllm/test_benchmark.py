"""The statistics and the plan of the vLLM benchmark; the engines themselves are in integration."""

from __future__ import annotations

import io
import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pipeline.bench.vllm import benchmark, result
from pipeline.bench.vllm.benchmark import (
    HEAD,
    METHODS,
    VllmBench,
    engine_arguments,
    print_found,
    run_vllm_bench,
)
from pipeline.bench.vllm.engines import Engine
from pipeline.bench.vllm.prompts import DOMAIN_TO_SET, GROUPS, PromptSet, blocks
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
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import ModelSettings, Settings

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
assert job["turn_seconds"] > 0.0
passes = []
for one in job["passes"]:
    requests = []
    for block in one["blocks"]:
        for answer in ("done", "paused"):
            print(answer, flush=True)
            assert sys.stdin.readline()
        requests += [
            {{
                "set": p["set"],
                "index": p["index"],
                "token_ids": [1, 2],
                "seconds": 0.5,
                "block_seconds": 1.0,
            }}
            for p in block
        ]
        with open({turns!r}, "a") as turns:
            print(sys.argv[4].split("/")[-2], one["concurrency"], block[0]["prompt"], file=turns)
    passes.append({{"concurrency": one["concurrency"], "requests": requests, "counters": {{}}}})
json.dump({{"passes": passes}}, open(sys.argv[5], "w"))
if {status}:
    sys.exit({status})
print("done", flush=True)
"""


def fake_vllm(folder: Path, *, status: int = 0) -> Path:
    """Return an interpreter that serves any job at once, and notes who had which turn."""
    file = folder / "python"
    turns = str(folder / "turns")
    file.write_text(ENGINE.format(python=sys.executable, status=status, turns=turns))
    file.chmod(0o755)
    return file


@pytest.fixture(autouse=True)
def any_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "resolve_target", lambda path, cache: Path(path))
    monkeypatch.setattr(result, "NUM_RESAMPLES", 100)


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
    for key in ("float32_equal_share", "equal_share_draftloop", "equal_share_ngram"):
        assert found[key] == 1.0
    assert len(found["table"]) == 12
    assert found["num_orderings"] == 2
    # Block by block every engine has its turn, and another one begins.
    turns = [line.split(" ", 1) for line in (tmp_path / "turns").read_text().splitlines()]
    num_engines = len(found["table"]) // 3
    whole = turns[: num_engines * 2 * (3 + 2 + 2)]
    rounds = [whole[i : i + num_engines] for i in range(0, len(whole), num_engines)]
    assert all(len({block for _, block in one}) == 1 for one in rounds)
    assert all({name for name, _ in one} == {NONE, NGRAM, SUFFIX, DRAFTLOOP} for one in rounds)
    assert {one[0][0] for one in rounds[:num_engines]} == {NONE, NGRAM, SUFFIX, DRAFTLOOP}


@pytest.mark.usefixtures("two_sets")
def test_an_interrupted_benchmark_goes_on_in_the_folder_it_was_given(tmp_path: Path) -> None:
    settings, console = Settings(model=ModelSettings(path=str(tmp_path))), Console(quiet=True)
    bench = plan(tmp_path, fake_vllm(tmp_path))
    first = run_vllm_bench(settings, bench, console=console, json_file=None)
    interrupted = tmp_path / "work" / "ordering-1"
    (interrupted / "done.json").unlink()
    left_over = interrupted / NGRAM / "events"
    left_over.touch()
    kept = tmp_path / "work" / "ordering-0" / NONE / "result.json"
    written = kept.stat().st_mtime_ns
    assert run_vllm_bench(settings, bench, console=console, json_file=None) == first
    assert not left_over.exists()
    assert kept.stat().st_mtime_ns == written
    # Other answers are asked for: nothing of it is what was found.
    run_vllm_bench(settings, replace(bench, max_tokens=8), console=console, json_file=None)
    assert kept.stat().st_mtime_ns > written


def test_the_table_is_whole_on_a_narrow_terminal() -> None:
    names = ("all", *DOMAIN_TO_SET.values(), *GROUPS, "equal_share")
    rows = [
        {"concurrency": 1, "method": method, **dict.fromkeys(names, 123.45), "parts": {}}
        for method in METHODS
    ]
    file = io.StringIO()
    print_found({"table": rows}, Console(file=file, width=80))
    printed = file.getvalue()
    for word in (*METHODS, *names):
        assert word in printed
    assert printed.count("123.45") == len(METHODS) * len(names)
    assert "…" not in printed


@pytest.mark.usefixtures("two_sets")
def test_an_engine_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(VllmBenchError, match=r"\w+: the engine failed, see .*engine.log"):
        run_vllm_bench(
            Settings(model=ModelSettings(path=str(tmp_path))),
            plan(tmp_path, fake_vllm(tmp_path, status=3)),
            console=Console(quiet=True),
            json_file=None,
        )


def test_a_learner_that_does_not_start_is_named_with_its_log(tmp_path: Path) -> None:
    settings = Settings(
        data=tmp_path / "data",
        drafters=(DrafterSettings(drafter_id=HEAD, kind="hydra"),),
        model=ModelSettings(path=str(tmp_path / "nothing")),
    )
    python = fake_vllm(tmp_path)
    engine = Engine(LEARNING, python, settings, {"passes": []}, has_learner=True)
    with closing(engine):
        with pytest.raises(VllmBenchError, match=r"the learner did not start, see .*learner.log"):
            engine.await_start()
        assert "nothing" in (settings.data / "learner.log").read_text()


def test_without_vllms_environment_the_cure_is_told(tmp_path: Path) -> None:
    bench = VllmBench(data=tmp_path, python=tmp_path / "python")
    with pytest.raises(VllmBenchError, match="make vllm-venv"):
        run_vllm_bench(Settings(), bench, console=Console(quiet=True), json_file=None)
