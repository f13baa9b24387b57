"""The model that reads tokens as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from inference.drafters.hydra import FrozenRows
from inference.drafters.hydra_training import VOCABULARY, draft_table
from inference.drafters.token_lm import ARCHITECTURE, initial_token_lm_weights, token_lm_state
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, LossSettings, unrolled_loss
from learner.updates.rule import on_device


class TrainableTokenLm:
    """Cross-entropy of the model at K positions in a row, told the verified tokens.

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
        self.drafter_id = drafter_id
        self.draft_vocabulary_hash = rows.vocabulary.sha256
        self.vocab_size, self.hidden_size = rows.embeddings.shape
        self.num_context = num_read - 1
        self._sizes = (self.hidden_size, inner_size, rank, num_read)
        self._rows = rows
        self.device = rows.device
        self._loss_settings = loss_settings
        self._seed = seed
        self._token_to_draft = draft_table(rows)

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return untrained float32 parameters."""
        generator = torch.Generator().manual_seed(self._seed)
        return on_device(initial_token_lm_weights(*self._sizes, generator), self.device)

    def loss(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> torch.Tensor:
        """Return the mean over examples of the weighted sum over levels."""
        logits = self._logits(weights, batch)
        return unrolled_loss(logits, batch, self._token_to_draft, self._loss_settings)

    def artifact(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the serving tensors: weights in the target's type, and the draft vocabulary."""
        tensors = {name: tensor.to(self._rows.head.dtype) for name, tensor in weights.items()}
        return tensors | {VOCABULARY: self._rows.vocabulary.token_ids}

    def _logits(
        self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch
    ) -> Iterator[torch.Tensor]:
        dtype = self._rows.head.dtype
        cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
        tokens = torch.cat([batch.context_token_ids, batch.fed_token_ids], dim=1)
        num_read = self.num_context + 1
        for level in range(batch.label_token_ids.shape[1]):
            read = tokens[:, level : level + num_read]
            state = token_lm_state(cast, self._rows.embeddings, read)
            yield F.linear(state, self._rows.head).float()
