"""Selection inside one request: who drafts the next round, learned from what was verified.

The worker uses it live and replay uses the same one over a log, so they cannot disagree: what is
learned are the float16 numbers of the event, in the order and at the rounds that the event tells,
by the kernels that re-run other policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.measures import policy_losses
from learner.selection import CompiledPolicy, PolicySpec, RoundFeedback, kernels, parse_policy
from learner.selection.base import Loss
from learner.walk import CHOICE_TO_MODE
from schemas.events import NO_DRAFTER

FIRST_WINDOWS = 64
"""Windows of a request that say which start was right: later ones tell of later text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What one round does.

    Attributes:
        drafter_index: Who drafts; ``NO_DRAFTER`` for nobody.
        num_speculative_tokens: Most tokens to draft.
        probability: Of the choice, in (0, 1].
        is_scored: Whether the windows that start at its tokens are scored.
        score_probability: Chance of that, in (0, 1], drawn before the round.
    """

    drafter_index: int
    num_speculative_tokens: int
    probability: float
    is_scored: bool = True
    score_probability: float = 1.0


class RequestSelector:
    """One request's policy over the drafters of a pool.

    Args:
        spec: What the policy learns of a window and how it chooses.
        policy: The policy itself, this request's own: it learns in place.
        num_speculative_tokens: K, the scale of losses.

    Attributes:
        policy: As it is now.
    """

    def __init__(
        self, spec: PolicySpec, policy: CompiledPolicy, num_speculative_tokens: int
    ) -> None:
        self.policy = policy
        self._loss: Loss = spec.loss
        self._mode = CHOICE_TO_MODE[spec.choice]
        self._num_speculative_tokens = num_speculative_tokens
        # A request begins with no drafter at work, so its first choice is no switch.
        self._last_index = -1
        self._last_probabilities = np.zeros(policy.num_drafters)
        self._first_losses: list[NDArray[np.float64]] = []
        self._num_first = 0

    @classmethod
    def fresh(
        cls,
        name: str,
        num_drafters: int,
        num_speculative_tokens: int,
        *,
        prior: ArrayLike | None = None,
        drafter_ids: Sequence[str] | None = None,
    ) -> RequestSelector:
        """Return a selector whose policy starts afresh; see ``parse_policy`` and ``build``."""
        spec = parse_policy(name)
        policy = spec.build(num_drafters, prior=prior, drafter_ids=drafter_ids)
        return cls(spec, policy, num_speculative_tokens)

    @property
    def learns_first_level(self) -> bool:
        """Whether level 1 of a window is all that it learns."""
        return self._loss == "first"

    @property
    def first_losses(self) -> NDArray[np.float64]:
        """Losses of the first windows that it learned, (W, N), W at most ``FIRST_WINDOWS``."""
        found = [np.empty((0, self.policy.num_drafters)), *self._first_losses]
        return np.concatenate(found)[:FIRST_WINDOWS]

    def probabilities(self, is_awake: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the chance of every drafter to be chosen now, shape (N,); those asleep have none.

        If all the mass is on drafters that sleep, it goes to the others in equal shares.
        """
        chances = np.empty(self.policy.num_drafters)
        kernels.masked_probabilities(self.policy.table[0], is_awake, chances)
        if self._mode == kernels.ARGMAX:
            kernels.sharpen_to_best(chances)
        return chances

    def choose(self, is_awake: NDArray[np.bool_], rng: np.random.Generator) -> tuple[int, float]:
        """Choose the drafter of the next round and return (index, probability)."""
        chances = self.probabilities(is_awake)
        index = kernels.choose(
            self._mode, chances, self._last_probabilities, self._last_index, rng.random()
        )
        self._last_index, self._last_probabilities = index, chances
        return index, float(chances[index])

    def decide(self, is_awake: NDArray[np.bool_], rng: np.random.Generator) -> Decision:
        """Choose the drafter of the next round; all windows are scored."""
        index, probability = self.choose(is_awake, rng)
        return Decision(
            drafter_index=index,
            num_speculative_tokens=self._num_speculative_tokens,
            probability=probability,
        )

    def learn(
        self,
        acceptance_probability: NDArray[np.float16],
        realised_acceptance: NDArray[np.float16],
        num_levels: NDArray[np.int16],
        starts: NDArray[np.integer[Any]] | None = None,
    ) -> None:
        """Learn windows in order of start, arrays (W, K, N) and (W,).

        A policy that learns level 1 alone reads nothing else of them; where they start is read
        by policies over arms alone.
        """
        losses = policy_losses(
            acceptance_probability,
            realised_acceptance,
            num_levels,
            loss=self._loss,
            num_speculative_tokens=self._num_speculative_tokens,
        )
        self.policy.learn_windows(losses)
        if self._num_first < FIRST_WINDOWS:
            self._first_losses.append(losses)
            self._num_first += len(losses)

    def end_round(
        self,
        decision: Decision,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_emitted_tokens: int,
    ) -> None:
        """Note the outcome of a round, before the windows that it completes are learned."""
        if decision.drafter_index != NO_DRAFTER:
            self.learn_round(
                decision.drafter_index,
                decision.probability,
                num_draft_tokens,
                num_accepted_tokens,
            )

    def learn_round(
        self,
        drafter_index: int,
        selection_probability: float,
        num_draft_tokens: int,
        num_accepted_tokens: int,
    ) -> None:
        """Learn what a round alone tells, if the policy is a bandit.

        The probability counts as the event carries it, in float32.
        """
        if self.policy.learns_rounds:
            self.policy.learn_round(
                round_feedback(
                    drafter_index,
                    float(np.float32(selection_probability)),
                    num_draft_tokens,
                    num_accepted_tokens,
                    num_speculative_tokens=self._num_speculative_tokens,
                )
            )


def round_feedback(
    drafter_index: int,
    selection_probability: float,
    num_draft_tokens: int,
    num_accepted_tokens: int,
    *,
    num_speculative_tokens: int,
) -> RoundFeedback:
    """Return what a bandit sees of a round.

    The agreement is the share of the levels that verification reached whose token was accepted:
    under a greedy target that is their mean acceptance probability, and otherwise one draw of
    it, known at once and found again in the log.

    Args:
        drafter_index: Who was played.
        selection_probability: Its chance when it was chosen.
        num_draft_tokens: Tokens it proposed, 0..K; proposing none counts as a rejection.
        num_accepted_tokens: Those accepted, without bonus.
        num_speculative_tokens: K, at least 1.
    """
    num_reached = max(min(num_accepted_tokens + 1, num_draft_tokens), 1)
    return RoundFeedback(
        drafter_index=drafter_index,
        selection_probability=selection_probability,
        length_loss=1.0 - (num_accepted_tokens + 1) / (num_speculative_tokens + 1),
        agreement_loss=1.0 - num_accepted_tokens / num_reached,
    )
