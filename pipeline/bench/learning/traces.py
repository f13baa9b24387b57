"""What the target wrote and knew, recorded once: the ground that every learning run replays.

Greedy verification emits the target's own tokens whatever the drafter proposes, so a trajectory
does not depend on drafters, weights or updates. It is decoded once, batch by batch, and kept in
the cache with the states and the top of the distributions; learning is then run on it many times
without the target. A batch that was interrupted is decoded again, the ones before it are not.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from inference.model_files import default_cache
from inference.target import Target

RECIPE = 1
"""Counts the versions of the recipe below; a new one decodes afresh."""

BATCH_SIZE = 32
"""Prompts that are decoded together."""

NUM_TOP_TOKENS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestTrace:
    """One request as the target answered it, P output tokens.

    Attributes:
        prompt_token_ids: int64 (Q,).
        token_ids: int64 (P,), the end-of-text token included if it came.
        hidden: float16 (P, H), the target's last state (after the final norm) that predicted each
            token.
        top_token_ids: int64 (P, C), the target's most probable tokens.
        top_log_probs: float16 (P, C), their log-probabilities at temperature 1.
        tail_mass: float16 (P,), the probability of all others.
    """

    prompt_token_ids: NDArray[np.int64]
    token_ids: NDArray[np.int64]
    hidden: NDArray[np.float16]
    top_token_ids: NDArray[np.int64]
    top_log_probs: NDArray[np.float16]
    tail_mass: NDArray[np.float16]


def recorded_traces(
    target: Target,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    cache: Path | None,
    what: str,
    console: Console,
) -> list[RequestTrace]:
    """Return the traces of the prompts, decoding those batches that the cache lacks.

    Args:
        target: Answers greedily.
        prompts: In an order that stays: batches are cut from it.
        max_tokens: Tokens per answer.
        cache: Folder of the cache; None for the user's own.
        what: Names the prompts in the progress bar.
        console: Where progress goes.
    """
    missing = missing_batches(target, prompts, max_tokens=max_tokens, cache=cache)
    shown = track(missing, f"the target answers {what}", console=console) if missing else ()
    for batch in shown:
        _keep(_file(target, batch, max_tokens, cache), _decoded(target, batch, max_tokens))
    files = [_file(target, batch, max_tokens, cache) for batch in _batches(prompts)]
    return [trace for file in files for trace in _read(file)]


def missing_batches(
    target: Target, prompts: Sequence[str], *, max_tokens: int, cache: Path | None
) -> list[Sequence[str]]:
    """Return the batches of these prompts that the cache lacks; each can be recorded by itself."""
    return [
        batch for batch in _batches(prompts) if not _file(target, batch, max_tokens, cache).exists()
    ]


def _batches(prompts: Sequence[str]) -> list[Sequence[str]]:
    return [prompts[i : i + BATCH_SIZE] for i in range(0, len(prompts), BATCH_SIZE)]


def _file(target: Target, batch: Sequence[str], max_tokens: int, cache: Path | None) -> Path:
    facts = (RECIPE, target.fingerprint, str(target.dtype), max_tokens, NUM_TOP_TOKENS)
    digest = hashlib.sha256(repr((*facts, list(batch))).encode()).hexdigest()[:16]
    return (cache or default_cache()) / "learning-traces" / f"learning-{digest}.safetensors"


def _keep(file: Path, traces: Sequence[RequestTrace]) -> None:
    """Write a batch under a temporary name and rename it into place."""
    joined = {
        name: np.concatenate([np.asarray(getattr(trace, name)) for trace in traces])
        for name in RequestTrace.__dataclass_fields__
    }
    joined["num_tokens"] = np.array([len(trace.token_ids) for trace in traces])
    joined["num_prompt_tokens"] = np.array([len(trace.prompt_token_ids) for trace in traces])
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"_{file.name}.{os.getpid()}")
    safetensors.numpy.save_file(joined, temporary)
    temporary.replace(file)


def _read(file: Path) -> Iterator[RequestTrace]:
    joined = safetensors.numpy.load(file.read_bytes())
    ends = np.cumsum(joined.pop("num_tokens"))[:-1]
    prompt_ends = np.cumsum(joined.pop("num_prompt_tokens"))[:-1]
    parts = {
        name: np.split(values, prompt_ends if name == "prompt_token_ids" else ends)
        for name, values in joined.items()
    }
    for index in range(len(ends) + 1):
        yield RequestTrace(**{name: split[index] for name, split in parts.items()})


@torch.inference_mode()
def _decoded(target: Target, prompts: Sequence[str], max_tokens: int) -> list[RequestTrace]:
    """Answer all prompts at once, padded on the left, and note every step."""
    encoded = [target.encode(prompt) for prompt in prompts]
    longest = max(map(len, encoded))
    ids = torch.zeros((len(encoded), longest), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt_ids in enumerate(encoded):
        ids[row, longest - len(prompt_ids) :] = torch.tensor(prompt_ids)
        mask[row, longest - len(prompt_ids) :] = 1
    with _noted_steps(target) as steps:
        output = target.model.generate(
            ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
    hidden, top_ids, top_log_probs = (
        torch.stack(one, dim=1).numpy() for one in zip(*steps, strict=True)
    )
    found = []
    for row, prompt_ids in enumerate(encoded):
        tokens = output[row, longest:].numpy()
        size = _num_until_end(target, tokens.tolist())
        kept = top_log_probs[row, :size]
        tail = np.clip(1.0 - np.exp(kept.astype(np.float32)).sum(-1), 0.0, 1.0)
        found.append(
            RequestTrace(
                prompt_token_ids=np.array(prompt_ids, dtype=np.int64),
                token_ids=tokens[:size],
                hidden=hidden[row, :size],
                top_token_ids=top_ids[row, :size],
                top_log_probs=kept,
                tail_mass=tail.astype(np.float16),
            )
        )
    return found


@contextmanager
def _noted_steps(target: Target) -> Iterator[list[tuple[torch.Tensor, ...]]]:
    """Note what goes into and comes out of the head at every step, of the last position."""
    steps: list[tuple[torch.Tensor, ...]] = []

    def note(_: Any, inputs: tuple[torch.Tensor], logits: torch.Tensor) -> None:
        top = logits[:, -1].float().log_softmax(-1).topk(NUM_TOP_TOKENS)
        steps.append((inputs[0][:, -1].half(), top.indices, top.values.half()))

    hook = target.model.get_output_embeddings().register_forward_hook(note)
    try:
        yield steps
    finally:
        hook.remove()


def _num_until_end(target: Target, token_ids: list[int]) -> int:
    for index, token in enumerate(token_ids, start=1):
        if token in target.eos_token_ids:
            return index
    return len(token_ids)
