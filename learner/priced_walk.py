"""Decoding again on paper over arms: price and scoring schedule are learned on the way.

As ``learner.walk``, with (drafter, K) to choose, seconds to pay and scoring to pay for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner import arm_kernels
from learner.arm_learner import ArmLearner, by_drafter
from learner.arms import ArmCosts
from learner.scoring_schedule import ScheduleSettings
from learner.selection import kernels
from learner.selection.compiled import LEARN, pointer
from learner.selection.registry import PolicySpec
from learner.walk import Coins, WindowTrace, accepted_tokens, ready_at

_DEFAULT_SETTINGS = ScheduleSettings()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PricedTrace:
    """A request as walks over arms read it; what several walks share is computed once.

    Attributes:
        probability, realised: Acceptance of every window, (W, N, K).
        num_levels, starts, ready_at: (W,), as in the trace and ``learner.walk.ready_at``.
        accepted: Levels that would have been accepted in a row, (P, N); ``kernels.ASLEEP``
            where there is no window of the drafter.
        is_idle: As in the trace, (P,).
        coins: Of the selection, (P,).
        score_coins: Of the schedule, (P,).
    """

    probability: NDArray[np.float64]
    realised: NDArray[np.float64]
    num_levels: NDArray[np.int64]
    starts: NDArray[np.int64]
    ready_at: NDArray[np.int64]
    accepted: NDArray[np.int16]
    is_idle: NDArray[np.bool_]
    coins: NDArray[np.float64]
    score_coins: NDArray[np.float64]


def prepare_priced(
    trace: WindowTrace, coins: Coins, score_coins: NDArray[np.float64]
) -> PricedTrace:
    """Lay out a request for any number of walks over arms; ``score_coins`` (P,) in [0, 1)."""
    shape = (trace.num_positions, trace.realised_acceptance.shape[2])
    accepted = np.full(shape, kernels.ASLEEP, dtype=np.int16)
    accepted[trace.starts] = accepted_tokens(trace, coins.acceptance)
    return PricedTrace(
        probability=by_drafter(trace.acceptance_probability),
        realised=by_drafter(trace.realised_acceptance),
        num_levels=trace.num_levels.astype(np.int64),
        starts=trace.starts,
        ready_at=ready_at(trace, "length"),
        accepted=accepted,
        is_idle=trace.is_idle,
        coins=coins.selection,
        score_coins=score_coins,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WalkedArms:
    """The rounds of one walk over arms, in order, each of shape (R,).

    Attributes:
        position: Where it began.
        arm: What was played; -1 where nobody could draft.
        length: Tokens it emitted, >= 1.
        num_scored: Windows that start in it and are scored.
        probability: Of the choice, in (0, 1].
        score_probability: Of its windows to be scored, in (0, 1].
        seconds: Of drafting and verification.
        score_seconds: Of scoring its windows.
    """

    position: NDArray[np.int64]
    arm: NDArray[np.int64]
    length: NDArray[np.int64]
    num_scored: NDArray[np.int64]
    probability: NDArray[np.float64]
    score_probability: NDArray[np.float64]
    seconds: NDArray[np.float64]
    score_seconds: NDArray[np.float64]

    @property
    def total_seconds(self) -> float:
        """Seconds of all rounds, scoring included."""
        return float(self.seconds.sum() + self.score_seconds.sum())


class PricedWalker:
    """Walks requests of one stream, one after the other, over arms.

    Args:
        spec: The policy; it goes on where the request before ended.
        costs: Seconds of the arms.
        prior: Over the drafters, (N,); None = uniform.
        settings: How sparingly to score.
        block: Complete windows that are learned at once, >= 1.
    """

    def __init__(
        self,
        spec: PolicySpec,
        costs: ArmCosts,
        *,
        prior: ArrayLike | None = None,
        settings: ScheduleSettings = _DEFAULT_SETTINGS,
        block: int = 1,
    ) -> None:
        self.learner = ArmLearner(spec, costs, prior=prior, settings=settings)
        self._block = block

    def walk(self, trace: PricedTrace) -> WalkedArms:
        """Walk one request."""
        learner = self.learner
        learner.start_request()
        policy = learner.policy
        num_positions = len(trace.accepted)
        rounds = np.empty((num_positions, arm_kernels.NUM_ROUND_FIELDS), dtype=np.int64)
        probabilities = np.ones((num_positions, 2))
        count = arm_kernels.walk()(
            arm_kernels.learn_windows(),
            pointer(policy.kernel, LEARN),
            policy.table,
            policy.numbers,
            trace.probability,
            trace.realised,
            trace.num_levels,
            trace.starts,
            trace.ready_at,
            self._block,
            trace.accepted,
            trace.is_idle,
            learner.seconds,
            learner.costs.scoring_seconds,
            learner.scale,
            learner.price,
            learner.schedule,
            learner.tallies,
            learner.begins,
            learner.cursor,
            trace.coins,
            trace.score_coins,
            learner.mode,
            learner.last,
            rounds,
            probabilities,
        )
        return self._walked(rounds[:count], probabilities[:count])

    def _walked(self, rounds: NDArray[np.int64], probabilities: NDArray[np.float64]) -> WalkedArms:
        position, arm, length, num_scored = np.ascontiguousarray(rounds.T)
        return WalkedArms(
            position=position,
            arm=arm,
            length=length,
            num_scored=num_scored,
            probability=probabilities[:, 0],
            score_probability=probabilities[:, 1],
            # Where nobody could draft the target alone decodes a token.
            seconds=self.learner.seconds[np.maximum(arm, 0)],
            score_seconds=num_scored * self.learner.costs.scoring_seconds,
        )
