"""All that a state learns of an event beside its policy, in one compiled call.

It is the same, bit for bit, as ``feedback.event_losses``, ``StreamPrior.learned`` and
``CostSums.learned`` one after the other, whose kernels it calls; each call into compiled code costs
as much as a short event's arithmetic.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from learner.cost import CostSums
from learner.event_kernels import NO_LOSS, take_event
from learner.feedback import CUT, POLICY_LOSSES, event_losses, refuse_loss
from learner.measures import Estimator
from learner.prior import PriorSettings, StreamPrior
from learner.selection.base import Loss
from schemas.events import VerificationEvent


class Taken(NamedTuple):
    """What an event leaves behind.

    Attributes:
        losses: Of its windows in order, for the policy, (W, M); as ``EventLosses.of_policy``.
        prior: The evidence after it.
        cost: The costs after it.
    """

    losses: NDArray[np.float64]
    prior: StreamPrior
    cost: CostSums


def learn_from(
    event: VerificationEvent,
    places: NDArray[np.int64],
    before: tuple[StreamPrior, CostSums],
    settings: PriorSettings,
    *,
    estimator: Estimator,
    length_weight: float,
    policy_loss: Loss | None,
) -> Taken:
    """Measure an event once for evidence, costs and policy.

    Args:
        event: Is learned.
        places: Where its drafters stand among the learner's, as ``feedback.drafter_positions``.
        before: Evidence and costs before it, over M drafters.
        settings: Whose decay to use.
        estimator: As ``feedback.event_losses``.
        length_weight: Likewise.
        policy_loss: Likewise.

    Raises:
        ValueError: If a loss is outside [0, 1], naming window and drafter.
    """
    prior, cost = before
    if not event.num_speculative_tokens:
        losses = event_losses(event, places=places, num_drafters=len(prior.excess_loss))
        new_prior = prior.learned(losses.evidence, settings)
        new_cost = cost.learned(event, places, decay=settings.decay)
        return Taken(losses.of_policy, new_prior, new_cost)
    rounds, windows = event.rounds, event.windows
    found, of_policy, evidence, per_drafter, per_length = take_event(
        np.ascontiguousarray(windows.acceptance_probability).view(np.uint16),
        np.ascontiguousarray(windows.realised_acceptance).view(np.uint16),
        windows.num_levels,
        places,
        (
            event.finish_reason in CUT,
            estimator == "published",
            float(length_weight),
            NO_LOSS if policy_loss is None else POLICY_LOSSES[policy_loss],
            settings.decay,
        ),
        (prior.excess_loss, prior.num_windows),
        (rounds.drafter_index, rounds.num_draft_tokens),
        (rounds.draft_seconds, rounds.verify_seconds, rounds.score_seconds),
        rounds.first_position,
        event.num_prompt_tokens,
        (cost.draft_seconds, cost.num_draft_tokens, cost.score_seconds, cost.num_scored_windows),
        (cost.verify_seconds, cost.num_verifications),
    )
    _, window, drafter, loss = found
    if drafter >= 0:
        refuse_loss(event, window, drafter, loss)
    return Taken(of_policy, StreamPrior(*evidence), CostSums.of_rows(per_drafter, per_length))
