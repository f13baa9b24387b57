"""What requests start from when seconds count: the stream's arms, and what a round costs here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.priors import StreamPriors
from inference.recent_streams import RecentStreams
from inference.selection import Begun
from learner.arm_learner import ArmLearner
from learner.arm_selector import ArmSelector, packed_arms
from learner.arms import ArmCosts
from learner.carried import NEWCOMER_SHARE
from learner.cost import FORGOTTEN_COUNT, CostSums
from learner.selection import PolicySpec
from schemas.events import CostModel, PolicyPublished, VerificationEvent

COST_MEMORY = 0.99
"""Of the worker's own seconds, per event."""


@dataclass(slots=True)
class _Own:
    learner: ArmLearner
    drafter_ids: tuple[str, ...]


class StreamArms:
    """Carries the arms of a worker's streams from request to request.

    A request starts from a copy of its stream's learner, which becomes the request's own when it
    ends: of several at a time, the last to end wins. A stream that this worker has not served
    starts from the published prior; arms themselves are not published, as what they cost is this
    worker's own. Seconds are measured here; what was not yet is taken from the published model.

    Args:
        spec: The policy.
        num_speculative_tokens: Largest K, at least 1.
    """

    def __init__(self, spec: PolicySpec, num_speculative_tokens: int) -> None:
        self._spec = spec
        self._most = num_speculative_tokens
        self._priors = StreamPriors()
        self._stream_to_own: RecentStreams[_Own] = RecentStreams()
        self._sums = CostSums.empty()
        self._measured_ids: list[str] = []

    def update(self, policy: PolicyPublished) -> None:
        """Take note of a published policy; requests at work go on with theirs."""
        self._priors.update(policy)

    def begin(
        self, stream: str, drafter_ids: Sequence[str], prompt_token_ids: Sequence[int]
    ) -> Begun:
        """Start from the carried arms, or afresh from the prior, at what rounds cost now."""
        prior, version = self._priors.of(stream, drafter_ids)
        costs = self.costs(stream, drafter_ids)
        carried = self._carried(stream, drafter_ids, costs)
        learner = ArmLearner(self._spec, costs, prior=prior) if carried is None else carried
        table, numbers = packed_arms(learner)
        return Begun(
            selector=ArmSelector(learner),
            table=table,
            numbers=numbers,
            prior=prior,
            policy_version=version,
            hand_back=lambda ids: self._keep(stream, learner, ids),
        )

    def emitted(self, event: VerificationEvent) -> None:
        """Measure the rounds of an event."""
        ids = list(event.drafter_ids)
        new = [one for one in ids if one not in self._measured_ids]
        self._measured_ids += new
        self._sums = self._sums.with_new(len(new))
        places = np.array([self._measured_ids.index(one) for one in ids], dtype=np.int64)
        self._sums = self._sums.learned(event, places, decay=COST_MEMORY)
        self._forget_unlisted(ids)

    def _forget_unlisted(self, listed: Sequence[str]) -> None:
        """Forget drafters that have left the pool once nothing they cost counts any more."""
        weight = self._sums.num_draft_tokens + self._sums.num_scored_windows
        kept = [
            place
            for place, one in enumerate(self._measured_ids)
            if one in listed or weight[place] >= FORGOTTEN_COUNT
        ]
        if len(kept) < len(self._measured_ids):
            self._sums = self._sums.only(kept)
            self._measured_ids = [self._measured_ids[place] for place in kept]

    def _keep(self, stream: str, learner: ArmLearner, drafter_ids: Sequence[str]) -> None:
        self._stream_to_own.put(stream, _Own(learner, tuple(drafter_ids)))

    def costs(self, stream: str, drafter_ids: Sequence[str]) -> ArmCosts:
        """Return the seconds that a request is charged: measured here, else published."""
        size = len(drafter_ids)
        new = [one for one in drafter_ids if one not in self._measured_ids]
        known = [*self._measured_ids, *new]
        places = [known.index(one) for one in drafter_ids]
        own = self._sums.with_new(len(new)).only(places).model()
        published = self._priors.newest(stream)
        model = own if published is None else _or_published(own, published, drafter_ids)
        found = ArmCosts.from_model(model, self._most)
        return ArmCosts.unmeasured(size, self._most) if found is None else found

    def _carried(
        self, stream: str, drafter_ids: Sequence[str], costs: ArmCosts
    ) -> ArmLearner | None:
        own = self._stream_to_own.get(stream)
        if own is None:
            return None
        id_to_place = {drafter_id: place for place, drafter_id in enumerate(own.drafter_ids)}
        places = [id_to_place.get(drafter_id, -1) for drafter_id in drafter_ids]
        share = NEWCOMER_SHARE / max(places.count(-1), 1)
        return own.learner.over_pool(places, costs, share=share)


def _or_published(
    own: CostModel, published: PolicyPublished, drafter_ids: Sequence[str]
) -> CostModel:
    """Fill what was not measured here from the published model, drafter by drafter."""
    ids = [drafter.drafter_id for drafter in published.drafters]
    place = [ids.index(one) if one in ids else -1 for one in drafter_ids]

    def filled(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
        found = np.append(theirs, np.nan)[place]
        return np.where(np.isnan(mine), found, mine)

    size = max(len(own.verify_seconds), len(published.cost.verify_seconds))
    verify = np.full((2, size), np.nan)
    verify[0, : len(own.verify_seconds)] = own.verify_seconds
    verify[1, : len(published.cost.verify_seconds)] = published.cost.verify_seconds
    # Seconds of another machine do not mix with our own: all rows are of one or of the other.
    is_measured_here = bool(np.isfinite(verify[0]).any())
    return CostModel(
        draft_seconds=filled(own.draft_seconds, published.cost.draft_seconds),
        score_seconds=filled(own.score_seconds, published.cost.score_seconds),
        verify_seconds=verify[0] if is_measured_here else verify[1],
    )
