"""A policy over arms with all that it needs: price, scoring schedule, and its place in the text.

The worker steps it round by round, replay walks whole requests with it (``learner.priced_walk``);
both change the same arrays by the same kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner import arm_kernels
from learner.arms import NO_SPECULATION, ArmCosts, LossRange
from learner.price import SECONDS, first_price, fresh_begins, rate
from learner.scoring_schedule import (
    PROBABILITY,
    ScheduleSettings,
    begin_round,
    fresh_schedule,
    fresh_tallies,
)
from learner.selection import kernels
from learner.selection.compiled import LEARN, pointer
from learner.selection.policy import PolicyState
from learner.selection.registry import PolicySpec
from learner.walk import CHOICE_TO_MODE

CARRIED = ("price", "schedule", "tallies")
"""Arrays that go on with a stream, beside the policy's."""

_DEFAULT_SETTINGS = ScheduleSettings()


class ArmLearner:
    """Chooses (drafter, K), decides what is scored, and learns both from what it sees.

    Args:
        spec: The policy; its ``loss`` is not read: arms lose θ C - y.
        costs: Seconds of the arms.
        prior: Over the drafters, (N,); None = uniform.
        settings: How sparingly to score.

    Attributes:
        arms: What can be played.
        costs: Seconds in force.
        policy: Over the arms.
        price, schedule, tallies: As ``learner.price`` and ``learner.scoring_schedule`` have them.
        begins, cursor: Where rounds of every arm begin in the present request.
        last: The last choice, (1 + A,), as ``kernels.walk`` has it.
    """

    def __init__(
        self,
        spec: PolicySpec,
        costs: ArmCosts,
        *,
        prior: ArrayLike | None = None,
        settings: ScheduleSettings = _DEFAULT_SETTINGS,
    ) -> None:
        self.spec = spec
        self.arms = costs.arms
        self.policy = spec.build(len(self.arms), prior=self.arms.prior(prior))
        self.price = first_price(costs)
        self.schedule = fresh_schedule(settings)
        self.tallies = fresh_tallies(len(self.arms))
        self.mode = CHOICE_TO_MODE[spec.choice]
        self._charge(costs)
        self.start_request()

    def use_costs(self, costs: ArmCosts) -> None:
        """Charge other seconds from here on, and value by them what was paid before.

        Raises:
            ValueError: If the costs are about other arms.
        """
        if costs.arms != self.arms:
            raise ValueError(f"costs of {costs.arms}, expected those of {self.arms}")
        self.price[SECONDS] *= costs.verify_seconds[0] / self.costs.verify_seconds[0]
        self._charge(costs)

    def _charge(self, costs: ArmCosts) -> None:
        self.costs = costs
        self.seconds = costs.seconds()
        self.scale = LossRange.of(costs).scale

    def start_request(self) -> None:
        """Begin a request: no window continues one of the request before."""
        self.begins = fresh_begins(len(self.arms), self.arms.max_speculative_tokens)
        self.cursor = np.array([-1])
        self.last = np.full(1 + len(self.arms), -1.0)

    def probabilities(self, is_awake: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the chance of every arm to be chosen now, (A,), given the drafters awake, (N,)."""
        arm_is_awake = np.empty(len(self.arms), dtype=np.bool_)
        chances = np.empty(len(self.arms))
        arm_kernels.arms_awake(is_awake, self.arms.max_speculative_tokens, arm_is_awake)
        kernels.masked_probabilities(self.policy.table[0], arm_is_awake, chances)
        return chances

    def choose(self, is_awake: NDArray[np.bool_], coin: float) -> tuple[int, float]:
        """Choose the arm of the next round and return (arm, probability)."""
        chances = self.probabilities(is_awake)
        arm = kernels.choose(self.mode, chances, self.last[1:], int(self.last[0]), coin)
        self.last[0], self.last[1:] = arm, chances
        return int(arm), float(chances[arm])

    def begin_round(self, coin: float) -> tuple[bool, float]:
        """Decide whether the windows that start in this round are scored; (is_scored, probability).

        Called before the round's outcome is known.
        """
        share = rate(self.price) * self.costs.scoring_seconds
        is_scored = begin_round(self.schedule, share, coin)
        return bool(is_scored), float(self.schedule[PROBABILITY])

    def end_round(self, arm: int, length: int) -> None:
        """Note the tokens that the round of ``arm`` emitted."""
        arm_kernels.finish_round(
            self.policy.table,
            self.seconds,
            self.price,
            self.schedule,
            self.tallies,
            self.arms.max_speculative_tokens,
            arm,
            length,
        )

    def learn(
        self,
        acceptance_probability: NDArray[np.floating[Any]],
        realised_acceptance: NDArray[np.floating[Any]],
        num_levels: NDArray[np.integer[Any]],
        starts: NDArray[np.integer[Any]],
    ) -> None:
        """Learn scored windows in order, arrays (W, K_max, N), (W, K_max, N), (W,) and (W,).

        Raises:
            ValueError: If the arrays are not of this many levels and drafters.
        """
        shape = (len(starts), self.arms.max_speculative_tokens, self.arms.num_drafters)
        if acceptance_probability.shape != shape or realised_acceptance.shape != shape:
            raise ValueError(
                f"windows have shapes {acceptance_probability.shape} and "
                f"{realised_acceptance.shape}, expected {shape}"
            )
        arm_kernels.learn_windows()(
            pointer(self.policy.kernel, LEARN),
            self.policy.table,
            self.policy.numbers,
            by_drafter(acceptance_probability),
            by_drafter(realised_acceptance),
            np.asarray(num_levels, dtype=np.int64),
            np.asarray(starts, dtype=np.int64),
            self.seconds,
            self.scale,
            self.price,
            self.schedule,
            self.tallies,
            self.begins,
            self.cursor,
        )

    def state(self) -> dict[str, NDArray[np.float64]]:
        """Return what the stream's next request goes on from, copied."""
        carried = {name: getattr(self, name).copy() for name in CARRIED}
        return {**self.policy.state().arrays, **carried}

    def restore(self, state: Mapping[str, NDArray[np.float64]]) -> None:
        """Go on from a state, at a request's start.

        Raises:
            ValueError: If an array is missing or of another shape.
        """
        for name, now in self.state().items():
            found = state.get(name)
            if found is None or found.shape != now.shape:
                shape = None if found is None else found.shape
                raise ValueError(f"state of arms: {name} has shape {shape}, expected {now.shape}")
        kind = type(self.policy)
        arrays = {name: state[name] for name in ("table", "numbers")}
        self.policy = kind.from_state(
            PolicyState(name=kind.name, version=kind.version, arrays=arrays)
        )
        for name in CARRIED:
            setattr(self, name, np.array(state[name], dtype=np.float64))
        self.start_request()

    def over_pool(self, places: Sequence[int], costs: ArmCosts, *, share: float) -> ArmLearner:
        """Return a learner over another pool that goes on from this one's state.

        Args:
            places: For each drafter of the new pool, where it stands in this one; -1 = new.
            costs: Of the new pool, with the same largest K.
            share: Probability that each new drafter gets, in (0, 1), split over its K.
        """
        other = ArmLearner(self.spec, costs)
        arm_places = np.full(len(other.arms), -1)
        arm_places[NO_SPECULATION] = NO_SPECULATION
        most = self.arms.max_speculative_tokens
        for new, old in enumerate(places):
            if old >= 0:
                levels = np.arange(most)
                arm_places[1 + new * most + levels] = 1 + old * most + levels
        other.policy = self.policy.with_drafters(arm_places.tolist(), share=share / most)
        other.price, other.schedule = self.price.copy(), self.schedule.copy()
        other.price[SECONDS] *= costs.verify_seconds[0] / self.costs.verify_seconds[0]
        kept = arm_places >= 0
        other.tallies[:, kept] = self.tallies[:, arm_places[kept]]
        return other


def by_drafter(levels: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Return (W, K, N) as (W, N, K), contiguous: a drafter's levels lie side by side."""
    return np.ascontiguousarray(levels.transpose(0, 2, 1), dtype=np.float64)
