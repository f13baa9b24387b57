"""Decoding again on paper: what a policy would have done with text that is already verified.

The windows say what every drafter would have proposed from every verified position, and the
verified text does not depend on who drafted it. So a request can be decoded again: start at its
first position, choose a drafter, jump by its acceptance length there, learn what that jump
verified, choose again. Where acceptance follows from the text (greedy target, one-hot drafts)
this is exact. With speculative sampling a level is accepted if a coin of its position falls below
the realised acceptance; every drafter and every policy sees the same coins.

Axes: P positions, W windows, K levels, N drafters, R rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner import window_kernels
from learner.carried import over_pool
from learner.measures import policy_losses
from learner.selection import kernels
from learner.selection.base import Choice, CompiledPolicy, Loss
from learner.selection.fixed import Fixed
from learner.selection.registry import PolicySpec

CHOICE_TO_MODE: dict[Choice, int] = {
    "sample": kernels.SAMPLE,
    "argmax": kernels.ARGMAX,
    "sticky": kernels.STICKY,
}

NEVER = np.iinfo(np.int64).max
"""``ready_at`` of a window that only the request's end completes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowTrace:
    """One request as its windows.

    Attributes:
        num_positions: P.
        starts: Position of each window's level 1, int64 (W,), in 0..P-1, increasing.
        num_levels: Levels that exist, (W,), 1..K.
        is_whole: Whether a window has all its K levels, (W,); the others were cut by the end.
        acceptance_probability: (W, K, N), in [0, 1]; NaN = not scored or no such level.
        realised_acceptance: (W, K, N), in [0, 1]; NaN likewise.
        is_idle: Where a round of one token is due if nobody can draft, (P,).
        is_censored: The request did not end but was cut off (aborted, failed): how far a draft
            would have reached in its shortened windows is unknown, so they teach nothing.
    """

    num_positions: int
    starts: NDArray[np.int64]
    num_levels: NDArray[np.int16]
    is_whole: NDArray[np.bool_]
    acceptance_probability: NDArray[np.floating[Any]]
    realised_acceptance: NDArray[np.floating[Any]]
    is_idle: NDArray[np.bool_]
    is_censored: bool = False

    @property
    def num_speculative_tokens(self) -> int:
        """Levels K."""
        return int(self.realised_acceptance.shape[1])


@dataclass(frozen=True, slots=True)
class Coins:
    """Uniform numbers of a request, the same for every drafter and policy.

    Attributes:
        acceptance: One per position and beyond by K, (P + K,).
        selection: One per round, (P,).
    """

    acceptance: NDArray[np.float64]
    selection: NDArray[np.float64]

    @classmethod
    def toss(
        cls, generator: np.random.Generator, num_positions: int, num_speculative_tokens: int
    ) -> Coins:
        """Toss the coins of one request."""
        return cls(
            generator.random(num_positions + num_speculative_tokens),
            generator.random(num_positions),
        )


@dataclass(slots=True, eq=False)
class PreparedTrace:
    """A request as the kernels read it; what several policies share is computed once.

    Attributes:
        accepted: Tokens that each drafter would have had accepted, int16 (P, N);
            ``kernels.ASLEEP`` where it has no window.
        agreement_loss: 1 - mean acceptance probability over the block as far as it was verified,
            (P, N), in [0, 1].
        num_speculative_tokens: K, the scale of length losses.
        is_idle: (P,), as in the trace.
        coins: Of the selection, (P,).
        loss_to_losses: Losses of the windows by kind, (W, N).
        loss_to_ready_at: Position from which on each may be learned, (W,).
    """

    accepted: NDArray[np.int16]
    agreement_loss: NDArray[np.float64]
    num_speculative_tokens: int
    is_idle: NDArray[np.bool_]
    coins: NDArray[np.float64]
    loss_to_losses: dict[Loss, NDArray[np.float64]] = field(default_factory=dict)
    loss_to_ready_at: dict[Loss, NDArray[np.int64]] = field(default_factory=dict)

    def of_drafters(self, places: Sequence[int]) -> PreparedTrace:
        """Return the request over other drafters: where each stands here, -1 = asleep all along."""
        place = np.asarray(places, dtype=np.int64)
        if np.array_equal(place, np.arange(self.accepted.shape[1])):
            return self
        is_absent = place < 0
        accepted, agreement = self.accepted[:, place], self.agreement_loss[:, place]
        accepted[:, is_absent] = kernels.ASLEEP
        agreement[:, is_absent] = 1.0
        losses = {loss: values[:, place] for loss, values in self.loss_to_losses.items()}
        for values in losses.values():
            values[:, is_absent] = np.nan
        return PreparedTrace(
            accepted=np.ascontiguousarray(accepted),
            agreement_loss=np.ascontiguousarray(agreement),
            num_speculative_tokens=self.num_speculative_tokens,
            is_idle=self.is_idle,
            coins=self.coins,
            loss_to_losses={k: np.ascontiguousarray(v) for k, v in losses.items()},
            loss_to_ready_at=self.loss_to_ready_at,
        )


