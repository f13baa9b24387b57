"""Random targets of two layers and a tokenizer of characters, for the tests of inference.

The weights are drawn widely, so distributions are far from flat and greedy text does not loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from inference.sampling import SamplingParams
from inference.target import Target
from inference.trajectory import Trajectory

EOS = 0
FIRST_BYTE, SECOND_BYTE = 27, 28
"""Two tokens that make one character, é, together; the first alone decodes to U+FFFD."""
VOCAB_SIZE = 40
SLIDING_WINDOW = 8
_TOKENS = ("<eos>", *"abcdefghijklmnopqrstuvwxyz", "<0xC3>", "<0xA9>")


def tiny_tokenizer(num_tokens: int = VOCAB_SIZE) -> Any:
    """Return a tokenizer of single characters; token 0 is end-of-sequence, 1..26 are a..z."""
    tokens = [*_TOKENS, *(chr(ord("A") + index) for index in range(26))][:num_tokens]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def tiny_llama(
    seed: int = 0,
    *,
    vocab_size: int = VOCAB_SIZE,
    context_length: int = 256,
    eos_token_id: int | None = None,
    num_layers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> Target:
    """Return a Llama with full attention; without an end-of-sequence token unless one is given."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=context_length,
        initializer_range=0.6,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    return as_target(config, seed, dtype=dtype)


def tiny_gemma3(
    seed: int = 0, *, context_length: int = 256, eos_token_id: int | None = None
) -> Target:
    """Return a Gemma 3 whose first layer sees ``SLIDING_WINDOW`` positions."""
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=context_length,
        initializer_range=0.6,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos_token_id,
    )
    return as_target(config, seed)


def as_target(config: Any, seed: int, *, dtype: torch.dtype = torch.float32) -> Target:
    """Return a random model of ``config`` as a target with the tiny tokenizer."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
    if config.eos_token_id is None:
        model.generation_config.eos_token_id = []
    return Target(
        model,
        tiny_tokenizer(config.vocab_size),
        target_id=f"tiny-{config.model_type}",
        target_fingerprint=f"{config.model_type}-{seed}",
    )


@torch.inference_mode()
def plain_greedy(target: Target, prompts: Sequence[Sequence[int]], num_tokens: int) -> Any:
    """Return what the bare model of transformers writes, (B, num_tokens).

    No cache, no code of ours: every token is the arg-max of a full forward. Prompts have one
    length.
    """
    ids = torch.tensor(prompts)
    for _ in range(num_tokens):
        logits = target.model(input_ids=ids, use_cache=False).logits[:, -1]
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return ids[:, len(prompts[0]) :].tolist()


def random_prompts(seed: int, *, count: int, length: int) -> list[list[int]]:
    """Return prompts with a repeated half, so that lookup drafters find something."""
    rng = np.random.default_rng(seed)
    half = rng.integers(1, 27, (count, (length + 1) // 2))
    return np.concatenate([half, half], axis=1)[:, :length].tolist()  # type: ignore[no-any-return]


def start_trajectory(
    target: Target, prompt: Sequence[int], params: SamplingParams | None = None
) -> Trajectory:
    """Return a request that has not begun."""
    params = params or SamplingParams()
    return Trajectory(
        prompt,
        params,
        max_output_tokens=params.max_tokens,
        hidden_size=target.hidden_size,
        dtype=target.dtype,
        device=target.device,
    )
