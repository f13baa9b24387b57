"""Heads for benchmarks: trained once on the target's own answers, kept in the cache."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from rich.console import Console
from rich.progress import track

from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary, FrozenRows, frequent_tokens
from inference.drafters.hydra import HydraDrafter
from inference.drafters.hydra_training import TrainableHydra
from inference.model_files import default_cache
from inference.target import Target
from learner.examples import ExampleMemory, Segment, TrainingBatch
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings

RECIPE = 2
"""Counts the versions of the recipe below; a new one trains afresh."""

SNAPSHOTS = (55, 110, 165, 220)
"""Steps after which the engine benchmark keeps its head; the last is the trained one."""

BATCH_SIZE = 256
NUM_LEVELS = 4
INNER_SIZE = 1152
DRAFT_VOCABULARY_SIZE = 8192
ANSWERS_AT_ONCE = 16
NUM_TOP_TOKENS = 8
SEED = 0


@dataclass(frozen=True, slots=True)
class BenchHeads:
    """Snapshots of one head, the fully trained one last."""

    drafters: tuple[HydraDrafter, ...]


@dataclass(frozen=True, slots=True)
class Answers:
    """What the target answered to some prompts, as training material.

    Attributes:
        segments: One per answer.
        counts: How often each token was answered.
    """

    segments: tuple[Segment, ...]
    counts: Counter[int]


def trained_heads(
    target: Target,
    prompts: Sequence[str],
    *,
    cache: Path | None,
    max_tokens: int,
    console: Console,
) -> BenchHeads:
    """Load the heads for these prompts, or train them (a few minutes) and keep them.

    Args:
        target: Writes the answers that the heads learn from.
        prompts: Training prompts; test prompts must not be among them.
        cache: Folder of the cache; None for the user's own.
        max_tokens: Tokens per answer.
        console: Where progress goes.
    """
    recipe = repr((RECIPE, target.fingerprint, str(target.dtype), max_tokens, list(prompts)))
    tensors = cached_tensors(
        "bench-heads", recipe, cache, lambda: _train(target, prompts, max_tokens, console)
    )
    vocabulary = DraftVocabulary.of(tensors.pop(VOCABULARY).tolist())
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    drafters = [
        HydraDrafter(f"head-{steps}", steps, snapshot_weights(tensors, f"{steps}."), rows)
        for steps in SNAPSHOTS
    ]
    return BenchHeads(tuple(drafters))


def cached_tensors(
    name: str, recipe: str, cache: Path | None, make: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Load what was made by this recipe before, or make it and keep it.

    Args:
        name: Begins the name of the file, which ends in a hash of the recipe.
        recipe: All that the tensors depend on.
        cache: Folder of the cache; None for the user's own.
        make: Makes the tensors.
    """
    folder = cache or default_cache()
    file = folder / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.safetensors"
    if not file.exists():
        tensors = make()
        folder.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"_{file.name}.{os.getpid()}")
        safetensors.torch.save_file(tensors, temporary)
        temporary.replace(file)
    return safetensors.torch.load(file.read_bytes())


def snapshot_weights(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with ``prefix``, without it."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def answers_to(
    target: Target, prompts: Sequence[str], *, max_tokens: int, what: str, console: Console
) -> Answers:
    """Let the target answer greedily and read every answer once.

    Args:
        target: Writes the answers.
        prompts: What it answers.
        max_tokens: Tokens per answer.
        what: Names the prompts in the progress bar.
        console: Where progress goes.
    """
    counts, segments = Counter[int](), []
    written = track(
        _written(target, prompts, max_tokens),
        f"the target answers {what}",
        total=len(prompts),
        console=console,
    )
    for index, (prompt_ids, answer_ids) in enumerate(written):
        segments.append(_segment(target, index, prompt_ids, answer_ids))
        counts.update(answer_ids)
    return Answers(tuple(segments), counts)


def draft_vocabulary(target: Target, counts: Mapping[int, int]) -> DraftVocabulary:
    """Choose the tokens that the heads of a benchmark can propose."""
    size = min(DRAFT_VOCABULARY_SIZE, target.vocab_size)
    return frequent_tokens(counts, size=size, vocab_size=target.vocab_size)


