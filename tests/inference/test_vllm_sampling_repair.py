"""The fault of vLLM's CPU build that loses temperatures: found and mended, nothing else touched."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from inference.vllm_plugin.sampling_repair import FUNCTION, expanded, is_right, repair_sampling


def loses_what_it_writes(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, **_: Any
) -> torch.Tensor:
    """Stand for vLLM's: the kernel writes to a copy in whole numbers."""
    output = torch.zeros(num_tokens, dtype=x.dtype)
    output.to(torch.int64).copy_(expanded(x, cu_num_tokens, num_tokens))
    return output


def test_values_are_repeated_as_often_as_their_row_has_tokens() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expanded(torch.tensor([0.7, 0.4, 0.0]), ends, 5, 0, 1)
    assert torch.equal(found, torch.tensor([0.7, 0.7, 1.0, 1.0, 1.0]))
    top_k = expanded(torch.tensor([5, 9, 0], dtype=torch.int32), ends, 5)
    assert top_k.dtype == torch.int32
    assert top_k.tolist() == [5, 5, 0, 0, 0]


def test_a_function_that_loses_temperatures_is_mended_and_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = SimpleNamespace(**{FUNCTION: loses_what_it_writes})
    with caplog.at_level(logging.WARNING):
        assert repair_sampling(module)
    assert "loses temperature" in caplog.text
    assert is_right(getattr(module, FUNCTION))
    assert not repair_sampling(module)


def test_a_function_that_is_right_and_a_vllm_without_it_are_left_alone() -> None:
    def right(x: torch.Tensor, ends: torch.Tensor, size: int, **replaced: int) -> torch.Tensor:
        return expanded(x, ends, size, replaced["replace_from"], replaced["replace_to"])

    module = SimpleNamespace(**{FUNCTION: right})
    assert not repair_sampling(module)
    assert getattr(module, FUNCTION) is right
    assert not repair_sampling(SimpleNamespace())
