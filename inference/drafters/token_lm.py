"""A small language model that reads tokens only: the last few, through one hidden layer.

In the manner of Bengio et al. (2003), over what the target lends: with ``e_1 .. e_N`` the target's
frozen, rms-normed embeddings of the last N tokens,

    logits = rows (O silu(M [R e_1, .., R e_N] + b))

where ``rows`` are the target's own frozen head rows of the draft vocabulary. It needs no state of
the target, so it proposes from the first output token on, and every window that covers a position
shares one prediction of it. O starts near zero: an untrained model is all but uniform.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.frozen_rows import FrozenRows, normalised
from inference.drafters.head import HeadDrafter, HeadSession
from inference.ports import Predictions, WindowBatch
from inference.trajectory import Trajectory

ARCHITECTURE = "token-feedforward-1"


def token_lm_shapes(
    hidden_size: int, inner_size: int, rank: int, num_read: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name; ``num_read`` is N."""
    return {
        "reduce": (rank, hidden_size),
        "mix": (inner_size, num_read * rank),
        "bias": (inner_size,),
        "out": (hidden_size, inner_size),
    }


def initial_token_lm_weights(
    hidden_size: int, inner_size: int, rank: int, num_read: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return untrained float32 parameters."""
    weights = {}
    for name, shape in token_lm_shapes(hidden_size, inner_size, rank, num_read).items():
        bound = (3.0 / shape[-1]) ** 0.5
        weights[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    weights["bias"].zero_()
    # Head rows are long: at full size the first loss would be far above that of guessing.
    weights["out"].mul_(0.01)
    return weights


def token_lm_state(
    weights: Mapping[str, torch.Tensor], embeddings: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """Return what the head rows are multiplied with, (..., H).

    Args:
        weights: Parameters by name (``token_lm_shapes``).
        embeddings: (V, H), of the target.
        token_ids: int64 (..., N), the last tokens, the oldest first; negative = there is none.
    """
    read = normalised(embeddings[token_ids.clamp_min(0)])
    reduced = F.linear(read, weights["reduce"]).masked_fill((token_ids < 0)[..., None], 0.0)
    inner = F.silu(F.linear(reduced.flatten(-2), weights["mix"], weights["bias"]))
    return F.linear(inner, weights["out"])


class TokenLmUnroll:
    """W windows of one model.

    Args:
        weights: Parameters by name (``token_lm_shapes``).
        embeddings: (V, H), of the target.
        token_ids: int64 (W, N - 1), the tokens before the newest of each, the oldest first;
            negative = there is none.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        embeddings: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:
        self._weights = weights
        self._embeddings = embeddings
        self._token_ids = token_ids

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Go one level further, told the newest tokens (W,); return (W, H)."""
        newest = token_ids.to(self._token_ids.device)[:, None]
        read = torch.cat([self._token_ids, newest], dim=1)
        self._token_ids = read[:, 1:]
        return token_lm_state(self._weights, self._embeddings, read)


class TokenLmDrafter(HeadDrafter):
    """One version of one model (``HeadDrafter``)."""

    def __init__(
        self,
        drafter_id: str,
        weights_version: int,
        weights: Mapping[str, torch.Tensor],
        rows: FrozenRows,
    ) -> None:
        super().__init__(drafter_id, weights_version, weights, rows)
        self.num_read = self.weights["mix"].shape[1] // self.weights["reduce"].shape[0]

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> TokenLmSession:
        """Begin a request; the model keeps nothing between rounds."""
        return TokenLmSession(self, trajectory, draws_drafts=draws_drafts)


class TokenLmSession(HeadSession):
    """One request of one model."""

    def __init__(
        self, drafter: TokenLmDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        super().__init__(drafter.rows, trajectory, draws_drafts=draws_drafts)
        self._drafter = drafter

    def unroll(self, starts: NDArray[np.int64]) -> TokenLmUnroll:
        """Begin at the tokens before the newest."""
        before = self._before(starts - 1, self._drafter.num_read - 1)
        return TokenLmUnroll(self._drafter.weights, self.rows.embeddings, before)

    @torch.inference_mode()
    def predict(self, windows: WindowBatch) -> Predictions:
        """Predict every verified position of the windows once, whatever its level."""
        self.seen.catch_up()
        levels = np.arange(windows.num_speculative_tokens)
        covered = np.minimum(windows.starts[:, None] + levels, len(self.trajectory))
        positions, places = np.unique(covered, return_inverse=True)
        read = self._before(positions, self._drafter.num_read)
        states = token_lm_state(self._drafter.weights, self.rows.embeddings, read)
        found = self.found(self.logits(self.rows.logits(states), states, positions))
        by_window = found[torch.from_numpy(places.reshape(covered.shape))]
        if self.draws_drafts:
            return Predictions(probs=by_window)
        return Predictions(proposals=by_window.cpu().numpy())

    def _before(self, positions: NDArray[np.int64], count: int) -> torch.Tensor:
        """Return the ``count`` tokens before each position, int64 (P, count)."""
        padded = np.asarray([*([-1] * count), *self.trajectory.token_ids], dtype=np.int64)
        read = padded[positions[:, None] + np.arange(count)]
        return torch.from_numpy(read).to(self.rows.device)
