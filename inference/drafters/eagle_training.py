"""The head with attention as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from inference.drafters.eagle import (
    ARCHITECTURE,
    EagleLayer,
    EagleUnroll,
    initial_eagle_weights,
)
from inference.drafters.hydra import FrozenRows, normalised
from inference.drafters.hydra_training import VOCABULARY, draft_table
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, LossSettings, unrolled_loss
from learner.updates.rule import on_device


class TrainableEagle:
    """Cross-entropy of the layer unrolled over K levels, told the verified tokens.

    Levels are unrolled on the head's own states, as they are when it serves (the training-time
    test of EAGLE-3), not on the target's.

    Args:
        drafter_id: Name in the pool.
        rows: What the target lends; their type is the type of the arithmetic.
        inner_size: Width of the feed-forward part.
        num_heads: Of attention; divides H.
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
        num_heads: int,
        num_context: int,
        loss_settings: LossSettings = DEFAULT_LOSS,
        seed: int = 0,
    ) -> None:
        self.drafter_id = drafter_id
        self.draft_vocabulary_hash = rows.vocabulary.sha256
        self.vocab_size, self.hidden_size = rows.embeddings.shape
        self.num_context = num_context
        if self.hidden_size % num_heads:
            raise ValueError(
                f"drafter {drafter_id}: num_heads={num_heads} does not divide the target's "
                f"hidden size {self.hidden_size}"
            )
        self._sizes = (self.hidden_size, inner_size, num_heads, num_context)
        self._rows = rows
        self.device = rows.device
        self._loss_settings = loss_settings
        self._seed = seed
        self._token_to_draft = draft_table(rows)

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return untrained float32 parameters."""
        generator = torch.Generator().manual_seed(self._seed)
        return on_device(initial_eagle_weights(*self._sizes, generator), self.device)

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
        layer = EagleLayer({name: tensor.to(dtype) for name, tensor in weights.items()})
        context = layer.keys_and_values(
            layer.pair(batch.context_hidden.to(dtype), self._embedding(batch.context_token_ids))
        )
        is_absent = batch.context_token_ids < 0
        unroll = EagleUnroll(layer, batch.hidden.to(dtype), context, is_absent)
        for level in range(batch.label_token_ids.shape[1]):
            scaled = unroll.step(self._embedding(batch.fed_token_ids[:, level]))
            yield F.linear(scaled, self._rows.head).float()

    def _embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return normalised(self._rows.embeddings[token_ids.clamp_min(0)])
