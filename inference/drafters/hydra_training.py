"""The recurrent head as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Mapping
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

VOCABULARY = "draft_token_ids"
_OUTSIDE = -100


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
        level_decay: Weight of a level relative to the one before, (0, 1].
        soft_weight: Share of the target's distribution, the rest is the emitted token's, [0, 1].
        seed: Seeds the untrained weights.
    """

    architecture = ARCHITECTURE

    def __init__(
        self,
        drafter_id: str,
        rows: FrozenRows,
        *,
        inner_size: int,
        level_decay: float = 0.8,
        soft_weight: float = 0.5,
        seed: int = 0,
    ) -> None:
        self.drafter_id = drafter_id
        self.draft_vocabulary_hash = rows.vocabulary.sha256
        self._rows = rows
        self._inner_size = inner_size
        self._level_decay = level_decay
        self._soft_weight = soft_weight
        self._seed = seed
        self.vocab_size, self.hidden_size = rows.embeddings.shape
        self._token_to_draft = torch.full((self.vocab_size,), _OUTSIDE, dtype=torch.int64)
        self._token_to_draft[rows.vocabulary.token_ids] = torch.arange(len(rows.head))

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return untrained float32 parameters."""
        generator = torch.Generator().manual_seed(self._seed)
        return initial_hydra_weights(self._rows.head.shape[1], self._inner_size, generator)

    def loss(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> torch.Tensor:
        """Return the mean over examples of the weighted sum over levels."""
        dtype = self._rows.head.dtype
        cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
        mix, out = partial(F.linear, weight=cast["mix"]), partial(F.linear, weight=cast["out"])
        state = batch.hidden.to(dtype)
        total = torch.zeros(())
        for level in range(batch.label_token_ids.shape[1]):
            embedding = normalised(self._rows.embeddings[batch.fed_token_ids[:, level]])
            state = next_state(state, embedding, mix, out)
            logits = F.linear(state * cast["gain"], self._rows.head).float()
            total = total + self._level_decay**level * self._level_loss(logits, batch, level)
        return total

    def _level_loss(self, logits: torch.Tensor, batch: TrainingBatch, level: int) -> torch.Tensor:
        log_probs = logits.log_softmax(-1)
        labels = self._in_vocabulary(batch.label_token_ids[:, level])
        emitted = F.nll_loss(log_probs, labels, ignore_index=_OUTSIDE, reduction="sum")
        top = self._in_vocabulary(batch.top_token_ids[:, level])
        weights = torch.where(top == _OUTSIDE, 0.0, batch.top_probabilities[:, level])
        soft = -(weights * log_probs.gather(1, top.clamp_min(0))).sum()
        return (self._soft_weight * soft + (1.0 - self._soft_weight) * emitted) / len(logits)

    def artifact(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the serving tensors: weights in the target's type, and the draft vocabulary."""
        tensors = {name: tensor.to(self._rows.head.dtype) for name, tensor in weights.items()}
        return tensors | {VOCABULARY: self._rows.vocabulary.token_ids}

    def _in_vocabulary(self, token_ids: torch.Tensor) -> torch.Tensor:
        found = self._token_to_draft[token_ids.clamp_min(0)]
        return torch.where(token_ids < 0, _OUTSIDE, found)
