"""Packed products are the plain ones, bit for bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from inference.packing import pack_linear_layers, packed_linear
from tests.inference.tiny import plain_greedy, random_prompts, tiny_llama

needs_packing = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor has no bfloat16 products to pack for",
)


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 16, 33])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_product_equals_the_plain_one_bit_for_bit(
    num_rows: int, with_bias: bool, dtype: torch.dtype
) -> None:
    weight = drawn(96, 64, dtype=dtype)
    bias = drawn(96, dtype=dtype, seed=1) if with_bias else None
    states = drawn(2, num_rows, 64, dtype=dtype, seed=2)
    with torch.inference_mode():
        found = packed_linear(weight, bias)(states)
        assert torch.equal(found, F.linear(states, weight, bias))


def test_later_changes_of_the_weights_do_not_reach_a_packed_product() -> None:
    weight = drawn(32, 16, dtype=torch.bfloat16)
    states = drawn(3, 16, dtype=torch.bfloat16, seed=1)
    with torch.inference_mode():
        product = packed_linear(weight)
        before = product(states)
        assert torch.equal(product(states), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_model_writes_what_it_wrote_before(dtype: torch.dtype) -> None:
    target = tiny_llama(3, dtype=dtype)
    prompts = random_prompts(0, count=4, length=10)
    before = plain_greedy(target, prompts, 20)
    pack_linear_layers(target.model)
    assert plain_greedy(target, prompts, 20) == before


@needs_packing
def test_packing_gives_up_the_plain_weights_but_not_those_that_drafters_borrow() -> None:
    target = tiny_llama(3, dtype=torch.bfloat16)
    head = target.head_rows.clone()
    pack_linear_layers(target.model)
    sizes = [
        module.weight.numel()
        for module in target.model.modules()
        if type(module) is torch.nn.Linear and module is not target.model.get_output_embeddings()
    ]
    assert sizes
    assert set(sizes) == {0}
    assert torch.equal(target.head_rows, head)


def test_a_float32_model_is_left_as_it_is() -> None:
    target = tiny_llama(3)
    names = {name: tensor.shape for name, tensor in target.model.named_parameters()}
    pack_linear_layers(target.model)
    assert {name: tensor.shape for name, tensor in target.model.named_parameters()} == names
