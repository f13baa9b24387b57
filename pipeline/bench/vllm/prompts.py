"""First-seen prompts for the vLLM benchmark: nine sets, disjoint between passes and from training.

MBPP, GSM8K and Spider, and the six groups of Spec-Bench. A pass at one concurrency gets prompts
that no other pass has, as vLLM's own suffix drafting would know the answers otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.bench.domains import GSM8K, MBPP, SPEC_BENCH, SPIDER, read_domains
from pipeline.prompts import PromptsError

DOMAIN_TO_SET = {"code": "mbpp", "maths": "gsm8k", "sql": "spider"}
GROUPS = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")
MT_BENCH = "mt_bench"
FILES = (MBPP, GSM8K, SPIDER, SPEC_BENCH)

MAX_PROMPT_CHARACTERS = 2400
"""Longer prompts are cut, so that reading them does not dwarf writing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """One kind of prompts; ``train`` is for heads and never measured."""

    name: str
    train: tuple[str, ...]
    test: tuple[str, ...]


def read_prompt_sets(folder: Path) -> list[PromptSet]:
    """Return the nine sets, always in the same order.

    Raises:
        PromptsError: If a file is missing or broken, in one line.
    """
    sets = [
        PromptSet(name=DOMAIN_TO_SET[one.name], train=one.train, test=one.test)
        for one in read_domains(folder)
        if one.name in DOMAIN_TO_SET
    ]
    group_to_prompts = _spec_bench(folder / SPEC_BENCH)
    for group in GROUPS:
        prompts = group_to_prompts[group]
        if not prompts:
            raise PromptsError(f"{folder / SPEC_BENCH}: no question of group {group!r}")
        # The last quarter trains heads: 60 of 80 are left for three passes of 20.
        num_test = len(prompts) - len(prompts) // 4
        sets.append(
            PromptSet(name=group, train=tuple(prompts[num_test:]), test=tuple(prompts[:num_test]))
        )
    return sets


def _spec_bench(path: Path) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {group: [] for group in GROUPS}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.strip():
            row = json.loads(line)
            # The eight categories of MT-Bench are one group.
            group = row["category"] if row["category"] in groups else MT_BENCH
            text = dict.fromkeys([str(row["turns"][0])[:MAX_PROMPT_CHARACTERS]])
            groups[group] += [one for one in text if one not in groups[group]]
    return groups


def blocks(
    sets: Sequence[PromptSet],
    *,
    first: int,
    count: int,
    ordering: int,
    is_mixed: bool,
) -> list[list[Mapping[str, object]]]:
    """Return the blocks of one pass.

    Args:
        sets: Of ``read_prompt_sets``.
        first: Place of the pass's first prompt in every set.
        count: Prompts per set.
        ordering: Seeds the order.
        is_mixed: Blocks of one prompt of every set; else a block per set, in a drawn order.

    Raises:
        ValueError: If a set has too few prompts.
    """
    rng = np.random.default_rng(ordering)
    chosen = {}
    for one in sets:
        prompts = one.test[first : first + count]
        if len(prompts) < count:
            raise ValueError(f"{one.name} has {len(one.test)} test prompts, needed {first + count}")
        order = rng.permutation(count)
        chosen[one.name] = [
            {"set": one.name, "index": int(first + i), "prompt": prompts[i], "seed": int(first + i)}
            for i in order
        ]
    names = [sets[i].name for i in rng.permutation(len(sets))]
    if is_mixed:
        return [[chosen[name][turn] for name in names] for turn in range(count)]
    return [list(chosen[name]) for name in names]
