"""Weights laid out once for the processor's matrix units, instead of at every product.

A bfloat16 product of a few rows on a CPU spends much of its time bringing the weights into the
layout of the matrix units. oneDNN can keep that layout; the products are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Maps (..., in) to (..., out)."""

_TYPICAL_ROWS = 4
"""Rows of a verification; the layout is chosen for it and right for any number."""


def packed_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the fastest product with frozen weights (out, in), for inference only."""
    if not _is_packable(weight):
        return lambda states: F.linear(states, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _TYPICAL_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise

    def apply(states: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = multiply(states, packed, bias, "none", [], "")
        return product

    return apply


def pack_linear_layers(model: Any) -> None:
    """Let every linear layer of a model that only infers use packed weights.

    The plain weights are given up, except those of the output head, which drafters borrow.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is torch.nn.Linear and _is_packable(module.weight):
            setattr(module, "forward", packed_linear(module.weight, module.bias))  # noqa: B010
            if module is not head:
                module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)


def _is_packable(weight: torch.Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
