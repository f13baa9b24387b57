"""The head of the vLLM benchmark: trained on other prompts of the same sets, then released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track

from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary, FrozenRows, frequent_tokens
from inference.drafters.hydra import ARCHITECTURE
from inference.drafters.hydra_training import TrainableHydra
from inference.target import Target
from learner.examples import Segment
from pipeline.bench.heads import SEED, answers_to, cached_tensors, training_batches
from pipeline.bench.vllm.prompts import PromptSet
from pipeline.configuration.settings import Settings
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.releases.registry import DrafterRegistry
from schemas.events import DrafterReleased, ReleaseState, Watermark

RECIPE = 2
"""Counts the versions of the recipe below; a new one trains afresh."""

MAX_TOKENS = 96

PEAK_RATE, WARM_UP_SHARE = 2e-3, 0.02
"""AdamW's step size rises to this within a share of the steps, and falls to nothing by a cosine."""

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
    return {VOCABULARY: vocabulary.token_ids} | trained_weights(
        rows, answers.segments, num_steps, inner_size=INNER_SIZE, console=console
    )


def trained_weights(
    rows: FrozenRows,
    segments: Sequence[Segment],
    num_steps: int,
    *,
    inner_size: int,
    console: Console,
) -> dict[str, torch.Tensor]:
    """Train one head at leisure: all examples are there, and the step size ends at nothing.

    Args:
        rows: What the target lends.
        segments: Training material, at least one example.
        num_steps: Training steps, >= 1.
        inner_size: Width of the mixing layer.
        console: Where progress goes.

    Returns:
        Its weights in the target's type.

    Raises:
        ValueError: If the segments hold no example.
    """
    head = TrainableHydra("head", rows, inner_size=inner_size, seed=SEED)
    weights = {name: one.requires_grad_() for name, one in head.initial_weights().items()}
    optimizer = torch.optim.AdamW(weights.values(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_RATE, num_steps, pct_start=WARM_UP_SHARE, cycle_momentum=False
    )
    batches = training_batches(segments, what="a head")
    for _ in track(range(num_steps), "training a head", console=console):
        optimizer.zero_grad()
        torch.autograd.backward(head.loss(weights, next(batches)))
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        schedule.step()
    artifact = head.artifact({name: one.detach() for name, one in weights.items()})
    return {name: tensor for name, tensor in artifact.items() if name != VOCABULARY}


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
