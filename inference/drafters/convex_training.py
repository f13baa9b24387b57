"""The convex head as something to train (``learner.training.TrainableDrafter``)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
import torch.nn.functional as F

from inference.drafters.convex import (
    ARCHITECTURE,
    MAPS,
    PROJECTION,
    ConvexUnroll,
    convex_features,
    convex_shapes,
    random_projection,
)
from inference.drafters.frozen_rows import FrozenRows, normalised
from inference.drafters.head_training import TrainableHead
from learner.examples import TrainingBatch
from learner.updates.losses import DEFAULT_LOSS, LossSettings, level_weights


class TrainableConvex(TrainableHead):
    """Cross-entropy of the linear head over K levels, told the verified tokens; convex.

    It is convex for terms that are: the cross-entropies to the emitted token and to the recorded
    ones. The tail, total variation and negatives are not.

    Args:
        drafter_id: Name in the pool.
        rows: What the target lends; their type is the type of the arithmetic.
        num_levels: K, >= 1; each has a map of its own.
        rank: Features kept by the random projection; None = all.
        loss_settings: Weights of levels and terms.
        seed: Seeds the projection.
    """

    architecture = ARCHITECTURE

    def __init__(
        self,
        drafter_id: str,
        rows: FrozenRows,
        *,
        num_levels: int,
        rank: int | None = 256,
        loss_settings: LossSettings = DEFAULT_LOSS,
        seed: int = 0,
    ) -> None:
        super().__init__(drafter_id, rows, loss_settings=loss_settings, seed=seed)
        self._shapes = convex_shapes(num_levels, self.hidden_size, rank)
        self._projection: torch.Tensor | None = None
        if rank is not None:
            generator = torch.Generator().manual_seed(seed)
            projection = random_projection(rank, self.hidden_size, generator)
            self._projection = projection.to(rows.head)

    def artifact(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the serving tensors: maps, projection, and the draft vocabulary."""
        tensors = super().artifact(weights)
        if self._projection is not None:
            tensors[PROJECTION] = self._projection
        return tensors

    def features(self, batch: TrainingBatch, level: int) -> torch.Tensor:
        """Return the frozen features of a level, (B, rank or 2 H)."""
        state = batch.hidden.to(self._dtype)
        embedding = normalised(self._rows.embeddings[batch.fed_token_ids[:, level]])
        return convex_features(state, embedding, self._projection)

    def smoothness(self, batch: TrainingBatch) -> float:
        """Return a Lipschitz constant of the gradient of ``loss`` on ``batch``.

        Per level the logits are rows M x, so that the second derivative is at most that of the
        cross-entropies, 1/2 each, times |rows|^2 |x|^2.

        Raises:
            ValueError: If the loss has terms that are not convex.
        """
        terms = self._loss_settings
        if terms.counts_tail or terms.acceptance_weight or terms.negative_weight:
            raise ValueError(
                f"drafter {self.drafter_id}: {terms} is not convex: train on emitted and "
                "recorded tokens alone"
            )
        weights = level_weights(batch.label_token_ids.shape[1], terms.level_decay)
        curvature = 0.5 * (terms.emitted_weight + terms.soft_weight)
        rows = float(torch.linalg.matrix_norm(self._rows.head.float(), 2)) ** 2
        squares = [
            weight * float(self.features(batch, level).float().square().sum(-1).mean())
            for level, weight in enumerate(weights)
        ]
        return curvature * rows * sum(squares)

    def _untrained(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        return {MAPS: torch.zeros(self._shapes[MAPS])}

    def _unroll(self, weights: Mapping[str, torch.Tensor], batch: TrainingBatch) -> ConvexUnroll:
        maps = [partial(F.linear, weight=one) for one in weights[MAPS]]
        state = batch.hidden.to(self._dtype)
        return ConvexUnroll(state, self._rows.embeddings, maps, self._projection)
