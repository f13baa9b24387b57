"""Selection of (drafter, K) inside one request, live and over a log; and its state on its way.

Travelling, a state is two arrays as for other policies: the rows of the policy's table without
no speculation, of as many columns as there are drafters, and all the rest: that arm's column, the
policy's numbers, price, schedule, tallies and the costs in force.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.arm_learner import CARRIED, ArmLearner
from learner.arms import NO_SPECULATION, ArmCosts
from learner.request_selector import Decision
from learner.selection.kernels import ARGMAX, sharpen_to_best
from learner.selection.registry import PolicySpec

COSTS = ("draft_seconds", "verify_seconds", "score_seconds")


class ArmSelector:
    """One request's choice among arms.

    Args:
        learner: The stream's, this request's own: it learns in place.

    Raises:
        ValueError: If the policy does not take the most probable arm: which K was meant could
            not be found in a log where a drafter proposed less.
    """

    def __init__(self, learner: ArmLearner) -> None:
        if learner.mode != ARGMAX:
            raise ValueError(
                f"policy {str(learner.spec)!r}: objective=seconds is served with choice=argmax"
            )
        self.learner = learner
        learner.start_request()

    @property
    def learns_first_level(self) -> bool:
        """Level 1 says nothing of K."""
        return False

    def decide(self, is_awake: NDArray[np.bool_], rng: np.random.Generator) -> Decision:
        """Choose the arm of the next round, and whether its windows are scored."""
        arm, probability = self.learner.choose(is_awake, rng.random())
        is_scored, score_probability = self.learner.begin_round(rng.random())
        return Decision(
            drafter_index=int(self.learner.arms.drafter[arm]),
            num_speculative_tokens=int(self.learner.arms.num_speculative_tokens[arm]),
            probability=probability,
            is_scored=is_scored,
            score_probability=score_probability,
        )

    def follow(
        self, is_awake: NDArray[np.bool_], drafter_index: int
    ) -> tuple[Decision, NDArray[np.float64]]:
        """Return what the log's choice of a drafter meant, and every arm's chance, (A,).

        Of the drafter's arms it is the most probable one: only that can have been played.
        """
        chances = self.learner.probabilities(is_awake)
        sharpen_to_best(chances)
        arms = np.flatnonzero(self.learner.arms.drafter == drafter_index)
        arm = int(arms[np.argmax(chances[arms])])
        _, score_probability = self.learner.begin_round(0.0)
        decision = Decision(
            drafter_index=drafter_index,
            num_speculative_tokens=int(self.learner.arms.num_speculative_tokens[arm]),
            probability=float(chances[arm]),
            score_probability=score_probability,
        )
        return decision, chances

    def end_round(
        self,
        decision: Decision,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_emitted_tokens: int,
    ) -> None:
        """Note the outcome of a round, before the windows that it completes are learned."""
        arm = self.learner.arms.index(decision.drafter_index, decision.num_speculative_tokens)
        self.learner.end_round(arm, num_emitted_tokens)

    def learn(
        self,
        acceptance_probability: NDArray[np.float16],
        realised_acceptance: NDArray[np.float16],
        num_levels: NDArray[np.int16],
        starts: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Learn scored windows in order, arrays (W, K, N), (W, K, N), (W,) and (W,).

        Raises:
            ValueError: If it is not told where they start.
        """
        if starts is None:
            raise ValueError("windows of arms without their starts")
        self.learner.learn(acceptance_probability, realised_acceptance, num_levels, starts)


def packed_arms(learner: ArmLearner) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (table, numbers), both flat, as they travel."""
    state = learner.state()
    table = state["table"]
    rest = [
        table[:, NO_SPECULATION],
        state["numbers"],
        *(state[name].ravel() for name in CARRIED),
        *(getattr(learner.costs, name) for name in COSTS),
    ]
    return table[:, NO_SPECULATION + 1 :].ravel(), np.concatenate(rest)


def unpacked_arms(
    spec: PolicySpec,
    table: NDArray[np.float64],
    numbers: NDArray[np.float64],
    num_drafters: int,
    max_speculative_tokens: int,
) -> ArmLearner:
    """Return the learner that ``packed_arms`` was given.

    Raises:
        ValueError: If the arrays are no state of this policy over so many arms: another build
            made them.
    """
    learner = ArmLearner(spec, ArmCosts.unmeasured(num_drafters, max_speculative_tokens))
    shapes = {name: values.shape for name, values in learner.state().items()}
    num_rows, num_arms = shapes["table"]
    costs = {name: getattr(learner.costs, name).shape for name in COSTS}
    wanted = {"none": (num_rows,), "numbers": shapes["numbers"]}
    wanted |= {name: shapes[name] for name in CARRIED} | costs
    sizes = [int(np.prod(shape)) for shape in wanted.values()]
    if table.size != num_rows * (num_arms - 1) or numbers.size != sum(sizes):
        raise ValueError(
            f"state of {spec.name!r} over arms has {table.size} and {numbers.size} values, "
            f"expected {num_rows * (num_arms - 1)} and {sum(sizes)}"
        )
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    found = {
        name: part.reshape(shape) for (name, shape), part in zip(wanted.items(), parts, strict=True)
    }
    whole = np.column_stack([found.pop("none"), table.reshape(num_rows, -1)])
    restored = ArmLearner(spec, ArmCosts(**{name: found.pop(name) for name in COSTS}))
    restored.restore({"table": whole, **found})
    return restored
