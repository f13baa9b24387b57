"""What the inference room needs from drafters and from outside, as protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from inference.trajectory import Trajectory
from learner.request_selector import Decision
from schemas.events import DrafterVersion

NO_PROPOSAL = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """Proposed tokens, 0..num_speculative_tokens of them.

    ``probs`` (m, V) are the distributions the tokens were drawn from, after the request's own
    temperature, top-k and top-p; None if they were not drawn (one-hot).
    """

    token_ids: tuple[int, ...] = ()
    probs: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowBatch:
    """Windows to score: level k of window w predicts position ``starts[w] + k - 1``.

    Attributes:
        starts: int64 (W,), ascending, each above ``num_prompt_tokens``.
        num_levels: int64 (W,), levels whose position is verified, 1..K.
        num_speculative_tokens: K.
        num_known_levels: Levels whose predictions are known already and will not be read, 0..K.
    """

    starts: NDArray[np.int64]
    num_levels: NDArray[np.int64]
    num_speculative_tokens: int
    num_known_levels: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What one drafter would have proposed in a batch of windows.

    Exactly one is set. ``proposals`` int64 (W, K), ``NO_PROPOSAL`` where it would have stopped;
    ``probs`` float32 (W, K, V) where drafts are drawn. Entries beyond a window's levels, and of
    known ones, are unread.
    """

    proposals: NDArray[np.int64] | None = None
    probs: torch.Tensor | None = None


class Selector(Protocol):
    """Selection inside one request."""

    @property
    def learns_first_level(self) -> bool:
        """Whether level 1 of a window is all that it learns."""

    def decide(self, is_awake: NDArray[np.bool_], rng: np.random.Generator) -> Decision:
        """Decide what the next round does; ``is_awake`` (N,) holds at least one True."""

    def end_round(
        self,
        decision: Decision,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_emitted_tokens: int,
    ) -> None:
        """Note the outcome of a round, before the windows that it completes are learned."""

    def learn(
        self,
        acceptance_probability: NDArray[np.float16],
        realised_acceptance: NDArray[np.float16],
        num_levels: NDArray[np.int16],
        starts: NDArray[np.int32],
    ) -> None:
        """Learn scored windows in order, arrays (W, K, N), (W, K, N), (W,) and (W,)."""


class DraftSession(Protocol):
    """One drafter at work on one request. It catches up with the trajectory by itself."""

    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Propose at most ``num_tokens`` >= 1 tokens to follow the trajectory."""

    def predict(self, windows: WindowBatch) -> Predictions:
        """Return what it would have proposed in verified windows, each batch in order of start."""

    def finish(self) -> None:
        """The request is over; its tokens may enter a shared history."""


class Drafter(Protocol):
    """A proposing model or rule."""

    @property
    def version(self) -> DrafterVersion:
        """Id, weights version and draft vocabulary, as events name them."""

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> DraftSession:
        """Begin a request; ``draws_drafts`` if tokens are drawn rather than the most probable."""


class GroupedDrafter(Drafter, Protocol):
    """A drafter whose kind is scored faster together than one by one."""

    @property
    def group_key(self) -> tuple[object, ...]:
        """Drafters with equal keys may be scored together."""

    def predict_group(
        self, sessions: Sequence[DraftSession], windows: WindowBatch
    ) -> Sequence[Predictions]:
        """Return the predictions of sessions whose drafters share this one's ``group_key``."""
