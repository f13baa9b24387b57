"""Requests that put an engine under stress, and the small targets that make many affordable."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

MAX_POSITIONS = 256
VOCAB_SIZE = 49_152
FIRST_TOKEN = 1000
"""Of prompts: those below are special tokens and bytes."""

GRAMMAR = "(yes|no)( yes| no| maybe){4,10}"
ADAPTER = "adapter-a"
NUM_DRAWN = 5
NUM_WORDS, SURENESS = 64, 6.0
HIDDEN_SIZE, NUM_LAYERS, HEAD_SIZE, RANK = 128, 2, 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class StressRequest:
    """One request.

    Attributes:
        id: As the client names it.
        prompt: Token ids.
        abort_after_tokens, abort_after_steps: When its client leaves; None = it stays.
        is_adapted: Whether it uses the LoRA adapter.
        grammar: Regular expression that its answer obeys; empty = free.
    """

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    stream: str = ""
    grammar: str = ""
    is_adapted: bool = False
    ignores_end: bool = True
    stop_token_ids: tuple[int, ...] = ()
    abort_after_tokens: int | None = None
    abort_after_steps: int | None = None

    @property
    def is_aborted(self) -> bool:
        """Whether its client may leave before it ends."""
        return self.abort_after_tokens is not None or self.abort_after_steps is not None

    @property
    def event_stream(self) -> str:
        """The stream that its events belong to."""
        return self.stream or (ADAPTER if self.is_adapted else "vllm")

    def as_json(self) -> dict[str, Any]:
        """Return it as the job of an engine holds it."""
        return asdict(self)


def stress_requests(
    count: int, *, seed: int, max_tokens: int = 40, has_adapter: bool = False
) -> list[StressRequest]:
    """Return requests of every kind, in an order drawn from ``seed``."""
    rng = np.random.default_rng(seed)
    beginnings = [_words(rng, 40) for _ in range(4)]
    known = [_prompt(rng, beginnings) for _ in range(12)]
    found = [_request(str(number), rng, beginnings, known, max_tokens) for number in range(count)]
    return [replace(one, is_adapted=one.is_adapted and has_adapter) for one in found]


def draws(prompt: Sequence[int], count: int, *, temperature: float) -> list[StressRequest]:
    """Return requests that draw a few tokens behind one prompt, again and again."""
    return [
        StressRequest(
            id=str(number), prompt=tuple(prompt), max_tokens=NUM_DRAWN, temperature=temperature
        )
        for number in range(count)
    ]


def _request(
    name: str,
    rng: np.random.Generator,
    beginnings: Sequence[list[int]],
    known: Sequence[list[int]],
    max_tokens: int,
) -> StressRequest:
    # Every fourth prompt has been sent before, often by a request that is at work still.
    prompt = (
        known[int(rng.integers(len(known)))] if rng.random() < 0.25 else _prompt(rng, beginnings)
    )
    kind = rng.random()
    facts: dict[str, Any] = {"max_tokens": int(rng.integers(1, max_tokens + 1))}
    if kind < 0.06:
        facts["grammar"] = GRAMMAR
        facts["ignores_end"] = False
    elif kind < 0.12:
        facts |= {"n": int(rng.integers(2, 4)), "temperature": 0.8}
    elif kind < 0.15:
        # To the end of the context.
        prompt = [*prompt, *_words(rng, MAX_POSITIONS)][: MAX_POSITIONS - int(rng.integers(1, 40))]
        facts["max_tokens"] = MAX_POSITIONS
    elif kind < 0.3:
        facts["is_adapted"] = True
    elif kind < 0.36:
        facts["temperature"] = 0.8
    elif kind < 0.42:
        facts["stop_token_ids"] = tuple(_words(rng, 400))
    if rng.random() < 0.3:
        facts["stream"] = f"tenant-{rng.integers(3)}"
    if rng.random() < 0.15:
        facts["abort_after_tokens"] = int(rng.integers(1, 12))
    elif rng.random() < 0.08:
        facts["abort_after_steps"] = int(rng.integers(1, 6))
    return StressRequest(id=name, prompt=tuple(prompt), **facts)


def _prompt(rng: np.random.Generator, beginnings: Sequence[list[int]]) -> list[int]:
    own = _words(rng, int(rng.integers(2, 30)))
    begin = beginnings[int(rng.integers(len(beginnings)))] if rng.random() < 0.7 else []
    return [*begin, *own, *own[: int(rng.integers(0, len(own)))]]


def _words(rng: np.random.Generator, count: int) -> list[int]:
    found: list[int] = rng.integers(FIRST_TOKEN, VOCAB_SIZE, count).tolist()
    return found


def save_tiny_target(folder: Path, tokenizer_of: Path, *, seed: int = 0) -> None:
    """Save a Llama of two layers with random weights and another target's tokenizer.

    It writes few words (``NUM_WORDS``), so that its text repeats itself and lookups find it.
    """
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=2 * HIDDEN_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HIDDEN_SIZE // HEAD_SIZE,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        max_position_embeddings=2 * MAX_POSITIONS,
        initializer_range=0.1,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    words = torch.randperm(VOCAB_SIZE - FIRST_TOKEN)[:NUM_WORDS] + FIRST_TOKEN
    with torch.no_grad():
        kept = torch.zeros(VOCAB_SIZE, 1)
        kept[words] = 1.0
        model.lm_head.weight.mul_(SURENESS * kept)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_of / name, folder / name)


def save_adapter(folder: Path, target: Path, *, seed: int = 0) -> None:
    """Save a LoRA adapter with random weights, strong enough to change what a target writes."""
    folder.mkdir(parents=True)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    rows = config["num_attention_heads"] * config.get("head_dim", 64)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(num_layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn((RANK, hidden), generator=generator) / 4
        tensors[f"{name}.lora_B.weight"] = torch.randn((rows, RANK), generator=generator) / 4
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": str(target),
                "r": RANK,
                "lora_alpha": RANK,
                "lora_dropout": 0.0,
                "bias": "none",
                "target_modules": ["q_proj"],
            }
        ),
        encoding="utf-8",
    )