def prepare(
    trace: WindowTrace, coins: Coins, *, num_speculative_tokens: int | None = None
) -> PreparedTrace:
    """Lay out a request for any number of walks.

    What it computes is defined, window by window, by ``accepted_tokens``, ``agreement_losses`` and
    ``window_losses``; here one compiled pass does all of it.

    Args:
        trace: The request.
        coins: Its coins.
        num_speculative_tokens: Levels to walk with, 1..K; None = K. What is above was logged but
            would not have been drafted.

    Raises:
        ValueError: If there are no such levels.
    """
    num_levels = trace.num_speculative_tokens
    depth = num_levels if num_speculative_tokens is None else num_speculative_tokens
    if not 0 <= depth <= num_levels or (depth == 0 and trace.starts.size):
        raise ValueError(f"num_speculative_tokens={depth} outside 1..{num_levels}")
    shape = (trace.num_positions, trace.realised_acceptance.shape[2])
    accepted = np.full(shape, kernels.ASLEEP, dtype=np.int16)
    agreement = np.ones(shape)
    length, first = np.empty((2, trace.starts.size, shape[1]))
    window_kernels.measure_windows(
        window_kernels.halves(trace.acceptance_probability),
        window_kernels.halves(trace.realised_acceptance),
        np.ascontiguousarray(trace.num_levels, dtype=np.int16),
        trace.starts,
        coins.acceptance,
        depth,
        accepted,
        agreement,
        length,
        first,
    )
    complete = _complete_at(trace, depth)
    if trace.is_censored:
        learned = int(np.count_nonzero(complete < NEVER))
        complete, length, first = complete[:learned], length[:learned], first[:learned]
    return PreparedTrace(
        accepted=accepted,
        agreement_loss=agreement,
        num_speculative_tokens=depth,
        is_idle=trace.is_idle,
        coins=coins.selection,
        loss_to_losses={"length": length, "first": first, "hybrid": 0.5 * (length + first)},
        loss_to_ready_at={
            "length": complete,
            "first": trace.starts[: len(complete)] + 1,
            "hybrid": complete,
        },
    )


def accepted_tokens(trace: WindowTrace, acceptance_coins: NDArray[np.float64]) -> NDArray[np.int16]:
    """Return how many levels in a row each window would have accepted of each drafter, (W, N).

    ``kernels.ASLEEP`` for a drafter that was not scored on all levels that exist, whether the
    missing ones were needed or not: otherwise only windows with a rejection would count.
    """
    level = np.arange(trace.num_speculative_tokens)
    coin = acceptance_coins[trace.starts[:, None] + level]
    # NaN compares as False: neither a missing level nor an unscored drafter is accepted.
    is_accepted = coin[:, :, None] < trace.realised_acceptance
    accepted = np.cumprod(is_accepted, axis=1, dtype=np.int16).sum(axis=1, dtype=np.int16)
    exists = level[None, :, None] < trace.num_levels[:, None, None]
    is_unknown = (exists & np.isnan(trace.realised_acceptance)).any(axis=1)
    accepted[is_unknown] = kernels.ASLEEP
    return np.asarray(accepted)


def agreement_losses(trace: WindowTrace, accepted: NDArray[np.int16]) -> NDArray[np.float64]:
    """Return 1 - mean acceptance probability of the levels that verification reached, (W, N).

    MetaSD calls the mean the block divergence's complement. Levels behind a rejection lie off the
    verified text and are left out.
    """
    level = np.arange(trace.num_speculative_tokens)[None, :, None]
    is_reached = (level <= accepted[:, None, :]) & ~np.isnan(trace.acceptance_probability)
    total = np.where(is_reached, trace.acceptance_probability, 0.0).sum(axis=1, dtype=np.float64)
    return np.asarray(1.0 - np.minimum(total / np.maximum(is_reached.sum(axis=1), 1), 1.0))


def window_losses(trace: WindowTrace, loss: Loss) -> NDArray[np.float64]:
    """Return every window's losses, (W, N), in [0, 1]; NaN = asleep."""
    return policy_losses(
        trace.acceptance_probability,
        trace.realised_acceptance,
        trace.num_levels,
        loss=loss,
        num_speculative_tokens=trace.num_speculative_tokens,
    )


def ready_at(trace: WindowTrace, loss: Loss) -> NDArray[np.int64]:
    """Return the next position to be written from which on each window may be learned, (W,).

    Level 1 is known once its position is verified. A whole window is complete when the position
    after its last level is verified too: only then is it known that the request does not end
    inside it. A cut window lies at the end of its request, so no choice comes after it.
    """
    if loss == "first":
        return trace.starts + 1
    return _complete_at(trace, trace.num_speculative_tokens)


