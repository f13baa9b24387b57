"""The draft model of EAGLE-3 as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inference.drafters.eagle import (
    ARCHITECTURE,
    SIZES,
    EagleLayer,
    EagleUnroll,
    initial_eagle_weights,
    refuse_sizes,
)
from inference.drafters.frozen_rows import FrozenRows
from inference.drafters.head_training import TrainableHead
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, LossSettings

HEAD_SIZE = 64
"""Of an attention head where the number of heads is not told."""


class TrainableEagle(TrainableHead):
    """The layer unrolled over K levels, told the verified tokens (``TrainableHead``).

    Levels are unrolled on the head's own states, as they are when it serves (the training-time
    test of EAGLE-3), not on the target's.

    Args:
        drafter_id: Name in the pool.
        rows: What the target lends; their type is the type of the arithmetic.
        inner_size: Width of the feed-forward part.
        num_heads: Of attention; divides H. None = as many as are 64 wide, or one.
        num_context: Positions attended to before the newest, >= 1.
        loss_settings: Weights of levels and terms.
        seed: Seeds the untrained weights.

    Raises:
        ValueError: If the heads do not divide H.
    """

    architecture = ARCHITECTURE

    def __init__(
        self,
        drafter_id: str,
        rows: FrozenRows,
        *,
        inner_size: int,
        num_heads: int | None,
        num_context: int,
        loss_settings: LossSettings = DEFAULT_LOSS,
        seed: int = 0,
    ) -> None:
        super().__init__(drafter_id, rows, loss_settings=loss_settings, seed=seed)
        self.num_context = num_context
        self._num_heads = num_heads or max(self.hidden_size // HEAD_SIZE, 1)
        self._inner_size = inner_size
        try:
            refuse_sizes(self.hidden_size, self._num_heads, num_context)
        except ValueError as error:
            raise ValueError(f"drafter {drafter_id}: {error}") from None

    def artifact(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the serving tensors: as of every head, and the sizes of attention."""
        sizes = torch.tensor([self._num_heads, self.num_context])
        return {SIZES: sizes} | super().artifact(weights)

    def _untrained(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return initial_eagle_weights(self.hidden_size, self._inner_size, generator)

    def _unroll(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> EagleUnroll:
        layer = EagleLayer(weights, self._num_heads, self.num_context)
        before = batch.context_token_ids
        states = batch.context_hidden.to(self._dtype)
        embeddings = self._rows.embeddings
        places = torch.arange(before.shape[1], device=self.device)
        _, context = layer.attention_inputs(states, embeddings[before.clamp_min(0)], places)
        newest = torch.full_like(batch.fed_token_ids[:, 0], before.shape[1])
        state = batch.hidden.to(self._dtype)
        return EagleUnroll(layer, embeddings, state, context, before < 0, newest)
