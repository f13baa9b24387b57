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

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F

from inference.drafters.hydra import FrozenRows, HeadSession, normalised
from inference.packing import packed_linear
from inference.ports import Draft, Predictions, WindowBatch
from inference.sampling import draw
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion

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


class ConvexDrafter:
    """One version of one head.

    Args:
        drafter_id: Name in the pool.
        weights_version: Version of ``tensors``.
        tensors: Of the artifact (``convex_shapes``).
        rows: What the target lends.
    """

    def __init__(
        self,
        drafter_id: str,
        weights_version: int,
        tensors: Mapping[str, torch.Tensor],
        rows: FrozenRows,
    ) -> None:
        self.version = DrafterVersion(
            drafter_id=drafter_id,
            weights_version=weights_version,
            draft_vocabulary_hash=rows.vocabulary.sha256,
        )
        self.weights = {name: tensor.to(rows.head) for name, tensor in tensors.items()}
        self.rows = rows
        self._maps = [packed_linear(one.contiguous()) for one in self.weights[MAPS]]

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> ConvexSession:
        """Begin a request; a head keeps nothing between rounds."""
        return ConvexSession(self, trajectory, draws_drafts=draws_drafts)

    def scaled_state(
        self, state: torch.Tensor, token_ids: torch.Tensor, level: int
    ) -> torch.Tensor:
        """Return what the head rows are multiplied with at a level, (W, H).

        Args:
            state: (W, H), of the target.
            token_ids: int64 (W,), the newest tokens.
            level: From 0; levels beyond those that were trained use the last one's map.
        """
        embedding = normalised(self.rows.embeddings[token_ids])
        features = convex_features(state, embedding, self.weights.get(PROJECTION))
        mapped = self._maps[min(level, len(self._maps) - 1)](features)
        return SURENESS * state + mapped


class ConvexSession(HeadSession):
    """One request of one head."""

    def __init__(
        self, drafter: ConvexDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        super().__init__(drafter.rows, trajectory, draws_drafts=draws_drafts)
        self.drafter = drafter

    @torch.inference_mode()
    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Propose from the state behind the newest verified token."""
        self.seen.catch_up()
        length = len(self.trajectory)
        before = np.array([length])
        state = self.trajectory.hidden(length - 1, length)
        token_id = self.trajectory.token_ids[-1]
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        for level in range(num_tokens):
            scaled = self.drafter.scaled_state(state, torch.tensor([token_id]), level)
            logits = self.logits(self.rows.logits(scaled), scaled, before)
            if self.draws_drafts:
                probs.append(self.full_probs(logits)[0])
                token_id = draw(probs[-1][None], rng.random(1))[0]
            else:
                token_id = int(self.best(logits)[0])
            token_ids.append(token_id)
        return Draft(
            token_ids=tuple(token_ids), probs=torch.stack(probs) if self.draws_drafts else None
        )

    @torch.inference_mode()
    def predict(self, windows: WindowBatch) -> Predictions:
        """Read every level of verified windows, told the verified tokens."""
        self.seen.catch_up()
        first, last = int(windows.starts[0]) - 1, int(windows.starts[-1])
        states = self.trajectory.hidden(first, last)[torch.from_numpy(windows.starts - 1 - first)]
        verified = np.asarray(self.trajectory.token_ids, dtype=np.int64)
        found: list[torch.Tensor] = []
        for level in range(windows.num_known_levels, windows.num_speculative_tokens):
            newest = verified[np.minimum(windows.starts + level - 1, len(verified) - 1)]
            scaled = self.drafter.scaled_state(states, torch.from_numpy(newest), level)
            logits = self.logits(self.rows.logits(scaled), scaled, windows.starts)
            found.append(self.full_probs(logits) if self.draws_drafts else self.best(logits))
        return self.predictions(found, windows.num_known_levels)
