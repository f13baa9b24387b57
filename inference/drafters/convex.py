"""A head that is linear in its parameters, so that its cross-entropy is convex.

The theorems of online learning speak of convex losses; for this head they hold, and regret, path
length and bounds can be computed (``learner.updates.convex_analysis``). With ``s`` the target's
last hidden state at the last verified token and ``e`` the target's frozen embedding of the newest
token, level k computes

    x = P [rms_norm(s), rms_norm(e)]
    logits = rows (s / 2 + M_k x)

Only the maps M_k are trained. P is a frozen random projection, or absent, and ``rows`` are the
target's own frozen head rows. M starts at zero, so an untrained head is the target's head, less
sure, one position early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.frozen_rows import FrozenRows, normalised
from inference.drafters.head import HeadDrafter, HeadSession
from inference.packing import Linear, packed_linear
from inference.trajectory import Trajectory

ARCHITECTURE = "convex-linear-1"
MAPS, PROJECTION = "maps", "projection"
SURENESS = 0.5
"""Share of the target's own state; a head that has learned nothing should not be as sure."""


def convex_shapes(
    num_levels: int, hidden_size: int, rank: int | None
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of an artifact, by name; ``rank`` None = no projection."""
    if rank is None:
        return {MAPS: (num_levels, hidden_size, 2 * hidden_size)}
    return {MAPS: (num_levels, hidden_size, rank), PROJECTION: (rank, 2 * hidden_size)}


def random_projection(rank: int, hidden_size: int, generator: torch.Generator) -> torch.Tensor:
    """Return P, (rank, 2 H): normal, so that features of norm sqrt(2 H) keep theirs on average."""
    normal = torch.randn((rank, 2 * hidden_size), generator=generator)
    return normal.div(float(2 * hidden_size) ** 0.5)


def convex_features(
    state: torch.Tensor, embedding: torch.Tensor, projection: torch.Tensor | None
) -> torch.Tensor:
    """Return x from ``state`` (..., H) and rms-normed ``embedding`` (..., H)."""
    both = torch.cat([normalised(state), embedding], -1)
    return both if projection is None else F.linear(both, projection)


class ConvexUnroll:
    """W windows of one head.

    Args:
        state: (W, H), the target's, behind the newest verified token of each.
        embeddings: (V, H), of the target.
        maps: M_k; levels beyond those that were trained use the last one.
        projection: P, or None.
    """

    def __init__(
        self,
        state: torch.Tensor,
        embeddings: torch.Tensor,
        maps: Sequence[Linear],
        projection: torch.Tensor | None,
    ) -> None:
        self._state = state
        self._embeddings = embeddings
        self._maps, self._projection = maps, projection
        self._level = 0

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Go one level further, told the newest tokens (W,); return (W, H)."""
        embedding = normalised(self._embeddings[token_ids])
        features = convex_features(self._state, embedding, self._projection)
        mapped = self._maps[min(self._level, len(self._maps) - 1)](features)
        self._level += 1
        return SURENESS * self._state + mapped


class ConvexDrafter(HeadDrafter):
    """One version of one head, of the tensors of an artifact (``HeadDrafter``)."""

    def __init__(
        self,
        drafter_id: str,
        weights_version: int,
        tensors: Mapping[str, torch.Tensor],
        rows: FrozenRows,
    ) -> None:
        super().__init__(drafter_id, weights_version, tensors, rows)
        self.maps = [packed_linear(one.contiguous()) for one in self.weights[MAPS]]

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> ConvexSession:
        """Begin a request; a head keeps nothing between rounds."""
        return ConvexSession(self, trajectory, draws_drafts=draws_drafts)


class ConvexSession(HeadSession):
    """One request of one head."""

    def __init__(
        self, drafter: ConvexDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        super().__init__(drafter.rows, trajectory, draws_drafts=draws_drafts)
        self._drafter = drafter

    def unroll(self, starts: NDArray[np.int64]) -> ConvexUnroll:
        """Begin at the target's states."""
        projection = self._drafter.weights.get(PROJECTION)
        return ConvexUnroll(
            self.states(starts), self.rows.embeddings, self._drafter.maps, projection
        )
