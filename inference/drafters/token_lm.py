"""A small language model that reads tokens only: the last few, through one hidden layer.

In the manner of Bengio et al. (2003), over what the target lends: with ``e_1 .. e_N`` the target's
frozen, rms-normed embeddings of the last N tokens,

    logits = rows (O silu(M [R e_1, .., R e_N] + b))

where ``rows`` are the target's own frozen head rows of the draft vocabulary. It needs no state of
the target, so it proposes from the first output token on, and every window that covers a position
shares one prediction of it. O starts near zero: an untrained model is all but uniform.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.hydra import FrozenRows, HeadSession, normalised
from inference.ports import Draft, Predictions, WindowBatch
from inference.sampling import draw
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion

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


class TokenLmDrafter:
    """One version of one model.

    Args:
        drafter_id: Name in the pool.
        weights_version: Version of ``weights``.
        weights: Parameters by name (``token_lm_shapes``).
        rows: What the target lends.
    """

    def __init__(
        self,
        drafter_id: str,
        weights_version: int,
        weights: Mapping[str, torch.Tensor],
        rows: FrozenRows,
    ) -> None:
        self.version = DrafterVersion(
            drafter_id=drafter_id,
            weights_version=weights_version,
            draft_vocabulary_hash=rows.vocabulary.sha256,
        )
        self.weights = {name: tensor.to(rows.head) for name, tensor in weights.items()}
        self.rows = rows
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
        self.drafter = drafter

    @torch.inference_mode()
    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Propose token by token."""
        self.seen.catch_up()
        before = np.array([len(self.trajectory)])
        tokens = self.trajectory.token_ids[-self.drafter.num_read :]
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        for _ in range(num_tokens):
            state = self._read([*tokens, *token_ids], np.array([len(tokens) + len(token_ids)]))
            logits = self.logits(self.rows.logits(state), state, before)
            if self.draws_drafts:
                probs.append(self.full_probs(logits)[0])
                token_ids.append(draw(probs[-1][None], rng.random(1))[0])
            else:
                token_ids.append(int(self.best(logits)[0]))
        return Draft(
            token_ids=tuple(token_ids), probs=torch.stack(probs) if self.draws_drafts else None
        )

    @torch.inference_mode()
    def predict(self, windows: WindowBatch) -> Predictions:
        """Predict every verified position of the windows once."""
        self.seen.catch_up()
        levels = np.arange(windows.num_speculative_tokens)
        covered = np.minimum(windows.starts[:, None] + levels, len(self.trajectory))
        positions, places = np.unique(covered, return_inverse=True)
        states = self._read(self.trajectory.token_ids, positions)
        logits = self.logits(self.rows.logits(states), states, positions)
        index = torch.from_numpy(places.reshape(covered.shape))
        if self.draws_drafts:
            return Predictions(probs=self.full_probs(logits)[index])
        return Predictions(proposals=self.best(logits)[index].cpu().numpy())

    def _read(self, tokens: Sequence[int], positions: NDArray[np.int64]) -> torch.Tensor:
        """Return the states that predict ``positions``, (P, H), from the tokens before each."""
        padded = np.asarray([*([-1] * self.drafter.num_read), *tokens], dtype=np.int64)
        read = padded[positions[:, None] + np.arange(self.drafter.num_read)]
        token_ids = torch.from_numpy(read).to(self.rows.device)
        return token_lm_state(self.drafter.weights, self.rows.embeddings, token_ids)