def _complete_at(trace: WindowTrace, depth: int) -> NDArray[np.int64]:
    """Return ``ready_at`` of windows of which ``depth`` levels are read, (W,)."""
    is_whole = trace.is_whole | (trace.num_levels >= depth)
    levels = np.minimum(trace.num_levels, depth)
    complete = np.where(is_whole, trace.starts + levels + 1, NEVER)
    # A window that overtakes an earlier start waits for it: learners see starts in order.
    return np.maximum.accumulate(complete.astype(np.int64))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WalkedRounds:
    """The rounds of one walk, in order, each of shape (R,).

    Attributes:
        position: Where it began.
        drafter: Who drafted; -1 for a round of one token without drafter.
        length: Tokens it emitted, >= 1.
        probability: Of the choice, in (0, 1].
    """

    position: NDArray[np.int64]
    drafter: NDArray[np.int64]
    length: NDArray[np.int64]
    probability: NDArray[np.float64]

    @property
    def num_tokens(self) -> int:
        """Tokens emitted."""
        return int(self.length.sum())


class Walker:
    """Walks requests of one stream, one after the other, with one policy.

    A policy of scope ``request`` starts each from its prior; any other goes on where the request
    before ended.

    Args:
        spec: The policy.
        num_drafters: N of every trace.
        drafter_ids: Their ids; None = indices.
        block: Windows learned at once, >= 1; 1 = as soon as possible.
        num_speculative_tokens: K, for policies whose formulas have it; 0 = unknown.
    """

    def __init__(
        self,
        spec: PolicySpec,
        num_drafters: int,
        *,
        drafter_ids: tuple[str, ...] | None = None,
        block: int = 1,
        num_speculative_tokens: int = 0,
    ) -> None:
        self._spec = spec
        self._num_speculative_tokens = num_speculative_tokens
        self._ids = drafter_ids
        self._num_drafters = num_drafters
        self._block = block
        self._start(None)

    @property
    def policy(self) -> CompiledPolicy:
        """The policy as it is now."""
        return self._policy

    def start_from(self, policy: CompiledPolicy) -> None:
        """Let the next request begin with this policy, over the present pool; it is changed."""
        self._policy = policy

    def _start(self, prior: ArrayLike | None) -> None:
        self._policy = self._spec.build(
            self._num_drafters,
            prior=prior,
            drafter_ids=self._ids,
            num_speculative_tokens=self._num_speculative_tokens,
        )
        self._last = np.full(1 + self._num_drafters, -1.0)

    def change_pool(self, drafter_ids: tuple[str, ...]) -> None:
        """Go on over another pool: those that stay keep what was learned, newcomers get a share.

        Raises:
            ValueError: If the ids of the present pool are unknown.
        """
        if self._ids is None:
            raise ValueError("a walker without drafter ids cannot change its pool")
        if drafter_ids == self._ids:
            return
        old, last = self._ids, self._last
        self._ids, self._num_drafters = drafter_ids, len(drafter_ids)
        if self._spec.name != Fixed.name:
            self._policy = over_pool(self._policy, old, drafter_ids)
        else:
            self._policy = self._spec.build(self._num_drafters, drafter_ids=drafter_ids)
        places = [old.index(one) if one in old else -1 for one in drafter_ids]
        chances = np.append(last[1:], 0.0)[places]
        previous = places.index(int(last[0])) if last[0] in places and last[0] >= 0 else -1
        self._last = np.concatenate([[previous], chances])

    def walk(
        self, trace: PreparedTrace, *, prior: ArrayLike | None = None, block: int | None = None
    ) -> WalkedRounds:
        """Walk one request.

        Args:
            trace: The request.
            prior: Read where the policy starts afresh; None = uniform.
            block: As for the walker, for this request alone; None = the walker's.
        """
        if self._spec.scope == "request":
            self._start(prior)
        policy = self._policy
        rounds, probabilities = kernels.walk(
            policy.kernel,
            policy.round_kernel,
            policy.table,
            policy.numbers,
            losses=trace.loss_to_losses[self._spec.loss],
            ready_at=trace.loss_to_ready_at[self._spec.loss],
            block=self._block if block is None else block,
            accepted=trace.accepted,
            agreement_loss=trace.agreement_loss,
            num_levels=trace.num_speculative_tokens,
            is_idle=trace.is_idle,
            coins=trace.coins,
            mode=CHOICE_TO_MODE[self._spec.choice],
            last=self._last,
        )
        position, drafter, length = np.ascontiguousarray(rounds.T)
        return WalkedRounds(
            position=position, drafter=drafter, length=length, probability=probabilities
        )
