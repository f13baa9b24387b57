"""A small random target with real rounds, for benchmarks of what happens around them."""

from __future__ import annotations

from typing import Any

import torch

from inference.target import Target

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .,"
CONTEXT_LENGTH = 512


def small_target(seed: int = 0) -> Target:
    """Return a Llama of two layers over single characters, which never ends by itself.

    Args:
        seed: Of its weights, which are drawn widely: its text does not loop at once.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=len(CHARACTERS) + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = []
    return Target(model, _tokenizer(), target_id="bench", target_fingerprint=f"bench-target-{seed}")


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<eos>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
