"""The learning benchmark on a tiny random target: real trainer, real engine, every figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.target import Target
from pipeline.bench.learning import jobs, plan, traces
from pipeline.bench.learning.benchmark import bench_result, equality, made_runs, work_folder
from pipeline.bench.learning.costs import RoundSeconds, measured_costs
from pipeline.bench.learning.ground import Ground, asked_prompts
from pipeline.bench.learning.jobs import record_all, run_one, static_rounds, stream_of
from pipeline.bench.learning.keys import Runs
from pipeline.bench.learning.plan import (
    ENSEMBLE,
    GATED,
    GRADIENT,
    SPAWNING,
    STATIC,
    STEPS_PER_EVENT,
    RunSpec,
    planned_runs,
    policy,
)
from pipeline.bench.learning.report import GOALS, show, write_picture
from pipeline.bench.learning.run import NOT_COMPARED, RunResult
from pipeline.bench.learning.streams import AWAY, HOME
from pipeline.bench.learning.traces import RequestTrace, missing_batches, recorded_traces
from pipeline.bench.learning.worker import round_lengths, shuffled
from tests.inference.tiny import plain_greedy
from tests.pipeline.bench.learning.tiny_bench import (
    BENCH,
    CONSOLE,
    SIZE,
    tiny_domains,
    tiny_ground,
    tiny_target,
)

COSTS = RoundSeconds(plain_seconds=0.02, verify_seconds=0.025, draft_seconds=0.003)
ONE_SEED = replace(BENCH, seeds=(1,), has_further=False)


@pytest.fixture(scope="module", autouse=True)
def _fast_learning() -> Iterator[None]:
    """The tiny head has few requests to learn from: it takes longer steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "LEARNING_RATE", 0.02)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parent") / "cache"


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def ground(target: Target, cache: Path) -> Ground:
    return tiny_ground(target, cache)


def made(ground: Ground, cache: Path) -> Runs:
    return made_runs(
        ground, ONE_SEED, COSTS, cache=cache, make_ground=lambda: ground, console=CONSOLE
    )


@pytest.fixture(scope="module")
def runs(ground: Ground, cache: Path) -> Runs:
    return made(ground, cache)


def run(ground: Ground, stream: str, name: str, order: str = "delay:0") -> RunResult:
    return run_one(RunSpec(seed=1, stream=stream, policy=name, order=order), ground, 40)


def test_recorded_answers_are_what_the_bare_target_writes(target: Target, ground: Ground) -> None:
    trace = ground.test[HOME][0]
    alone = plain_greedy(target, [trace.prompt_token_ids.tolist()], SIZE.max_tokens)[0]
    assert trace.token_ids.tolist() == alone
    assert trace.hidden.shape == (SIZE.max_tokens, target.hidden_size)
    assert (trace.top_token_ids[:, 0] == trace.token_ids).all()
    state = torch.from_numpy(trace.hidden.astype(np.float32))
    best = (state @ target.head_rows.T).argmax(-1)
    assert best.tolist() == alone
    mass = np.exp(trace.top_log_probs.astype(np.float32)).sum(-1) + trace.tail_mass
    assert mass == pytest.approx(1.0, abs=5e-3)


def test_an_interrupted_recording_goes_on_where_it_was(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = tiny_domains()[0].train
    decoded: list[int] = []
    decode = traces._decoded

    def counted(one: Target, batch: Sequence[str], most: int) -> list[RequestTrace]:
        if len(decoded) == 1:
            raise KeyboardInterrupt
        decoded.append(len(batch))
        return decode(one, batch, most)

    def recorded() -> list[RequestTrace]:
        return recorded_traces(
            target, prompts, max_tokens=4, cache=tmp_path, what="prompts", console=CONSOLE
        )

    monkeypatch.setattr(traces, "_decoded", counted)
    with pytest.raises(KeyboardInterrupt):
        recorded()
    monkeypatch.setattr(traces, "_decoded", decode)
    assert decoded == [32]
    first = (tmp_path / "learning-traces").iterdir()
    written = {file.name: file.stat().st_mtime_ns for file in first}
    assert len(recorded()) == 40
    for name, time in written.items():
        assert (tmp_path / "learning-traces" / name).stat().st_mtime_ns == time


def test_answers_are_the_same_whoever_records_them(
    target: Target, ground: Ground, tmp_path: Path
) -> None:
    asked = asked_prompts(tiny_domains(), SIZE)[HOME, "train"]
    batches = missing_batches(target, asked, max_tokens=SIZE.max_tokens, cache=tmp_path)
    recorded = record_all(
        batches,
        max_tokens=SIZE.max_tokens,
        cache=tmp_path,
        open_target=tiny_target,
        num_processes=1,
    )
    assert len(list(recorded)) == len(batches) == len(list(tmp_path.rglob("*.safetensors")))
    assert not missing_batches(target, asked, max_tokens=SIZE.max_tokens, cache=tmp_path)
    found = recorded_traces(
        target, asked, max_tokens=SIZE.max_tokens, cache=tmp_path, what="", console=CONSOLE
    )
    expected = [*ground.training, *ground.tuning[HOME]]
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.token_ids, other.token_ids)
        assert np.array_equal(one.hidden, other.hidden)


def test_the_engine_plays_the_rounds_that_the_replay_says_across_swaps(
    target: Target, ground: Ground, cache: Path
) -> None:
    found = equality(target, tiny_domains(), ground, ONE_SEED, cache=cache, console=CONSOLE)
    assert found.num_outputs_equal == found.num_requests == 4
    assert found.num_rounds_equal == found.num_rounds > 8
    assert found.num_swaps > 0


