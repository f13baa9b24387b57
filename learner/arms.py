"""Arms: who drafts and how much. Every pair (drafter, K) for K = 1..K_max, and no speculation.

One scored window tells the length of every arm: the levels of drafter i as far as K. So the arms
are learned from the feedback that the drafters give anyway, and their number costs ln(N K_max + 1)
instead of ln N.

Axes: A arms, N drafters, K levels, W windows, P positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.selection import kernels
from learner.selection.policy import checked_prior
from learner.walk import (
    Coins,
    PreparedTrace,
    WindowTrace,
    accepted_tokens,
    agreement_losses,
    ready_at,
)
from schemas.events import NO_DRAFTER, CostModel

NO_SPECULATION = 0
"""The arm that drafts nothing: one token per target pass."""


@dataclass(frozen=True, slots=True)
class Arms:
    """The arms of a pool: arm 0 is no speculation, then drafter by drafter, K = 1..K_max each.

    Attributes:
        num_drafters: N >= 1.
        max_speculative_tokens: K_max >= 1.
    """

    num_drafters: int
    max_speculative_tokens: int

    def __post_init__(self) -> None:
        if self.num_drafters < 1 or self.max_speculative_tokens < 1:
            raise ValueError(
                f"arms of {self.num_drafters} drafters with up to {self.max_speculative_tokens} "
                "tokens, expected at least 1 of each"
            )

    def __len__(self) -> int:
        return 1 + self.num_drafters * self.max_speculative_tokens

    @property
    def drafter(self) -> NDArray[np.int64]:
        """Drafter of every arm, (A,); ``NO_DRAFTER`` for no speculation."""
        drafters = np.repeat(np.arange(self.num_drafters), self.max_speculative_tokens)
        return np.concatenate([[NO_DRAFTER], drafters])

    @property
    def num_speculative_tokens(self) -> NDArray[np.int64]:
        """K of every arm, (A,); 0 for no speculation."""
        levels = np.tile(np.arange(1, self.max_speculative_tokens + 1), self.num_drafters)
        return np.concatenate([[0], levels])

    def index(self, drafter: int, num_speculative_tokens: int) -> int:
        """Return the arm of a drafter (``NO_DRAFTER`` for none) and K.

        Raises:
            ValueError: If there is no such arm.
        """
        if drafter == NO_DRAFTER and num_speculative_tokens == 0:
            return NO_SPECULATION
        if not (
            0 <= drafter < self.num_drafters
            and 1 <= num_speculative_tokens <= self.max_speculative_tokens
        ):
            raise ValueError(
                f"no arm of drafter {drafter} with K={num_speculative_tokens}: drafters are "
                f"0..{self.num_drafters - 1}, K is 1..{self.max_speculative_tokens}"
            )
        return 1 + drafter * self.max_speculative_tokens + num_speculative_tokens - 1

    def names(self, drafter_ids: Sequence[str]) -> tuple[str, ...]:
        """Return a name for every arm, as in ``head@3``; ``none`` for no speculation."""
        pairs = zip(self.drafter[1:], self.num_speculative_tokens[1:], strict=True)
        return ("none", *(f"{drafter_ids[i]}@{k}" for i, k in pairs))

    def prior(self, drafter_prior: ArrayLike | None = None) -> NDArray[np.float64]:
        """Spread a prior over drafters, (N,), None = uniform, over their arms, (A,), sum 1.

        No speculation counts as one more drafter. A drafter's share is split over its K in
        proportion to 1 / K: lengths differ less and less as K grows.
        """
        drafters = checked_prior(drafter_prior, self.num_drafters)
        split = 1.0 / np.arange(1, self.max_speculative_tokens + 1)
        none = 1.0 / (self.num_drafters + 1)
        arms = (1.0 - none) * drafters[:, None] * (split / split.sum())
        return np.concatenate([[none], arms.ravel()])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArmCosts:
    """Seconds that arms are charged; every number is known, finite and not negative.

    Attributes:
        draft_seconds: Per drafted token, (N,).
        verify_seconds: Of a verification with K = 0..K_max drafted tokens at the present batch
            size, (K_max + 1,), each > 0.
        score_seconds: Per scored window, (N,).
    """

    draft_seconds: NDArray[np.float64]
    verify_seconds: NDArray[np.float64]
    score_seconds: NDArray[np.float64]

    def __post_init__(self) -> None:
        sizes = self.draft_seconds.shape, self.score_seconds.shape
        if sizes[0] != sizes[1] or self.draft_seconds.ndim != 1:
            raise ValueError(f"draft and score seconds have shapes {sizes}, expected the same (N,)")
        for name in ("draft_seconds", "verify_seconds", "score_seconds"):
            values = getattr(self, name)
            good = np.isfinite(values) & (values > 0.0 if name[0] == "v" else values >= 0.0)
            if not good.all():
                index = int(np.argmin(good))
                raise ValueError(f"{name}[{index}]={values[index]}, expected a known number >= 0")

    @classmethod
    def from_model(cls, model: CostModel, max_speculative_tokens: int) -> ArmCosts | None:
        """Fill the gaps of a measured cost model; None while no verification was ever measured.

        Verify seconds lie on a line between measured numbers of rows; outside them they go on
        with the slope of a line fitted to all that was measured, never falling (memory-bound
        passes cost the same, none costs less with more rows). A drafter whose drafting was never
        measured borrows the largest of the others: one that is played is measured at once, one
        that is not stays as it was, so a guess must not flatter. If none was, a draft token costs
        a target pass. Scoring that was never measured costs what scoring costs the others on
        average, 0 if nobody's was.
        """
        verify = _filled_by_rows(model.verify_seconds, max_speculative_tokens)
        if verify is None:
            return None
        draft, score = model.draft_seconds, model.score_seconds
        worst = np.nanmax(draft) if np.isfinite(draft).any() else verify[0]
        usual = np.nanmean(score) if np.isfinite(score).any() else 0.0
        return cls(
            draft_seconds=np.where(np.isnan(draft), worst, draft),
            verify_seconds=verify,
            score_seconds=np.where(np.isnan(score), usual, score),
        )

    @classmethod
    def unmeasured(cls, num_drafters: int, max_speculative_tokens: int) -> ArmCosts:
        """Return costs to begin with: rows are free, a draft token is a twentieth of a pass.

        The target's pass counts as a second; ``ArmLearner.use_costs`` revalues what was paid.
        """
        return cls(
            draft_seconds=np.full(num_drafters, 0.05),
            verify_seconds=np.ones(max_speculative_tokens + 1),
            score_seconds=np.full(num_drafters, 0.005),
        )

    @property
    def arms(self) -> Arms:
        """The arms that these costs are about."""
        return Arms(len(self.draft_seconds), len(self.verify_seconds) - 1)

    def seconds(self) -> NDArray[np.float64]:
        """Return the seconds of a round of every arm, (A,), each > 0, without scoring.

        Scoring costs the same per emitted token whatever the arm, so it changes no choice: with
        S seconds per token, θ' (C + S y) - y is a multiple of θ C - y, θ = θ' / (1 - θ' S).
        """
        levels = np.arange(1, len(self.verify_seconds))
        drafted = self.draft_seconds[:, None] * levels + self.verify_seconds[1:]
        return np.concatenate([self.verify_seconds[:1], drafted.ravel()])

    @property
    def scoring_seconds(self) -> float:
        """Seconds to score one window of every drafter."""
        return float(self.score_seconds.sum())


def _filled_by_rows(
    measured: NDArray[np.float64], max_speculative_tokens: int
) -> NDArray[np.float64] | None:
    known = np.flatnonzero(np.isfinite(measured) & (measured > 0.0))
    if not known.size:
        return None
    rows = np.arange(max_speculative_tokens + 1)
    filled = np.interp(rows, known, measured[known])
    slope = max(float(np.polyfit(known, measured[known], 1)[0]), 0.0) if known.size > 1 else 0.0
    filled += slope * np.maximum(rows - known[-1], 0)
    # Backwards no further than to a tenth: a fitted line may cross 0.
    below = slope * np.maximum(known[0] - rows, 0)
    return np.asarray(np.maximum(filled - below, 0.1 * filled))


@dataclass(frozen=True, slots=True)
class LossRange:
    """The fixed affine map of θ C - y to [0, 1]; what lies outside is cut off.

    Attributes:
        low, high: Tokens that become 0 and 1.
    """

    low: float
    high: float

    @classmethod
    def of(cls, costs: ArmCosts) -> LossRange:
        """Return the range of a cost model: half of the largest speed-up it allows, either way.

        A free drafter that is always right emits K_max + 1 tokens in the seconds of the longest
        verification: (K_max + 1) C(0) / C(K_max) times the speed of no speculation. Where
        verification is nearly free that is K_max + 1; where every row costs a pass there is
        little to win, and the losses between which to choose are small.
        """
        verify = costs.verify_seconds
        half = 0.5 * len(verify) * float(verify[0] / verify[-1])
        return cls(-half, half)

    @property
    def scale(self) -> NDArray[np.float64]:
        """Low and high as kernels take them, (2,)."""
        return np.array([self.low, self.high])

    def scaled(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return losses in [0, 1]; NaN stays NaN."""
        return np.asarray(np.clip((tokens - self.low) / (self.high - self.low), 0.0, 1.0))


def arm_lengths(trace: WindowTrace) -> NDArray[np.float64]:
    """Return every arm's expected length of every window, (W, A), in [1, K_max + 1].

    1 + Σ_{k<=K} (Π_{j<k} a_j) γ_k, as ``measures.expected_acceptance_length``; NaN where the
    drafter was not scored. No speculation has length 1.
    """
    levels = np.arange(trace.num_speculative_tokens)
    exists = (levels < trace.num_levels[:, None])[:, :, None]
    probability = np.where(exists, trace.acceptance_probability, 0.0).astype(np.float64)
    realised = np.where(exists, trace.realised_acceptance, 0.0).astype(np.float64)
    reach = np.ones_like(probability)
    np.cumprod(realised[:, :-1], axis=1, out=reach[:, 1:])
    lengths = 1.0 + np.cumsum(reach * probability, axis=1)
    return _by_arm(lengths, none=1.0)


def _by_arm(values: NDArray[Any], *, none: float) -> NDArray[np.float64]:
    """Lay out values (W, K, N) by arm, (W, A)."""
    size = len(values)
    arms = values.transpose(0, 2, 1).reshape(size, -1)
    return np.concatenate([np.full((size, 1), none), arms], axis=1)


def prepare_arms(trace: WindowTrace, coins: Coins, costs: ArmCosts, price: float) -> PreparedTrace:
    """Lay out a request for walks over arms at one price, with ``learner.walk.Walker``.

    What a policy learns of a window is θ C - y, scaled, every window alike. ``PricedWalker`` learns
    the price as it goes and counts windows by the rounds that begin there; here any policy runs
    over arms, bandits too.

    Args:
        trace: The request.
        coins: As for ``learner.walk.prepare``.
        costs: Seconds of the N drafters for the K of the trace.
        price: θ, tokens per second.
    """
    arms = costs.arms
    accepted = accepted_tokens(trace, coins.acceptance)
    by_arm = np.minimum(
        accepted[:, np.maximum(arms.drafter, 0)], arms.num_speculative_tokens
    ).astype(np.int16)
    agreement = agreement_losses(trace, accepted)[:, np.maximum(arms.drafter, 0)]
    agreement[:, NO_SPECULATION] = 0.0
    shape = (trace.num_positions, len(arms))
    prepared = PreparedTrace(
        accepted=np.full(shape, kernels.ASLEEP, dtype=np.int16),
        agreement_loss=np.ones(shape),
        num_speculative_tokens=trace.num_speculative_tokens,
        is_idle=trace.is_idle,
        coins=coins.selection,
    )
    prepared.accepted[trace.starts] = by_arm
    prepared.agreement_loss[trace.starts] = agreement
    losses = LossRange.of(costs).scaled(price * costs.seconds() - arm_lengths(trace))
    for loss in ("length", "first", "hybrid"):
        prepared.loss_to_losses[loss] = losses
        prepared.loss_to_ready_at[loss] = ready_at(trace, "length")
    return prepared
