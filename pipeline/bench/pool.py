"""The pool of 22 drafters that selection is measured with: experts, a generalist, and lesser ones.

Heads of one draft vocabulary for each of the seven domains, early snapshots of some of them, and a
head trained on all domains with the budget of one expert; lookups of several sizes; and none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console

from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary, FrozenRows
from inference.drafters.hydra import HydraDrafter
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.ports import Drafter
from inference.target import Target
from pipeline.bench.domains import Domain
from pipeline.bench.heads import (
    INNER_SIZE,
    Answers,
    answers_to,
    cached_tensors,
    draft_vocabulary,
    head_snapshots,
    snapshot_weights,
)

RECIPE = 1
"""Counts the versions of the recipe below; a new one trains afresh."""

NUM_STEPS = 220
MIXED = "mixed"
"""The head that learns from all domains."""

MIXED_DRAFTER = f"{MIXED}-{NUM_STEPS}"

DOMAIN_TO_EARLY_STEPS: Mapping[str, tuple[int, ...]] = {
    "code": (25, 100),
    "maths": (50, 100),
    "sql": (50,),
    "medicine": (50,),
    "translation": (25,),
    "summarisation": (100,),
}
"""Snapshots that are kept besides the fully trained head of each domain."""

NUM_TRAIN = 80
"""Most training prompts of a domain."""

MAX_TOKENS = 96
NUM_DRAFTERS = 22


def bench_pool(
    target: Target,
    domains: Sequence[Domain],
    *,
    cache: Path | None,
    console: Console,
    num_train: int = NUM_TRAIN,
    max_tokens: int = MAX_TOKENS,
    inner_size: int = INNER_SIZE,
) -> list[Drafter]:
    """Return the pool; its heads are loaded from the cache, or trained there (ten minutes).

    Args:
        target: Writes the answers that the heads learn from.
        domains: Of ``read_domains``; only their training prompts are used.
        cache: Folder of the cache; None for the user's own.
        console: Where progress goes.
        num_train: Training prompts per domain.
        max_tokens: Tokens per answer.
        inner_size: Width of the heads' mixing layer.

    Returns:
        22 drafters, ids ``<domain>-<steps>`` for heads.
    """
    prompts = {domain.name: domain.train[:num_train] for domain in domains}
    head_to_steps = {
        name: (*DOMAIN_TO_EARLY_STEPS.get(name, ()), NUM_STEPS) for name in prompts
    } | {MIXED: (NUM_STEPS,)}
    facts = (RECIPE, target.fingerprint, str(target.dtype), max_tokens, inner_size)
    tensors = cached_tensors(
        "bench-pool",
        repr((*facts, head_to_steps, prompts)),
        cache,
        lambda: _train(target, prompts, head_to_steps, max_tokens, inner_size, console),
    )
    vocabulary = DraftVocabulary.of(tensors.pop(VOCABULARY).tolist())
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    heads = [
        HydraDrafter(f"{name}-{steps}", steps, snapshot_weights(tensors, f"{name}-{steps}."), rows)
        for name, all_steps in head_to_steps.items()
        for steps in all_steps
    ]
    return [NothingDrafter(), *_lookups(), *heads]


def _lookups() -> list[Drafter]:
    """Return drafters without weights; none shares history, so requests may be put in any order."""
    return [
        PromptLookupDrafter("lookup-3-2", longest=3, shortest=2),
        PromptLookupDrafter("lookup-2-1", longest=2, shortest=1),
        PromptLookupDrafter("lookup-1-1", longest=1, shortest=1),
        SuffixDrafter("suffix-6-2", longest=6, shortest=2, share_history=False),
        SuffixDrafter("suffix-3-1", longest=3, shortest=1, share_history=False),
    ]


def _train(
    target: Target,
    name_to_prompts: Mapping[str, Sequence[str]],
    head_to_steps: Mapping[str, Sequence[int]],
    max_tokens: int,
    inner_size: int,
    console: Console,
) -> dict[str, torch.Tensor]:
    name_to_answers = {
        name: answers_to(
            target, prompts, max_tokens=max_tokens, what=f"{name} prompts", console=console
        )
        for name, prompts in name_to_prompts.items()
    }
    name_to_answers[MIXED] = _joined(list(name_to_answers.values()))
    vocabulary = draft_vocabulary(target, name_to_answers[MIXED].counts)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    tensors = {VOCABULARY: vocabulary.token_ids}
    for name, answers in name_to_answers.items():
        kept = head_snapshots(
            rows,
            answers.segments,
            head_to_steps[name],
            what=f"the head {name}",
            console=console,
            inner_size=inner_size,
        )
        for steps, weights in kept.items():
            tensors |= {f"{name}-{steps}.{key}": tensor for key, tensor in weights.items()}
    return tensors


def _joined(several: Sequence[Answers]) -> Answers:
    counts = Counter[int]()
    for one in several:
        counts.update(one.counts)
    return Answers(tuple(segment for one in several for segment in one.segments), counts)
