"""The recurrent head as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F

from inference.drafters.frozen_rows import FrozenRows
from inference.drafters.head_training import TrainableHead
from inference.drafters.hydra import ARCHITECTURE, HydraUnroll, initial_hydra_weights
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, LossSettings


class TrainableHydra(TrainableHead):
    """The recurrent head; ``inner_size`` is the width of its mixing layer (``TrainableHead``)."""

    architecture = ARCHITECTURE

    def __init__(
        self,
        drafter_id: str,
        rows: FrozenRows,
        *,
        inner_size: int,
        loss_settings: LossSettings = DEFAULT_LOSS,
        seed: int = 0,
    ) -> None:
        super().__init__(drafter_id, rows, loss_settings=loss_settings, seed=seed)
        self._inner_size = inner_size

    def _untrained(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return initial_hydra_weights(self.hidden_size, self._inner_size, generator)

    def _unroll(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> HydraUnroll:
        mix, out = (partial(F.linear, weight=weights[name]) for name in ("mix", "out"))
        state = batch.hidden.to(self._dtype)
        return HydraUnroll(state, self._rows.embeddings, mix, out, weights["gain"])
