"""A head in the layout of EAGLE-3, read back from its files alone, drafts what it drafted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from inference.drafters.eagle import EagleDrafter, turned
from inference.drafters.eagle_layout import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    layout_config,
    layout_tensors,
)
from inference.drafters.eagle_reader import EagleFolder
from inference.sampling import SamplingParams
from inference.target import Target
from tests.inference.test_drafters_hydra import LEVELS, cut, verified
from tests.inference.test_drafters_learned import CONTEXT, drafter_of
from tests.inference.tiny import VOCAB_SIZE, tiny_llama

Spoil = Callable[[dict[str, torch.Tensor]], None]


def head_of(target: Target) -> EagleDrafter:
    head = drafter_of("eagle", target)
    assert isinstance(head, EagleDrafter)
    return head


def folder_of(head: EagleDrafter, folder: Path, **changes: Any) -> EagleFolder:
    """Write a head and read it again; ``changes`` are keys of its config."""
    config = layout_config(head, context_length=64) | changes
    (folder / CONFIG_FILE).write_text(json.dumps(config))
    safetensors.torch.save_file(layout_tensors(head), folder / WEIGHTS_FILE)
    return EagleFolder(folder)


def drafts_of(read: EagleFolder, target: Target, length: int) -> list[int]:
    """Draft greedily behind the first ``length`` tokens, from the folder and the target's rows."""
    whole = verified(target, SamplingParams())
    first = whole.num_prompt_tokens
    told = whole.token_ids[first:length]
    for _ in range(LEVELS):
        num_levels = len(told) - (length - first) + 1
        logits = read.logits(
            target.embedding_rows[told].float(), whole.hidden(first, length).float(), num_levels
        )
        told.append(int(read.draft_token_ids[logits[-1].argmax()]))
    return told[length - first :]


def test_a_folder_drafts_what_the_head_drafts(tmp_path: Path) -> None:
    target = tiny_llama()
    head = head_of(target)
    read = folder_of(head, tmp_path)
    num_distinct = set[int]()
    for length in range(8, 24):
        session = head.start(
            cut(verified(target, SamplingParams()), target, length), stream="s", draws_drafts=False
        )
        session.seen.catch_up = lambda: None  # type: ignore[method-assign]  # the vocabulary alone
        expected = session.draft(LEVELS, np.random.default_rng(0)).token_ids
        assert tuple(drafts_of(read, target, length)) == expected
        num_distinct.update(expected)
    assert len(num_distinct) >= 3


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": CONTEXT},
        {"sliding_window": 999},
        {"rope_theta": 100.0},
        {"rms_norm_eps": 0.5},
        {"head_dim": 4},
    ],
)
def test_every_key_that_the_arithmetic_needs_is_read(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    target = tiny_llama()
    head, whole = head_of(target), verified(target, SamplingParams())
    first, length = whole.num_prompt_tokens, len(whole) - LEVELS
    embeddings = target.embedding_rows[whole.token_ids[first : length + LEVELS - 1]]
    states = whole.hidden(first, length)
    plain = folder_of(head, tmp_path).logits(embeddings, states, LEVELS)
    other = folder_of(head, tmp_path, **changes).logits(embeddings, states, LEVELS)
    assert float((plain - other).abs().max()) > 1e-4


def test_the_layout_names_what_engines_look_for() -> None:
    target = tiny_llama()
    head = head_of(target)
    tensors, config = layout_tensors(head), layout_config(head, context_length=64)
    size, num_draft = target.hidden_size, len(head.rows.head)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (size, 2 * size)
    assert tensors["lm_head.weight"].shape == (num_draft, size)
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    found = tensors["d2t"] + torch.arange(num_draft)
    assert torch.equal(found, head.rows.vocabulary.token_ids)
    assert torch.equal(torch.nonzero(tensors["t2d"])[:, 0], head.rows.vocabulary.token_ids)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (VOCAB_SIZE, num_draft)
    assert config["eagle_config"] == {"use_aux_hidden_state": False}
    assert config["sliding_window"] == CONTEXT + 1
    assert config["num_attention_heads"] * config["head_dim"] == size
    assert not config["tie_word_embeddings"]


def test_turning_keeps_lengths_and_tells_distances_alone() -> None:
    vectors = torch.randn((2, 3, 8), generator=torch.Generator().manual_seed(0))
    one, other = vectors
    for shift in (0, 5, 900):
        left = turned(one, torch.tensor(7 + shift))
        right = turned(other, torch.tensor(3 + shift))
        assert torch.allclose(left.norm(dim=-1), one.norm(dim=-1), atol=1e-5)
        found = (left * right).sum(-1)
        expected = (turned(one, torch.tensor(4)) * other).sum(-1)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
