"""Sessions of drafters that read tokens only and propose one token at a time without parameters.

Such a drafter is a model that is told every token and asked for the next. Drafting tells it the
proposed tokens and takes them back, so what it would propose at a position depends on the tokens
before it and on nothing else: one proposal per position serves every window that covers it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from inference.ports import NO_PROPOSAL, Draft, Predictions, WindowBatch
from inference.trajectory import Trajectory


class TokenModel(Protocol):
    """Predicts the next token from the tokens it was told."""

    def propose(self) -> int:
        """Return the next token, or ``NO_PROPOSAL``."""

    def tell(self, token_id: int) -> None:
        """Learn that ``token_id`` came next."""

    def take_back(self) -> None:
        """Undo the last ``tell`` exactly."""


class TokenModelSession:
    """One request of a token model.

    Args:
        model: Knows nothing of the request yet.
        trajectory: The request.
        on_finish: Called with all tokens of the request when it is over.
    """

    def __init__(
        self,
        model: TokenModel,
        trajectory: Trajectory,
        *,
        on_finish: Callable[[list[int]], None] | None = None,
    ) -> None:
        self._model = model
        self._trajectory = trajectory
        self._on_finish = on_finish
        self._num_told = 0
        self._proposals: list[int] = []

    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Propose until the model has no proposal."""
        self._catch_up()
        token_ids: list[int] = []
        while len(token_ids) < num_tokens and (proposal := self._model.propose()) != NO_PROPOSAL:
            token_ids.append(proposal)
            self._model.tell(proposal)
        for _ in token_ids:
            self._model.take_back()
        return Draft(token_ids=tuple(token_ids))

    def predict(self, windows: WindowBatch) -> Predictions:
        """Look up what was proposed at each position before it was verified."""
        self._catch_up()
        levels = np.arange(windows.num_speculative_tokens)
        index = windows.starts[:, None] + levels - self._trajectory.num_prompt_tokens
        known = np.asarray(self._proposals, dtype=np.int64)
        proposals = known[np.minimum(index, len(known) - 1)]
        # A chain ends where nothing is proposed: what it would say later is never asked.
        ended = np.cumsum(proposals == NO_PROPOSAL, axis=1) > 0
        return Predictions(proposals=np.where(ended, NO_PROPOSAL, proposals))

    def finish(self) -> None:
        """Hand the tokens on, if anybody wants them."""
        if self._on_finish is not None:
            self._on_finish(list(self._trajectory.token_ids))

    def _catch_up(self) -> None:
        tokens, first_output = self._trajectory.token_ids, self._trajectory.num_prompt_tokens
        for position in range(self._num_told, len(tokens)):
            if position >= first_output:
                self._proposals.append(self._model.propose())
            self._model.tell(tokens[position])
        self._num_told = len(tokens)
