"""The pool of drafters of a worker, and one request's view of it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from inference.drafters.nothing import NothingDrafter
from inference.ports import Draft, Drafter, DraftSession, GroupedDrafter, Predictions, WindowBatch
from inference.shadows import Placed, Shadows
from inference.trajectory import Trajectory
from learner.spawning import family_of
from learner.trial import SHADOW, is_shadow
from schemas.events import DrafterVersion

_LOG = logging.getLogger(__name__)

SESSION_ERRORS = (RuntimeError, ValueError, ArithmeticError, LookupError, MemoryError)
"""What a broken drafter may raise: all of it costs that drafter its request, and nothing else."""


class DrafterPool:
    """An ordered set of drafters; the order indexes every array of an event.

    Args:
        drafters: With distinct ids.

    Attributes:
        failures: Requests lost per drafter id, over the life of the pool.
    """

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        ids = [drafter.version.drafter_id for drafter in drafters]
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(f"drafter ids {ids} are not distinct, or there are none")
        self._own = list(drafters)
        self._shadows = Shadows()
        self.failures: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self.drafters)

    @property
    def versions(self) -> tuple[DrafterVersion, ...]:
        """Ids and versions in force, in order."""
        return tuple(drafter.version for drafter in self.drafters)

    @property
    def drafters(self) -> Sequence[Drafter]:
        """The drafters in force, in order; versions beside them come last."""
        return tuple(self.arranged(None))

    def arranged(self, request_id: str | None) -> list[Drafter]:
        """Return the drafters of a request; only in a canary's are they not those of all."""
        return self._shadows.arranged(self._own, request_id)

    def of_request(self, request_id: str) -> DrafterPool:
        """Return the pool as one request sees it, now and when it renews."""
        return _RequestPool(self, request_id)

    def replace(self, drafter: Drafter) -> None:
        """Put another version of a drafter in its place, or beside it.

        An expert of a drafter of the pool joins it at the end, and leaves it when nothing is put
        in its place; requests at work keep the pool that they have.

        Args:
            drafter: With the id of a drafter of the pool or of an expert of one, or
                ``shadows.Placed`` beside one.

        Raises:
            KeyError: If the pool has no drafter of that id.
        """
        ids = [known.version.drafter_id for known in self._own]
        drafter_id = drafter.version.drafter_id
        if isinstance(drafter, Placed) and drafter_id.removesuffix(SHADOW) in ids:
            self._shadows.put(drafter)
        elif isinstance(drafter, NothingDrafter) and family_of(drafter_id) in ids:
            self._own = [one for one in self._own if one.version.drafter_id != drafter_id]
        elif drafter_id in ids:
            self._own[ids.index(drafter_id)] = drafter
        elif family_of(drafter_id) in ids and not isinstance(drafter, Placed):
            self._own.append(drafter)
        else:
            raise KeyError(f"drafter {drafter_id!r} is not in the pool {ids}")

    def start(
        self, trajectory: Trajectory, *, stream: str, vocab_size: int, draws_drafts: bool
    ) -> PoolSession:
        """Begin a request with the versions in force now."""
        return PoolSession(
            self, trajectory, stream=stream, vocab_size=vocab_size, draws_drafts=draws_drafts
        )


class _RequestPool(DrafterPool):
    """A pool as one request sees it."""

    def __init__(self, pool: DrafterPool, request_id: str) -> None:
        self._pool = pool
        self._request_id = request_id
        self.failures = pool.failures

    def arranged(self, request_id: str | None) -> list[Drafter]:
        """Return the drafters of the request."""
        return self._pool.arranged(self._request_id)


