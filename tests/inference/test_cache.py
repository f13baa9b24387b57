"""Rolling back a cache is the same as never having gone further."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from inference.cache import RollbackCache, RollbackLayer, RollbackUnsupportedError, layer_windows
from inference.target import Target
from tests.inference.tiny import SLIDING_WINDOW, VOCAB_SIZE, tiny_gemma3, tiny_llama, tiny_tokenizer

MakeTarget = Callable[[], Target]
TARGETS = pytest.mark.parametrize("make_target", [tiny_llama, tiny_gemma3])
TOLERANCE = 1e-5
"""Logits have a spread of about 2; float32 rounding differs between one row and many."""


def tokens(seed: int, count: int) -> list[int]:
    """Draw token ids."""
    return np.random.default_rng(seed).integers(1, VOCAB_SIZE, count).tolist()  # type: ignore[no-any-return]


@torch.inference_mode()
def logits_of(target: Target, token_ids: list[int]) -> torch.Tensor:
    """Return the logits of the bare model, (T, V)."""
    return target.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("kept", [0, 1, 5, 12])
def test_keep_leaves_exactly_that_many_positions(kept: int) -> None:
    session = tiny_llama().start()
    session.forward(tokens(1, 12))
    session.keep(kept)
    assert session.length == kept


@pytest.mark.parametrize("length", [-1, 13, 1000])
def test_invalid_keep_is_refused_with_both_numbers(length: int) -> None:
    session = tiny_llama().start()
    session.forward(tokens(1, 12))
    with pytest.raises(ValueError, match=rf"keep\({length}\) outside 0\.\.12"):
        session.keep(length)
    assert session.length == 12


def test_keep_of_an_empty_cache_changes_nothing() -> None:
    session = tiny_llama().start()
    session.keep(0)
    assert session.length == 0
    assert session.forward(tokens(1, 3)).logits.shape == (3, VOCAB_SIZE)


@TARGETS
@pytest.mark.parametrize("kept", [0, 3, SLIDING_WINDOW, 20, 29, 30])
def test_rollback_equals_recomputation(make_target: MakeTarget, kept: int) -> None:
    target = make_target()
    first, second = tokens(2, 30), tokens(3, 6)
    session = target.start()
    session.forward(first)
    session.keep(kept)
    found = session.forward(second).logits
    expected = logits_of(target, first[:kept] + second)[kept:]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@TARGETS
def test_many_rollbacks_and_growth_of_the_buffer_equal_recomputation(
    make_target: MakeTarget,
) -> None:
    target = make_target()
    rng = np.random.default_rng(4)
    session, known = target.start(), list[int]()
    # The first buffer holds 256 positions: the walk crosses it several times, back and forth.
    for fed in (250, 5, 9, 1, 8, 240, 3, 40, 7):
        new = tokens(int(rng.integers(1000)), fed)
        found = session.forward(new, num_rows=min(fed, 4)).logits
        known += new
        expected = logits_of(target, known)[-min(fed, 4) :]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)
        kept = len(known) - int(rng.integers(0, min(fed, 20) + 1))
        session.keep(kept)
        del known[kept:]


@TARGETS
def test_token_by_token_equals_one_block(make_target: MakeTarget) -> None:
    target = make_target()
    sequence = tokens(5, 24)
    session = target.start()
    rows = [session.forward([token]).logits[0] for token in sequence]
    expected = logits_of(target, sequence)
    torch.testing.assert_close(torch.stack(rows), expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_sliding_layer_shows_only_its_window() -> None:
    layer = RollbackLayer(sliding_window=4)
    states = torch.arange(10.0).view(1, 1, 10, 1)
    layer.update(states, states)
    keys, values = layer.update(states[..., :2, :], states[..., :2, :])
    # The first query stands at position 10 and sees 7, 8, 9 and itself; the second adds its own.
    assert keys.flatten().tolist() == values.flatten().tolist() == [7.0, 8.0, 9.0, 0.0, 1.0]
    assert layer.get_mask_sizes(1) == (4, 9)


def test_rolled_back_positions_are_overwritten_not_shown() -> None:
    layer = RollbackLayer()
    states = torch.arange(6.0).view(1, 1, 6, 1)
    layer.update(states, states)
    layer.keep(2)
    keys, _ = layer.update(states[..., 5:, :], states[..., 5:, :])
    assert keys.flatten().tolist() == [0.0, 1.0, 5.0]
    assert layer.get_seq_length() == 3


def test_the_hidden_states_are_those_behind_the_logits() -> None:
    target = tiny_gemma3()
    output = target.start().forward(tokens(6, 9), num_rows=3)
    assert output.hidden.shape == (3, target.hidden_size)
    torch.testing.assert_close(output.hidden @ target.head_rows.T, output.logits)


def test_windows_of_layers_follow_the_config() -> None:
    assert layer_windows(tiny_llama().model.config) == [None, None]
    assert layer_windows(tiny_gemma3().model.config) == [SLIDING_WINDOW, None]
    mistral = transformers.MistralConfig(num_hidden_layers=2, sliding_window=6)
    assert layer_windows(mistral) == [6, 6]


def test_a_mistral_window_is_rolled_back_too() -> None:
    config = transformers.MistralConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=6,
        initializer_range=0.6,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache, sequence = RollbackCache(config), tokens(7, 20)
    with torch.inference_mode():
        model(input_ids=torch.tensor([sequence]), cache=cache, use_cache=True)
        cache.keep(14)
        found = model(input_ids=torch.tensor([[9, 8]]), cache=cache, use_cache=True).logits[0]
        expected = model(input_ids=torch.tensor([[*sequence[:14], 9, 8]]), use_cache=False).logits
    torch.testing.assert_close(found, expected[0, 14:], atol=TOLERANCE, rtol=TOLERANCE)


def test_layers_that_share_keys_are_rolled_back() -> None:
    config = transformers.Gemma3nTextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=16,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0] * 4,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache, sequence = RollbackCache(config), tokens(8, 20)
    with torch.inference_mode():
        model(input_ids=torch.tensor([sequence]), cache=cache, use_cache=True)
        cache.keep(11)
        found = model(input_ids=torch.tensor([[9, 8, 7]]), cache=cache, use_cache=True).logits[0]
        whole = torch.tensor([[*sequence[:11], 9, 8, 7]])
        expected = model(input_ids=whole, use_cache=False).logits[0, 11:]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_invalid_recurrent_model_is_refused_by_name() -> None:
    config = transformers.MambaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=16, state_size=4, num_hidden_layers=1
    )
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(RollbackUnsupportedError, match="MambaForCausalLM keeps a running state"):
        Target(model, tiny_tokenizer(), target_id="mamba", target_fingerprint="mamba")


def test_invalid_hybrid_layers_are_refused_by_number() -> None:
    config = transformers.Lfm2Config(
        num_hidden_layers=3, layer_types=["full_attention", "conv", "full_attention"]
    )
    with pytest.raises(RollbackUnsupportedError, match="layer 1 of lfm2 is 'conv'"):
        layer_windows(config)
    with pytest.raises(RollbackUnsupportedError, match="linear_attention"):
        layer_windows(transformers.Qwen3NextConfig(num_hidden_layers=4))
