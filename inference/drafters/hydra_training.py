"""The recurrent head as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from inference.drafters.hydra import (
    ARCHITECTURE,
    FrozenRows,
    initial_hydra_weights,
    next_state,
    normalised,
)
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, OUTSIDE, LossSettings, unrolled_loss
from learner.updates.rule import on_device

VOCABULARY = "draft_token_ids"


class TrainableHydra:
    """Cross-entropy of a head to the target over K unrolled levels, told the verified tokens.

    Part of the weight is on the emitted token, which is what verification compares with, and part
    on the target's recorded distribution (the soft cross-entropy of OnlineSPEC, section 3), which
    says more per token. Tokens outside the draft vocabulary, and levels that were not verified,
    do not count. Levels weigh less the deeper they are, since a round reaches them less often.

    Args:
        drafter_id: Name in the pool.
        rows: What the target lends; their type is the type of the arithmetic.
        inner_size: Width of the mixing layer.
        loss_settings: Weights of levels and terms.
        seed: Seeds the untrained weights.
    """

    architecture = ARCHITECTURE
    num_context = 0

    def __init__(
        self,
        drafter_id: str,
        rows: FrozenRows,
        *,
        inner_size: int,
        loss_settings: LossSettings = DEFAULT_LOSS,
        seed: int = 0,
    ) -> None:
        self.drafter_id = drafter_id
        self.draft_vocabulary_hash = rows.vocabulary.sha256
        self._rows = rows
        self._inner_size = inner_size
        self._loss_settings = loss_settings
        self._seed = seed
        self.vocab_size, self.hidden_size = rows.embeddings.shape
        self.device = rows.device
        self._token_to_draft = draft_table(rows)

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return untrained float32 parameters."""
        generator = torch.Generator().manual_seed(self._seed)
        weights = initial_hydra_weights(self._rows.head.shape[1], self._inner_size, generator)
        return on_device(weights, self.device)

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
        """Yield float32 logits (B, D) level by level."""
        dtype = self._rows.head.dtype
        cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
        mix, out = partial(F.linear, weight=cast["mix"]), partial(F.linear, weight=cast["out"])
        state = batch.hidden.to(dtype)
        for level in range(batch.label_token_ids.shape[1]):
            embedding = normalised(self._rows.embeddings[batch.fed_token_ids[:, level]])
            state = next_state(state, embedding, mix, out)
            yield F.linear(state * cast["gain"], self._rows.head).float()


def draft_table(rows: FrozenRows) -> torch.Tensor:
    """Return the index of every target token in the draft vocabulary, int64 (V,)."""
    table = torch.full((rows.embeddings.shape[0],), OUTSIDE, dtype=torch.int64)
    table[rows.vocabulary.token_ids] = torch.arange(len(rows.head))
    return table.to(rows.device)
