"""Any small causal language model of transformers that shares the target's tokenizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from inference.ports import Draft, Predictions, WindowBatch
from inference.sampling import draw, processed_probs
from inference.target import Target, TargetSession
from inference.trajectory import Trajectory
from schemas.errors import KnownError
from schemas.events import DrafterVersion


class VocabularyMismatchError(KnownError, ValueError):
    """A drafter's tokens are not the target's tokens."""


class ContextExhaustedError(RuntimeError):
    """The request has outgrown the drafter's context; it is drafted for no more."""


class CausalLmDrafter:
    """Drafts with another causal language model, token by token.

    Args:
        model: The drafting model, wrapped as a ``Target`` (it needs the same cache).
        target: The verifying model.
        drafter_id: Name in the pool.
        weights_version: Version of its weights.

    Raises:
        VocabularyMismatchError: If some id stands for another token than in the target.
    """

    def __init__(
        self, model: Target, target: Target, *, drafter_id: str, weights_version: int = 0
    ) -> None:
        shared = check_same_tokens(model.tokenizer, target.tokenizer, drafter_id=drafter_id)
        # A model may have fewer rows than its tokenizer has tokens.
        self.num_shared_tokens = min(shared, target.vocab_size)
        self.version = DrafterVersion(drafter_id=drafter_id, weights_version=weights_version)
        self.model = model
        self.target_vocab_size = target.vocab_size

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> CausalLmSession:
        """Begin a request; the prompt is read when it is first needed."""
        return CausalLmSession(self, trajectory, draws_drafts=draws_drafts)


class CausalLmSession:
    """One request: a cache of the drafter that follows the trajectory and rolls back by itself."""

    def __init__(
        self, drafter: CausalLmDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        self._drafter = drafter
        self._trajectory = trajectory
        self._draws_drafts = draws_drafts
        self._session: TargetSession = drafter.model.start()
        self._fed: list[int] = []
        # Row i is what the drafter says about position i + 1: a token id, or a distribution.
        self._rows: list[Any] = []

    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Propose ``num_tokens`` tokens, fewer where the drafter's context ends."""
        room = self._drafter.model.context_length - len(self._trajectory) + 1
        if room < 1:
            raise ContextExhaustedError(
                f"{len(self._trajectory)} tokens, context {self._drafter.model.context_length}"
            )
        self._follow(self._trajectory.token_ids)
        token_ids: list[int] = []
        rows: list[torch.Tensor] = []
        while True:
            token_id, row = self._choose(rng)
            token_ids.append(token_id)
            rows.append(row)
            if len(token_ids) == min(num_tokens, room):
                break
            self._feed([token_id])
        probs = torch.stack(rows) if self._draws_drafts else None
        return Draft(token_ids=tuple(token_ids), probs=probs)

    def predict(self, windows: WindowBatch) -> Predictions:
        """Read the rows of verified positions; one row serves every window that covers it."""
        self._follow(self._trajectory.token_ids)
        levels = np.arange(windows.num_speculative_tokens)
        index = np.minimum(windows.starts[:, None] + levels - 1, len(self._rows) - 1)
        if self._draws_drafts:
            return Predictions(
                probs=torch.stack([self._rows[i] for i in index.flat]).view(*index.shape, -1)
            )
        proposals = np.array([self._rows[i] for i in index.flat], dtype=np.int64)
        return Predictions(proposals=proposals.reshape(index.shape))

    def finish(self) -> None:
        """Nothing is shared between requests."""

    def _choose(self, rng: np.random.Generator) -> tuple[int, torch.Tensor]:
        row = self._rows[-1]
        if self._draws_drafts:
            return draw(row[None], rng.random(1))[0], row
        return int(row), row

    def _follow(self, token_ids: list[int]) -> None:
        """Roll back to what agrees with the trajectory and feed the rest."""
        common = _common_prefix(self._fed, token_ids)
        self._session.keep(common)
        del self._fed[common:], self._rows[common:]
        if len(token_ids) > self._drafter.model.context_length:
            raise ContextExhaustedError(
                f"{len(token_ids)} tokens, context {self._drafter.model.context_length}"
            )
        if common < len(token_ids):
            self._feed(token_ids[common:])

    def _feed(self, token_ids: list[int]) -> None:
        # Rows inside the prompt are never asked for, and a distribution is large.
        unread = max(self._trajectory.num_prompt_tokens - 1 - len(self._fed), 0)
        num_rows = max(len(token_ids) - unread, 1)
        logits = self._session.forward(token_ids, num_rows=num_rows).logits
        logits = logits[:, : self._drafter.num_shared_tokens]
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the drafter's logits are not finite")
        self._fed.extend(token_ids)
        self._rows.extend([None] * (len(token_ids) - num_rows))
        self._rows.extend(self._read(logits))

    def _read(self, logits: torch.Tensor) -> list[Any]:
        if not self._draws_drafts:
            return list(logits.argmax(-1).tolist())
        probs = processed_probs(logits, self._trajectory.params)
        missing = self._drafter.target_vocab_size - probs.shape[-1]
        return list(torch.nn.functional.pad(probs, (0, missing)))


def check_same_tokens(drafter_tokenizer: Any, target_tokenizer: Any, *, drafter_id: str) -> int:
    """Return how many ids the two tokenizers share, if each stands for the same token.

    Vocabularies may be padded to different sizes; ids beyond the shared range are never drafted.

    Raises:
        VocabularyMismatchError: With the first id that differs and both tokens.
    """
    shared = min(len(drafter_tokenizer), len(target_tokenizer))
    drafter_tokens = drafter_tokenizer.convert_ids_to_tokens(list(range(shared)))
    target_tokens = target_tokenizer.convert_ids_to_tokens(list(range(shared)))
    for token_id, (ours, theirs) in enumerate(zip(drafter_tokens, target_tokens, strict=True)):
        if ours != theirs:
            raise VocabularyMismatchError(
                f"drafter {drafter_id}: token {token_id} is {ours!r}, in the target {theirs!r}: "
                "only a drafter with the target's own tokenizer can be used"
            )
    return shared


def _common_prefix(ours: list[int], theirs: list[int]) -> int:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return index
    return min(len(ours), len(theirs))
