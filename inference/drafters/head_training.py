"""What all heads have in common as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F

from inference.drafters.frozen_rows import VOCABULARY, FrozenRows, draft_table
from inference.drafters.head import Unroll
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, LossSettings, unrolled_loss
from learner.updates.rule import on_device


class TrainableHead(ABC):
    """Cross-entropy of a head to the target over K unrolled levels, told the verified tokens.

    Part of the weight is on the emitted token, which is what verification compares with, and part
    on the target's recorded distribution (the soft cross-entropy of OnlineSPEC, section 3), which
    says more per token. Tokens outside the draft vocabulary, and levels that were not verified,
    do not count. Levels weigh less the deeper they are, since a round reaches them less often.

    Args:
        drafter_id: Name in the pool.
        rows: What the target lends; their type is the type of the arithmetic.
        loss_settings: Weights of levels and terms.
        seed: Seeds the untrained weights.
    """

    architecture: str
    num_context = 0

    def __init__(
        self,
        drafter_id: str,
        rows: FrozenRows,
        *,
        loss_settings: LossSettings = DEFAULT_LOSS,
        seed: int = 0,
    ) -> None:
        self.drafter_id = drafter_id
        self.draft_vocabulary_hash = rows.vocabulary.sha256
        self.vocab_size, self.hidden_size = rows.embeddings.shape
        self.device = rows.device
        self._rows = rows
        self._dtype = rows.head.dtype
        self._loss_settings = loss_settings
        self._seed = seed
        self._token_to_draft = draft_table(rows)

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return untrained float32 parameters."""
        generator = torch.Generator().manual_seed(self._seed)
        return on_device(self._untrained(generator), self.device)

    def loss(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> torch.Tensor:
        """Return the mean over examples of the weighted sum over levels."""
        logits = self._logits(weights, batch)
        return unrolled_loss(logits, batch, self._token_to_draft, self._loss_settings)

    def artifact(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the serving tensors: weights in the target's type, and the draft vocabulary."""
        return self._cast(weights) | {VOCABULARY: self._rows.vocabulary.token_ids}

    @abstractmethod
    def _untrained(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        """Return untrained float32 parameters on the CPU."""

    @abstractmethod
    def _unroll(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> Unroll:
        """Begin the windows of a batch; the weights are of the type of the arithmetic."""

    def _cast(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._dtype) for name, tensor in weights.items()}

    def _logits(
        self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch
    ) -> Iterator[torch.Tensor]:
        """Yield float32 logits (B, D) level by level."""
        unroll = self._unroll(self._cast(weights), batch)
        for level in range(batch.label_token_ids.shape[1]):
            scaled = unroll.step(batch.fed_token_ids[:, level])
            yield F.linear(scaled, self._rows.head).float()