def test_rounds_jump_by_what_was_accepted() -> None:
    assert round_lengths(np.array([2, 9, 9, 0, 1, 0])).tolist() == [3, 1, 2]
    assert round_lengths(np.array([], dtype=np.int64)).tolist() == []


def test_a_request_is_scored_before_anything_is_learned_from_it(ground: Ground) -> None:
    at_once = run(ground, "abrupt", GRADIENT)
    late = run(ground, "abrupt", GRADIENT, "delay:16")
    # Version 0 is the static head, 1 its release after its training.
    assert at_once.versions.tolist() == [1 + t for t in range(40)]
    assert late.versions.tolist() == [max(1, 1 + t - 16) for t in range(40)]
    static = static_rounds(ground)
    served = stream_of(RunSpec(seed=1, stream="abrupt", policy=GRADIENT), ground, 40)
    expected = [
        static[domain][index] for domain, index in zip(served.domains, served.indices, strict=True)
    ]
    assert late.num_rounds[:17].tolist() == expected[:17]


def test_events_that_arrive_twice_and_out_of_order_are_learned_once(ground: Ground) -> None:
    result = run(ground, "abrupt", GRADIENT, "duplicates")
    assert result.facts["num_updates"] == 40 * STEPS_PER_EVENT


def test_every_run_of_a_seed_emits_the_same_tokens(runs: Runs) -> None:
    by_stream: dict[str, set[bytes]] = {}
    for spec, result in runs.results.items():
        by_stream.setdefault(spec.stream, set()).add(result.num_tokens.tobytes())
    assert all(len(found) == 1 for found in by_stream.values())


def test_with_the_gate_nothing_serves_that_was_not_promoted(ground: Ground) -> None:
    result = run(ground, "poison", GATED)
    num_live = int(result.facts["num_live"])
    assert len(set(result.versions.tolist())) <= 2 + 2 * num_live
    assert result.facts["num_shadows"] >= 1


def test_the_ensemble_steps_all_its_experts_on_every_event(ground: Ground) -> None:
    result = run(ground, "stationary", ENSEMBLE)
    assert result.facts["num_updates"] == 40 * STEPS_PER_EVENT
    assert result.facts["num_refused_steps"] == 0


def test_the_second_visit_is_compared_with_the_head_that_left_the_first(runs: Runs) -> None:
    spec = runs.of("recurring", SPAWNING)[0]
    found = runs.results[spec].snapshot_rounds
    served = runs.streams[1, "recurring"]
    compared = [
        visit == 2 and domain == HOME
        for visit, domain in zip(served.visits, served.domains, strict=True)
    ]
    assert ((found != NOT_COMPARED) == compared).all()


def test_a_poisoned_event_has_the_same_tokens_in_another_order(ground: Ground) -> None:
    trace = ground.test[AWAY][0]
    found = shuffled(trace, np.random.default_rng(0))
    assert found.token_ids.tolist() != trace.token_ids.tolist()
    assert sorted(found.token_ids.tolist()) == sorted(trace.token_ids.tolist())
    assert (found.hidden == trace.hidden).all()


def test_all_keys_have_intervals_and_the_tables_every_run(
    runs: Runs, ground: Ground, target: Target, cache: Path, tmp_path: Path
) -> None:
    proof = equality(target, tiny_domains(), ground, ONE_SEED, cache=cache, console=CONSOLE)
    result = bench_result(runs, ground, ONE_SEED, proof, console=CONSOLE)
    for key in (*GOALS, "poison_lowest_window_gate_off"):
        assert result[f"{key}_low"] <= result[key] <= result[f"{key}_high"], key
    table = result["table"]
    rows = {(row["stream"], row["policy"], row["order"]) for row in table["runs"]}
    planned = {(one.stream, one.policy, one.order) for one in planned_runs((1,), has_further=False)}
    assert {row for row in rows if row[1] != STATIC} == planned
    assert all(row["keeps_bound"] for row in table["convex"])
    assert all(row["path_length"] > 0.0 for row in table["convex"])
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    show(result, CONSOLE)
    write_picture(runs, tmp_path / "learning.png")
    assert (tmp_path / "learning.png").stat().st_size > 10_000


def test_finished_runs_are_not_made_again(
    runs: Runs, ground: Ground, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a run was made again")

    lost = next(iter(runs.results))
    folder = work_folder(ground, ONE_SEED, cache)
    before = (folder / lost.file_name).read_bytes()
    monkeypatch.setattr(jobs, "run_one", never)
    again = made(ground, cache)
    assert again.results.keys() == runs.results.keys()
    (folder / lost.file_name).unlink()
    with pytest.raises(AssertionError, match="made again"):
        made(ground, cache)
    (folder / lost.file_name).write_bytes(before)


def test_a_run_is_the_same_when_it_is_made_again(runs: Runs, ground: Ground) -> None:
    spec = runs.of("abrupt", GRADIENT)[0]
    again = run_one(spec, ground, 40)
    assert again.num_rounds.tolist() == runs.results[spec].num_rounds.tolist()


def test_costs_of_a_round_are_measured(target: Target, ground: Ground) -> None:
    drafter = ground.drafter(ground.static)
    found = measured_costs(target, drafter, ground.test[HOME][0], num_repeats=3)
    assert found.plain_seconds > 0.0
    assert found.round_seconds == found.verify_seconds + found.draft_seconds
    assert found.break_even_length == found.round_seconds / found.plain_seconds


def test_invalid_policies_are_refused_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="unknown policy 'luck', expected one of: online gradient"):
        policy("luck")
