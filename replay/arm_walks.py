"""Walks of policies that choose (drafter, K) by time, at the cost measured in the log."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from learner.arms import ArmCosts
from learner.priced_walk import PricedWalker, prepare_priced
from learner.selection import PolicySpec
from learner.walk import Coins, WindowTrace
from replay.cost import MeasuredCost
from replay.errors import ReplayError
from replay.requests import RequestTrace
from schemas.events import CostModel


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArmPool:
    """What can be chosen over a whole log, and what it costs.

    Attributes:
        drafter_ids: Drafters, N of them, the same in every request; absent ones sleep.
        num_speculative_tokens: Largest K.
        costs: Seconds of the arms.
    """

    drafter_ids: tuple[str, ...]
    num_speculative_tokens: int
    costs: ArmCosts

    @classmethod
    def of_log(
        cls,
        cost: MeasuredCost,
        drafter_to_number: dict[str, int],
        drafter_ids: tuple[str, ...],
        num_speculative_tokens: int,
    ) -> ArmPool:
        """Take the costs of some drafters out of those of the log.

        Raises:
            ReplayError: If there is no drafter, or no verification was ever timed.
        """
        if not drafter_ids or num_speculative_tokens < 1:
            raise ReplayError("no drafter to choose (drafter, K) from; re-run for tokens instead")
        numbers = [drafter_to_number[one] for one in drafter_ids]
        score = cost.score_seconds / max(len(drafter_to_number), 1)
        model = CostModel(
            draft_seconds=cost.draft_seconds[numbers],
            score_seconds=np.full(len(numbers), score),
            verify_seconds=cost.verify_seconds[: num_speculative_tokens + 1],
        )
        costs = ArmCosts.from_model(model, num_speculative_tokens)
        if costs is None:
            raise ReplayError(
                "the log times no verification, so (drafter, K) cannot be chosen by time; "
                "re-run for tokens instead"
            )
        return cls(
            drafter_ids=drafter_ids, num_speculative_tokens=num_speculative_tokens, costs=costs
        )

    def trace(self, trace: WindowTrace, request: RequestTrace) -> WindowTrace:
        """Return a request's windows over this pool and its levels."""
        places = [
            (place, request.drafter_ids.index(one))
            for place, one in enumerate(self.drafter_ids)
            if one in request.drafter_ids
        ]
        new, old = (list(column) for column in zip(*places, strict=True))
        depth = min(trace.num_speculative_tokens, self.num_speculative_tokens)
        shape = (trace.starts.size, self.num_speculative_tokens, len(self.drafter_ids))
        scores = np.full((2, *shape), np.nan, dtype=np.float16)
        scores[0][:, :depth, new] = trace.acceptance_probability[:, :depth, old]
        scores[1][:, :depth, new] = trace.realised_acceptance[:, :depth, old]
        num_levels = np.minimum(trace.num_levels, depth)
        return replace(
            trace,
            num_levels=num_levels,
            is_whole=trace.is_whole | (num_levels >= depth),
            acceptance_probability=scores[0],
            realised_acceptance=scores[1],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArmRounds:
    """The rounds of one walk, each of shape (R,), and what they had scored.

    Attributes:
        position, length: Where each began, and its tokens.
        drafter: Who drafted; -1 for nobody.
        budget: K that was chosen.
        num_scored: Windows scored in all.
    """

    position: NDArray[np.int64]
    length: NDArray[np.int64]
    drafter: NDArray[np.int64]
    budget: NDArray[np.int64]
    num_scored: int


class ArmWalks:
    """Walks the requests of all streams with one policy, each stream in its own order.

    Attributes:
        pool: What is chosen from.
    """

    def __init__(self, spec: PolicySpec, pool: ArmPool) -> None:
        self._spec = spec
        self.pool = pool
        self._stream_to_walker: dict[str, PricedWalker] = {}
        arms = pool.costs.arms
        self._drafter, self._budget = arms.drafter, arms.num_speculative_tokens

    def walk(
        self,
        request: RequestTrace,
        trace: WindowTrace,
        coins: Coins,
        score_coins: NDArray[np.float64],
        block: int,
    ) -> ArmRounds:
        """Walk one request; ``block`` is taken from the first of its stream."""
        walker = self._stream_to_walker.get(request.stream)
        if walker is None:
            walker = PricedWalker(self._spec, self.pool.costs, block=block)
            self._stream_to_walker[request.stream] = walker
        walked = walker.walk(prepare_priced(self.pool.trace(trace, request), coins, score_coins))
        # Arm -1 is nobody awake: the target alone, as arm 0.
        arm = np.maximum(walked.arm, 0)
        return ArmRounds(
            position=walked.position,
            length=walked.length,
            drafter=self._drafter[arm],
            budget=self._budget[arm],
            num_scored=int(walked.num_scored.sum()),
        )