def training_batches(segments: Iterable[Segment], *, what: str) -> Iterator[TrainingBatch]:
    """Draw batches from all segments, without end and always the same.

    Args:
        segments: Training material.
        what: Names the head in errors.

    Raises:
        ValueError: If the segments hold no example.
    """
    memory = ExampleMemory(max_positions=10**9)
    for segment in segments:
        memory.add(segment)
    rng = np.random.default_rng(SEED)
    while (batch := memory.draw(BATCH_SIZE, NUM_LEVELS, rng)) is not None:
        yield batch
    raise ValueError(f"the answers for {what} gave no training example")


def head_snapshots(
    rows: FrozenRows,
    segments: Iterable[Segment],
    snapshots: Collection[int],
    *,
    what: str,
    console: Console,
    inner_size: int = INNER_SIZE,
) -> dict[int, dict[str, torch.Tensor]]:
    """Train one head and return its weights after some numbers of steps.

    Args:
        rows: What the target lends.
        segments: Training material.
        snapshots: Steps after which the weights are kept; the largest ends the training.
        what: Names the head in the progress bar.
        console: Where progress goes.
        inner_size: Width of the mixing layer.

    Raises:
        ValueError: If the segments hold no example.
    """
    head = TrainableHydra("head", rows, inner_size=inner_size, seed=SEED)
    update = OnlineGradient(head.initial_weights(), OnlineGradientSettings())
    batches, kept = training_batches(segments, what=what), {}
    for step in track(range(1, max(snapshots) + 1), f"training {what}", console=console):
        update.step(partial(head.loss, batch=next(batches)))
        if step in snapshots:
            kept[step] = {k: v.clone() for k, v in head.artifact(update.weights).items()}
            del kept[step][VOCABULARY]
    return kept


def _train(
    target: Target, prompts: Sequence[str], max_tokens: int, console: Console
) -> dict[str, torch.Tensor]:
    what = "the training prompts"
    answers = answers_to(target, prompts, max_tokens=max_tokens, what=what, console=console)
    vocabulary = draft_vocabulary(target, answers.counts)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    kept = head_snapshots(rows, answers.segments, SNAPSHOTS, what="a head", console=console)
    return {VOCABULARY: vocabulary.token_ids} | {
        f"{step}.{name}": tensor for step, one in kept.items() for name, tensor in one.items()
    }


def _written(
    target: Target, prompts: Sequence[str], max_tokens: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Let transformers answer greedily, several prompts at once; yield prompt and answer."""
    for first in range(0, len(prompts), ANSWERS_AT_ONCE):
        encoded = [target.encode(prompt) for prompt in prompts[first : first + ANSWERS_AT_ONCE]]
        longest = max(map(len, encoded))
        ids = torch.zeros((len(encoded), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt_ids in enumerate(encoded):
            ids[row, longest - len(prompt_ids) :] = torch.tensor(prompt_ids)
            mask[row, longest - len(prompt_ids) :] = 1
        output = target.model.generate(
            ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        for prompt_ids, row in zip(encoded, output[:, longest:].tolist(), strict=True):
            yield prompt_ids, _until_end(target, row)


def _until_end(target: Target, token_ids: list[int]) -> list[int]:
    for index, token in enumerate(token_ids):
        if token in target.eos_token_ids:
            return token_ids[: index + 1]
    return token_ids


def _segment(target: Target, index: int, prompt_ids: list[int], answer_ids: list[int]) -> Segment:
    """Read the answer once to record the states behind its tokens."""
    output = target.start().forward([*prompt_ids, *answer_ids[:-1]], num_rows=len(answer_ids))
    top = output.logits.float().softmax(-1).topk(NUM_TOP_TOKENS)
    return Segment(
        partition=0,
        offset=index,
        hidden=output.hidden.float().numpy(),
        token_ids=np.array(answer_ids, dtype=np.int64),
        top_token_ids=top.indices.numpy(),
        top_probabilities=top.values.numpy(),
    )
