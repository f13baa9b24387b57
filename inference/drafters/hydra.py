"""A recurrent head on the target's last hidden state, with a reduced draft vocabulary.

In the manner of Hydra (Ankner et al. 2024): every level sees the token of the level before, so the
levels are sequentially dependent. One set of weights serves all levels. With ``s`` the target's
last hidden state at the last verified token and ``e`` the target's frozen embedding of the newest
token, each level computes

    s <- s + W2 silu(W1 [rms_norm(s), rms_norm(e)]) + Wf rms_norm(e)
    logits = rows (s * g)

where ``rows`` are the target's own frozen head rows of the draft vocabulary. W2 and Wf start at
zero and g at one half, so an untrained head is the target's head, less sure, one position early.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.frozen_rows import FrozenRows, normalised
from inference.drafters.head import HeadDrafter, HeadSession, predict_heads
from inference.packing import Linear, packed_linear
from inference.ports import Predictions, WindowBatch
from inference.trajectory import Trajectory

ARCHITECTURE = "hydra-recurrent-1"


def hydra_shapes(hidden_size: int, inner_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    return {
        "mix": (inner_size, 2 * hidden_size),
        "out": (hidden_size, inner_size + hidden_size),
        "gain": (hidden_size,),
    }


def initial_hydra_weights(
    hidden_size: int, inner_size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return untrained float32 parameters; ``out`` joins W2 and Wf and starts at zero."""
    shapes = hydra_shapes(hidden_size, inner_size)
    bound = (2 * hidden_size) ** -0.5
    return {
        "mix": torch.empty(shapes["mix"]).uniform_(-bound, bound, generator=generator),
        "out": torch.zeros(shapes["out"]),
        # A head that has learned nothing should not be as sure as the target is.
        "gain": torch.full(shapes["gain"], 0.5),
    }


def next_state(
    state: torch.Tensor, embedding: torch.Tensor, mix: Linear, out: Linear
) -> torch.Tensor:
    """Return the state of the next level, (..., H), from ``state`` and rms-normed ``embedding``."""
    mixed = F.silu(mix(torch.cat([normalised(state), embedding], -1)))
    return state + out(torch.cat([mixed, embedding], -1))


class HydraUnroll:
    """W windows of one head.

    Args:
        state: (W, H), the target's, behind the newest verified token of each.
        embeddings: (V, H), of the target.
        mix: W1.
        out: W2 and Wf.
        gain: g, (H,).
    """

    def __init__(
        self,
        state: torch.Tensor,
        embeddings: torch.Tensor,
        mix: Linear,
        out: Linear,
        gain: torch.Tensor,
    ) -> None:
        self._state = state
        self._embeddings = embeddings
        self._mix, self._out, self._gain = mix, out, gain

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Go one level further, told the newest tokens (W,); return (W, H)."""
        embedding = normalised(self._embeddings[token_ids])
        self._state = next_state(self._state, embedding, self._mix, self._out)
        return self._state * self._gain


class HydraDrafter(HeadDrafter):
    """One version of one head (``HeadDrafter``).

    Heads with the same ``rows`` object are scored together.
    """

    def __init__(
        self,
        drafter_id: str,
        weights_version: int,
        weights: Mapping[str, torch.Tensor],
        rows: FrozenRows,
    ) -> None:
        super().__init__(drafter_id, weights_version, weights, rows)
        self.mix = packed_linear(self.weights["mix"])
        self.out = packed_linear(self.weights["out"])

    @property
    def group_key(self) -> tuple[object, ...]:
        """Heads over the same frozen rows."""
        return (ARCHITECTURE, id(self.rows))

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> HydraSession:
        """Begin a request; a head keeps nothing between rounds."""
        return HydraSession(self, trajectory, draws_drafts=draws_drafts)

    def predict_group(
        self, sessions: Sequence[HydraSession], windows: WindowBatch
    ) -> list[Predictions]:
        """Unroll all heads over all windows, one product with the shared head rows per level."""
        return predict_heads(sessions, windows)


class HydraSession(HeadSession):
    """One request of one head."""

    def __init__(
        self, drafter: HydraDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        super().__init__(drafter.rows, trajectory, draws_drafts=draws_drafts)
        self._drafter = drafter

    def unroll(self, starts: NDArray[np.int64]) -> HydraUnroll:
        """Begin at the target's states."""
        head = self._drafter
        gain = head.weights["gain"]
        return HydraUnroll(self.states(starts), self.rows.embeddings, head.mix, head.out, gain)
