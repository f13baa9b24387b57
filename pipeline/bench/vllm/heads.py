"""The head of the vLLM benchmark: trained on other prompts of the same sets, then released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console

from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary, FrozenRows, frequent_tokens
from inference.drafters.hydra import ARCHITECTURE
from inference.target import Target
from pipeline.bench.heads import (
    answers_to,
    cached_tensors,
    head_snapshots,
)
from pipeline.bench.vllm.prompts import PromptSet
from pipeline.configuration.settings import Settings
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.releases.registry import DrafterRegistry
from schemas.events import DrafterReleased, ReleaseState, Watermark

RECIPE = 1
"""Counts the versions of the recipe below; a new one trains afresh."""

MAX_TOKENS = 96

DRAFT_VOCABULARY_SIZE, INNER_SIZE = 4096, 768
"""Half the bytes of the other benchmarks' heads: reading them is what a level costs, and rare
tokens are copied by lookups anyway."""


def trained_head(
    target: Target,
    sets: Sequence[PromptSet],
    *,
    num_train: int,
    num_steps: int,
    cache: Path | None,
    console: Console,
) -> dict[str, torch.Tensor]:
    """Load the head, or train it (minutes) and keep it in the cache.

    Args:
        target: Writes the answers that it learns from.
        sets: Only their training prompts are used.
        num_train: Most prompts per set.
        num_steps: Training steps.
        cache: Folder of the cache; None for the user's own.
        console: Where progress goes.

    Returns:
        Its tensors as an artifact holds them.
    """
    prompts = [prompt for one in sets for prompt in one.train[:num_train]]
    recipe = repr((RECIPE, target.fingerprint, str(target.dtype), MAX_TOKENS, num_steps, prompts))
    return cached_tensors(
        "bench-vllm", recipe, cache, lambda: _train(target, prompts, num_steps, console)
    )


def _train(
    target: Target, prompts: Sequence[str], num_steps: int, console: Console
) -> dict[str, torch.Tensor]:
    what = "the training prompts"
    answers = answers_to(target, prompts, max_tokens=MAX_TOKENS, what=what, console=console)
    vocabulary = frequent_tokens(
        answers.counts, size=DRAFT_VOCABULARY_SIZE, vocab_size=target.vocab_size
    )
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    kept = head_snapshots(
        rows,
        answers.segments,
        [num_steps],
        what="a head",
        console=console,
        inner_size=INNER_SIZE,
    )
    return {VOCABULARY: vocabulary.token_ids} | kept[num_steps]


def release_head(
    settings: Settings, target: Target, drafter_id: str, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Write a head to the registry of ``settings`` and announce it live."""
    stored = DrafterRegistry(str(settings.data)).write(
        drafter_id, 1, tensors, {"architecture": ARCHITECTURE}
    )
    vocabulary = DraftVocabulary.of(tensors[VOCABULARY].tolist())
    log = open_log(settings)
    try:
        LogReleaseBoard(log, source="bench").publish(
            DrafterReleased(
                drafter_id=drafter_id,
                version=1,
                parent_version=-1,
                state=ReleaseState.LIVE,
                produced_at=datetime.now(UTC),
                artifact_uri=stored.uri,
                manifest_sha256=stored.manifest_sha256,
                architecture=ARCHITECTURE,
                target_fingerprint=target.fingerprint,
                tokenizer_hash=target.tokenizer_hash,
                draft_vocabulary_hash=vocabulary.sha256,
                training_window=Watermark(),
                evidence=None,
                reason="trained by the benchmark",
            )
        )
    finally:
        log.close()
