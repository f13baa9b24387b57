"""Heads for the engine benchmark: trained once on the target's own answers, kept in the cache."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from rich.console import Console
from rich.progress import track

from inference.drafters.hydra import DraftVocabulary, FrozenRows, HydraDrafter, frequent_tokens
from inference.drafters.hydra_training import VOCABULARY, TrainableHydra
from inference.model_files import default_cache
from inference.target import Target
from learner.examples import ExampleMemory, Segment
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings

RECIPE = 2
"""Counts the versions of the recipe below; a new one trains afresh."""

NUM_STEPS = 220
SNAPSHOTS = (55, 110, 165, 220)
"""Steps after which a head is kept; the last is the trained one, the others are lesser heads."""

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
    name = f"bench-heads-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.safetensors"
    file = (cache or default_cache()) / name
    if not file.exists():
        tensors = _train(target, prompts, max_tokens, console)
        temporary = file.with_name(f"_{file.name}.{os.getpid()}")
        safetensors.torch.save_file(tensors, temporary)
        temporary.replace(file)
    return _heads(target, safetensors.torch.load(file.read_bytes()))


def _heads(target: Target, tensors: dict[str, torch.Tensor]) -> BenchHeads:
    vocabulary = DraftVocabulary.of(tensors.pop(VOCABULARY).tolist())
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    drafters = []
    for steps in SNAPSHOTS:
        prefix = f"{steps}."
        weights = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        drafters.append(HydraDrafter(f"head-{steps}", steps, weights, rows))
    return BenchHeads(tuple(drafters))


def _train(
    target: Target, prompts: Sequence[str], max_tokens: int, console: Console
) -> dict[str, torch.Tensor]:
    memory, counts = ExampleMemory(max_positions=10**9), Counter[int]()
    answers = track(
        _answers(target, prompts, max_tokens),
        "the target answers the training prompts",
        total=len(prompts),
        console=console,
    )
    for index, (prompt_ids, answer_ids) in enumerate(answers):
        memory.add(_segment(target, index, prompt_ids, answer_ids))
        counts.update(answer_ids)
    vocabulary = frequent_tokens(counts, size=DRAFT_VOCABULARY_SIZE, vocab_size=target.vocab_size)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    head = TrainableHydra("head", rows, inner_size=INNER_SIZE, seed=SEED)
    update = OnlineGradient(head.initial_weights(), OnlineGradientSettings())
    rng = np.random.default_rng(SEED)
    tensors = {VOCABULARY: vocabulary.token_ids}
    for step in track(range(1, NUM_STEPS + 1), "training a head", console=console):
        batch = memory.draw(BATCH_SIZE, NUM_LEVELS, rng)
        if batch is None:
            raise ValueError(f"{len(prompts)} training prompts gave no example")
        update.step(partial(head.loss, batch=batch))
        if step in SNAPSHOTS:
            kept = head.artifact(update.weights)
            del kept[VOCABULARY]
            tensors |= {f"{step}.{name}": tensor.clone() for name, tensor in kept.items()}
    return tensors


def _answers(
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
