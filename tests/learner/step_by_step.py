"""What ``learner.event_learning`` does in one call, done in its single steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.cost import CostSums
from learner.event_learning import Taken
from learner.feedback import event_losses
from learner.measures import Estimator
from learner.prior import PriorSettings, StreamPrior
from learner.selection.base import Loss
from schemas.events import VerificationEvent


def learn_step_by_step(
    event: VerificationEvent,
    places: NDArray[np.int64],
    before: tuple[StreamPrior, CostSums],
    settings: PriorSettings,
    *,
    estimator: Estimator,
    length_weight: float,
    policy_loss: Loss | None,
) -> Taken:
    """Do the same as ``learn_from``."""
    prior, cost = before
    losses = event_losses(
        event,
        places=places,
        num_drafters=len(prior.excess_loss),
        estimator=estimator,
        length_weight=length_weight,
        policy_loss=policy_loss,
    )
    return Taken(
        losses.of_policy,
        prior.learned(losses.evidence, settings),
        cost.learned(event, places, decay=settings.decay),
    )