class PoolSession:
    """The drafters at work on one request; one that fails sits out the rest of it.

    Args:
        pool: Lends its drafters and counts failures.
        trajectory: The request.
        stream: The request's stream.
        vocab_size: V of the target; no id beyond it may reach the target.
        draws_drafts: Whether drafts are drawn rather than the most probable.

    Attributes:
        is_awake: bool (N,), drafters that have not failed in this request and are in their own
            place.
    """

    def __init__(
        self,
        pool: DrafterPool,
        trajectory: Trajectory,
        *,
        stream: str,
        vocab_size: int,
        draws_drafts: bool,
    ) -> None:
        self._pool = pool
        self._trajectory = trajectory
        self._stream = stream
        self._vocab_size = vocab_size
        self._draws_drafts = draws_drafts
        self._drafters: list[Drafter] = list(pool.drafters)
        self.is_awake: NDArray[np.bool_] = np.ones(len(self._drafters), dtype=np.bool_)
        self._sessions: list[DraftSession | None] = [None] * len(self._drafters)
        for index in range(len(self._drafters)):
            self._start(index)

    @property
    def versions(self) -> tuple[DrafterVersion, ...]:
        """The versions that this request uses."""
        return tuple(drafter.version for drafter in self._drafters)

    @property
    def num_drafters(self) -> int:
        """Number of drafters N, awake or not."""
        return len(self._drafters)

    def renew(self) -> bool:
        """Take up versions that the pool has changed; return whether there were any.

        Places stay as they are: one beside a drafter that has come or gone since the request
        began is not taken up or given up.
        """
        id_to_drafter = {one.version.drafter_id: one for one in self._pool.drafters}
        newest = [id_to_drafter.get(one.version.drafter_id, one) for one in self._drafters]
        changed = [i for i, drafter in enumerate(newest) if drafter is not self._drafters[i]]
        for index in changed:
            self._drafters[index] = newest[index]
            self._start(index)
        return bool(changed)

    def draft(self, index: int, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Let one drafter propose; an empty draft if it fails."""
        session = self._sessions[index]
        if num_tokens == 0 or session is None:
            return Draft()
        try:
            draft = session.draft(num_tokens, rng)
            _refuse_unusable(draft, num_tokens, self._vocab_size)
        except SESSION_ERRORS as error:
            self._lose([index], error)
            return Draft()
        return draft

    def predict(self, windows: WindowBatch) -> list[Predictions | None]:
        """Return every drafter's predictions, shape (N,); None for one that has failed."""
        predictions: list[Predictions | None] = [None] * len(self._sessions)
        for members in self._groups():
            try:
                for index, found in zip(members, self._predict(members, windows), strict=True):
                    predictions[index] = found
            except SESSION_ERRORS as error:
                self._predict_alone(members, windows, predictions, error)
        return predictions

    def finish(self) -> None:
        """The request is over."""
        for index, session in enumerate(self._sessions):
            if session is not None:
                try:
                    session.finish()
                except SESSION_ERRORS as error:
                    self._lose([index], error)

    def _start(self, index: int) -> None:
        drafter = self._drafters[index]
        try:
            self._sessions[index] = drafter.start(
                self._trajectory, stream=self._stream, draws_drafts=self._draws_drafts
            )
            self.is_awake[index] = not is_shadow(drafter.version.drafter_id)
        except SESSION_ERRORS as error:
            self._lose([index], error)

    def _groups(self) -> list[list[int]]:
        groups: dict[tuple[object, ...], list[int]] = {}
        for index, session in enumerate(self._sessions):
            if session is not None:
                key = getattr(self._drafters[index], "group_key", ("alone", index))
                groups.setdefault(key, []).append(index)
        return list(groups.values())

    def _predict(self, members: list[int], windows: WindowBatch) -> Sequence[Predictions]:
        sessions = [session for i in members if (session := self._sessions[i]) is not None]
        if len(members) == 1:
            found: Sequence[Predictions] = [sessions[0].predict(windows)]
        else:
            leader: GroupedDrafter = self._drafters[members[0]]  # type: ignore[assignment]
            found = leader.predict_group(sessions, windows)
        for predictions in found:
            _refuse_unreadable(predictions, windows, self._vocab_size)
        return found

    def _predict_alone(
        self,
        members: list[int],
        windows: WindowBatch,
        predictions: list[Predictions | None],
        error: Exception,
    ) -> None:
        """Find out which member of a failed group is to blame."""
        if len(members) == 1:
            self._lose(members, error)
            return
        for index in members:
            try:
                predictions[index] = self._predict([index], windows)[0]
            except SESSION_ERRORS as own_error:
                self._lose([index], own_error)

    def _lose(self, members: list[int], error: Exception) -> None:
        for index in members:
            drafter_id = self._drafters[index].version.drafter_id
            self._pool.failures[drafter_id] += 1
            self._sessions[index] = None
            self.is_awake[index] = False
            _LOG.warning("drafter %s sits out this request: %s", drafter_id, error)


def _refuse_unusable(draft: Draft, num_tokens: int, vocab_size: int) -> None:
    count = len(draft.token_ids)
    if count > num_tokens:
        raise ValueError(f"{count} drafts, asked for {num_tokens}")
    for token_id in draft.token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"draft {token_id} outside the target's 0..{vocab_size - 1}")
    if draft.probs is not None:
        _refuse_shape(draft.probs.shape, (count, vocab_size))
        _refuse_non_finite(draft.probs)


def _refuse_unreadable(predictions: Predictions, windows: WindowBatch, vocab_size: int) -> None:
    shape = (len(windows.starts), windows.num_speculative_tokens)
    if predictions.proposals is not None:
        _refuse_shape(predictions.proposals.shape, shape)
        beyond = predictions.proposals[predictions.proposals >= vocab_size]
        if beyond.size:
            raise ValueError(f"proposal {beyond[0]} outside the target's 0..{vocab_size - 1}")
    if predictions.probs is not None:
        _refuse_shape(predictions.probs.shape, (*shape, vocab_size))
        _refuse_non_finite(predictions.probs)


def _refuse_shape(found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if tuple(found) != expected:
        raise ValueError(f"shape {tuple(found)}, expected {expected}")


def _refuse_non_finite(probs: torch.Tensor) -> None:
    # NaN and infinity survive a sum, and no mask of this size is written.
    if not torch.isfinite(probs.sum()):
        raise FloatingPointError("draft probabilities are not finite")
