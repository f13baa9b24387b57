"""A key-value cache that can be rolled back to any earlier length.

The caches of transformers lose what a sliding window has passed, and their ``crop`` has edge values
of its own. These layers keep every position in one growing buffer, show a layer only the part that
its window may see, and so make ``keep(n)`` a change of one number, right for full and for
sliding-window attention.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.configuration_utils import PretrainedConfig

from schemas.errors import KnownError

_FIRST_CAPACITY = 256
_ROLLBACK_TYPES = {"full_attention", "sliding_attention"}


class RollbackUnsupportedError(KnownError, ValueError):
    """The model keeps a running state that cannot be rolled back to an earlier position."""


class RollbackLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one layer, each (batch, heads, capacity, head size).

    Args:
        sliding_window: Positions a query may see, itself included; None for all.
    """

    is_croppable = True

    def __init__(self, sliding_window: int | None = None) -> None:
        super().__init__()
        self.sliding_window = sliding_window
        self.is_sliding = sliding_window is not None
        self.length = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the first buffers in the shape of what arrives."""
        self.keys = _buffer_like(key_states, _FIRST_CAPACITY)
        self.values = _buffer_like(value_states, _FIRST_CAPACITY)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (batch, heads, T, head size) and return what these T queries may see."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        visible, offset = self.get_mask_sizes(key_states.shape[-2])
        end = self.length + key_states.shape[-2]
        self.keys = _grown(self.keys, self.length, end)
        self.values = _grown(self.values, self.length, end)
        self.keys[..., self.length : end, :] = key_states
        self.values[..., self.length : end, :] = value_states
        self.length = end
        window = slice(offset, offset + visible)
        return self.keys[..., window, :], self.values[..., window, :]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (number of visible positions, position of the first) for the next queries."""
        offset = 0
        if self.sliding_window is not None:
            offset = max(self.length - self.sliding_window + 1, 0)
        return self.length + query_length - offset, offset

    def get_seq_length(self) -> int:
        """Return the number of positions kept."""
        return self.length

    def get_max_length(self) -> int:
        """Return -1: the buffer grows."""
        return -1

    def keep(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"keep({length}) outside 0..{self.length}")
        self.length = length


class RollbackCache(Cache):  # type: ignore[misc]  # transformers is untyped
    """One ``RollbackLayer`` per layer of the model."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(layers=[RollbackLayer(window) for window in layer_windows(config)])

    def keep(self, length: int) -> None:
        """Forget every position from ``length`` on, 0 <= length <= the present length."""
        for layer in self.layers:
            # A layer that reads another layer's keys (shared KV) is never filled.
            if layer.is_initialized:
                layer.keep(length)


def layer_windows(config: PretrainedConfig) -> list[int | None]:
    """Return the sliding window of every layer, None where attention is full.

    Raises:
        RollbackUnsupportedError: If a layer is neither full nor sliding-window attention.
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "sliding_window", None)
    types = getattr(text, "layer_types", None)
    if types is None:
        sliding = window is not None and getattr(text, "use_sliding_window", True)
        types = ["sliding_attention" if sliding else "full_attention"] * text.num_hidden_layers
    for index, layer_type in enumerate(types):
        if layer_type not in _ROLLBACK_TYPES:
            raise RollbackUnsupportedError(
                f"layer {index} of {text.model_type} is {layer_type!r}, and only "
                f"{sorted(_ROLLBACK_TYPES)} can be rolled back: choose another target"
            )
    return [window if layer_type == "sliding_attention" else None for layer_type in types]


def _buffer_like(states: torch.Tensor, capacity: int) -> torch.Tensor:
    batch, heads, _, size = states.shape
    return states.new_empty((batch, heads, capacity, size))


def _grown(buffer: torch.Tensor, length: int, needed: int) -> torch.Tensor:
    capacity = buffer.shape[-2]
    if needed <= capacity:
        return buffer
    while capacity < needed:
        capacity *= 2
    larger = _buffer_like(buffer, capacity)
    larger[..., :length, :] = buffer[..., :length, :]
    return larger
