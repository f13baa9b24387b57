"""The model that reads tokens as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from inference.drafters.frozen_rows import FrozenRows
from inference.drafters.head_training import TrainableHead
from inference.drafters.token_lm import ARCHITECTURE, TokenLmUnroll, initial_token_lm_weights
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, LossSettings


class TrainableTokenLm(TrainableHead):
    """The model at K positions in a row, told the verified tokens (``TrainableHead``).

    Args:
        drafter_id: Name in the pool.
        rows: What the target lends; their type is the type of the arithmetic.
        inner_size: Width of the hidden layer.
        rank: Width that embeddings are reduced to.
        num_read: Tokens read, >= 1.
        loss_settings: Weights of levels and terms.
        seed: Seeds the untrained weights.
    """

    architecture = ARCHITECTURE

    def __init__(
        self,
        drafter_id: str,
        rows: FrozenRows,
        *,
        inner_size: int,
        rank: int,
        num_read: int,
        loss_settings: LossSettings = DEFAULT_LOSS,
        seed: int = 0,
    ) -> None:
        super().__init__(drafter_id, rows, loss_settings=loss_settings, seed=seed)
        self.num_context = num_read - 1
        self._sizes = (self.hidden_size, inner_size, rank, num_read)

    def _untrained(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return initial_token_lm_weights(*self._sizes, generator)

    def _unroll(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> TokenLmUnroll:
        return TokenLmUnroll(weights, self._rows.embeddings, batch.context_token_ids)
