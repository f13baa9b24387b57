"""The pool of 22 on a tiny target: who is in it, what it learned, and that it is trained once."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import pytest
import torch
from rich.console import Console

from inference.drafters.hydra import HydraDrafter
from inference.ports import Drafter
from inference.target import Target
from pipeline.bench import heads, traffic
from pipeline.bench import pool as pools
from pipeline.bench.domains import Domain, read_domains
from pipeline.bench.traffic import TrafficSize, bench_conversations
from tests.inference.tiny import tiny_llama
from tests.pipeline.domain_files import write_domain_files

CONSOLE = Console(file=io.StringIO())


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_llama(1, context_length=512)


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[Domain]:
    return read_domains(write_domain_files(tmp_path_factory.mktemp("sets")))


def pool(target: Target, domains: list[Domain], cache: Path) -> list[Drafter]:
    return pools.bench_pool(
        target, domains, cache=cache, console=CONSOLE, num_train=3, max_tokens=8, inner_size=8
    )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parent") / "cache"  # an empty cache is created


@pytest.fixture(scope="module")
def drafters(target: Target, domains: list[Domain], cache: Path) -> list[Drafter]:
    # Written to by nobody after this; a batch of 16 answers is one forward of the tiny target.
    return pool(target, domains, cache)


def test_the_pool_is_sixteen_heads_of_one_vocabulary_five_lookups_and_none(
    drafters: list[Drafter], domains: list[Domain]
) -> None:
    ids = [drafter.version.drafter_id for drafter in drafters]
    assert len(set(ids)) == pools.NUM_DRAFTERS == 22
    heads = [drafter for drafter in drafters if isinstance(drafter, HydraDrafter)]
    assert len(heads) == 16
    assert len({head.group_key for head in heads}) == 1  # scored together
    full = {f"{domain.name}-220" for domain in domains} | {pools.MIXED_DRAFTER}
    assert full <= set(ids)
    assert {head.version.weights_version for head in heads} == {25, 50, 100, 220}
    kinds = Counter(name.split("-")[0] for name in ids if name not in full)
    assert (kinds["none"], kinds["lookup"], kinds["suffix"]) == (1, 3, 2)


def test_heads_differ_and_a_later_snapshot_has_moved_on(drafters: list[Drafter]) -> None:
    by_id = {d.version.drafter_id: d for d in drafters if isinstance(d, HydraDrafter)}
    weights = {
        name: torch.cat([t.flatten() for t in d.weights.values()]) for name, d in by_id.items()
    }
    names = sorted(weights)
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            assert not torch.equal(weights[name], weights[other]), (name, other)


def test_a_second_call_loads_the_same_pool_without_training(
    target: Target,
    domains: list[Domain],
    cache: Path,
    drafters: list[Drafter],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(pools, "_train", refuse)
    again = pool(target, domains, cache)
    assert [d.version for d in again] == [d.version for d in drafters]
    for first, second in zip(drafters, again, strict=True):
        if isinstance(first, HydraDrafter) and isinstance(second, HydraDrafter):
            assert all(torch.equal(second.weights[n], t) for n, t in first.weights.items())
    assert [path.name.split("-")[:2] for path in cache.iterdir()] == [["bench", "pool"]]
    # Test prompts do not count, training prompts do.
    other = [Domain(name=d.name, train=d.train, test=("x",)) for d in domains]
    pool(target, other, cache)
    other[0] = Domain(name="code", train=("x", "y"), test=("z",))
    with pytest.raises(AssertionError, match="trained again"):
        pool(target, other, cache)


def test_a_recipe_that_fails_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    def fail() -> dict[str, torch.Tensor]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        heads.cached_tensors("name", "recipe", tmp_path, fail)
    assert not list(tmp_path.iterdir())
    made = heads.cached_tensors("name", "recipe", tmp_path, lambda: {"a": torch.ones(2)})
    assert torch.equal(made["a"], torch.ones(2))
    assert torch.equal(heads.cached_tensors("name", "recipe", tmp_path, fail)["a"], made["a"])


def test_traffic_uses_test_prompts_once_and_ids_tell_the_sets_apart(domains: list[Domain]) -> None:
    size = TrafficSize(num_per_domain=2, num_shifts=7, num_twos=3, num_documents=2)
    conversations = bench_conversations(domains, size)
    ids = [one.conversation_id for one in conversations]
    assert ids[:8] == [*(f"{d.name}-000" for d in domains), "code-001"]
    assert Counter(one.stream for one in conversations) == {
        **{domain.name: 2 for domain in domains},
        "shift": 7,
        "two": 3,
        "document": 2,
    }
    assert len(set(ids)) == len(ids)
    shifts = [one for one in conversations if one.stream == "shift"]
    for shift in shifts:
        first, second, third = (_domain_of(turn, domains) for turn in shift.turns)
        assert first == third != second
    assert [shift.request_id(1) for shift in shifts[:2]] == ["shift-00:2", "shift-01:2"]
    used = [turn for one in conversations for turn in one.turns if one.stream != "document"]
    assert len(set(used)) == len(used)
    train = {prompt for domain in domains for prompt in domain.train}
    assert not train & set(used)


def _domain_of(prompt: str, domains: list[Domain]) -> str:
    return next(domain.name for domain in domains if prompt in domain.test)


def test_parts_of_documents_are_short_and_end_like_sentences() -> None:
    assert traffic._beginning("Short one") == "Short one"
    part = traffic._beginning("word, " * 100)
    assert len(part) <= traffic.MAX_PART_CHARACTERS
    assert part.endswith("word.")


def test_invalid_too_few_test_prompts_name_the_domain(domains: list[Domain]) -> None:
    with pytest.raises(ValueError, match="code has too few test prompts: record fewer"):
        bench_conversations(domains, TrafficSize(num_per_domain=50))
