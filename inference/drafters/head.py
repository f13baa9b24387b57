"""What all heads over a target's frozen rows have in common: drafting, being scored, loading.

A head is an *unroll*: told the newest token of each of W windows, it gives the vectors that the
head rows are multiplied with, level by level. Training unrolls the same objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.frozen_rows import FrozenRows
from inference.drafters.seen_tokens import SeenTokens
from inference.ports import NO_PROPOSAL, Draft, Predictions, WindowBatch
from inference.sampling import draw, processed_probs
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion


class Unroll(Protocol):
    """W windows at some level."""

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Go one level further.

        Args:
            token_ids: int64 (W,), the newest token of each window.

        Returns:
            What the head rows are multiplied with, (W, H).
        """


class HeadDrafter(ABC):
    """One version of one head.

    Args:
        drafter_id: Name in the pool.
        weights_version: Version of ``weights``.
        weights: Tensors of the artifact by name, without the draft vocabulary; those that are not
            integers are brought into the target's type.
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
        self.weights = {
            name: tensor.to(rows.head) if tensor.is_floating_point() else tensor
            for name, tensor in weights.items()
        }
        self.rows = rows

    @abstractmethod
    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> HeadSession:
        """Begin a request."""


class HeadSession(ABC):
    """One request of one head.

    Args:
        rows: Of the head.
        trajectory: The request.
        draws_drafts: Whether drafts are drawn.
    """

    def __init__(self, rows: FrozenRows, trajectory: Trajectory, *, draws_drafts: bool) -> None:
        self.rows = rows
        self.trajectory = trajectory
        self.draws_drafts = draws_drafts
        self.seen = SeenTokens(rows, trajectory)

    @abstractmethod
    def unroll(self, starts: NDArray[np.int64]) -> Unroll:
        """Begin windows whose first level predicts positions ``starts``, int64 (W,) ascending."""

    def states(self, starts: NDArray[np.int64]) -> torch.Tensor:
        """Return the target's states behind the tokens before ``starts``, (W, H)."""
        first, last = int(starts[0]) - 1, int(starts[-1])
        return self.trajectory.hidden(first, last)[torch.from_numpy(starts - 1 - first)]

    @torch.inference_mode()
    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Unroll from the state behind the newest verified token."""
        self.seen.catch_up()
        before = np.array([len(self.trajectory)])
        unroll = self.unroll(before)
        token_id = self.trajectory.token_ids[-1]
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        for _ in range(num_tokens):
            scaled = unroll.step(torch.tensor([token_id]))
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

    def predict(self, windows: WindowBatch) -> Predictions:
        """Unroll over verified windows, told the verified tokens."""
        return predict_heads([self], windows)[0]

    def finish(self) -> None:  # noqa: B027  # a kind may leave it as it is
        """Nothing is kept."""

    def logits(
        self, vocabulary_logits: torch.Tensor, states: torch.Tensor, before: NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the logits (W, D + E) of all that may be proposed, from those of (W, D)."""
        return torch.cat([vocabulary_logits, self.seen.logits(states, before)], -1)

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the most probable token of each row of (..., D + E).

        Raises:
            FloatingPointError: If a logit is NaN or infinitely large.
        """
        # Widening is exact, and the maximum over float32 is several times faster here.
        found = logits.float().max(-1)
        _refuse_non_finite(found.values)
        return self.seen.proposable[found.indices]

    def full_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the processed distributions over the target's vocabulary, (..., V).

        Raises:
            FloatingPointError: If a logit is NaN or infinitely large.
        """
        _refuse_non_finite(logits.float().max(-1).values)
        probs = processed_probs(logits, self.trajectory.params)
        full = probs.new_zeros((*probs.shape[:-1], self.rows.embeddings.shape[0]))
        full[..., self.seen.proposable] = probs
        return full

    def found(self, logits: torch.Tensor) -> torch.Tensor:
        """Return what predictions hold of logits (..., D + E): tokens, or distributions."""
        return self.full_probs(logits) if self.draws_drafts else self.best(logits)

    def predictions(self, levels: Sequence[torch.Tensor], num_known_levels: int) -> Predictions:
        """Return what was found level by level, (W, V) or (W,) each, behind the known levels."""
        found = torch.stack(list(levels), dim=1)
        if self.draws_drafts:
            return Predictions(probs=F.pad(found, (0, 0, num_known_levels, 0)))
        padded = F.pad(found, (num_known_levels, 0), value=NO_PROPOSAL)
        return Predictions(proposals=padded.cpu().numpy())


@torch.inference_mode()
def predict_heads(sessions: Sequence[HeadSession], windows: WindowBatch) -> list[Predictions]:
    """Return what each head would have proposed at every level of every window.

    Level k is told the verified tokens before it: a window counts a level only while all levels
    before were accepted, and then the verified tokens are the drafted ones.

    Args:
        sessions: Of one request, with drafters over the same frozen rows.
        windows: Windows of that request.
    """
    trajectory, rows = sessions[0].trajectory, sessions[0].rows
    for session in sessions:
        session.seen.catch_up()
    unrolls = [session.unroll(windows.starts) for session in sessions]
    verified = np.asarray(trajectory.token_ids, dtype=np.int64)
    found: list[list[torch.Tensor]] = [[] for _ in sessions]
    for level in range(windows.num_speculative_tokens):
        places = np.minimum(windows.starts + level - 1, len(verified) - 1)
        newest = torch.from_numpy(verified[places])
        scaled = [unroll.step(newest) for unroll in unrolls]
        if level < windows.num_known_levels:
            continue
        # One product for all heads: their shared rows are read once.
        joint = torch.split(rows.logits(torch.cat(scaled)), len(places))
        for session, own, state, kept in zip(sessions, joint, scaled, found, strict=True):
            kept.append(session.found(session.logits(own, state, windows.starts)))
    return [
        session.predictions(kept, windows.num_known_levels)
        for session, kept in zip(sessions, found, strict=True)
    ]


def _refuse_non_finite(values: torch.Tensor) -> None:
    if not torch.isfinite(values).all():
        raise FloatingPointError("the head's output is not finite")
