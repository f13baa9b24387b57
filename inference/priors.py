"""What the requests of a worker start from: published priors, carried policies, and experts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.recent_streams import RecentStreams
from learner.carried import NEWCOMER_SHARE, copied, over_pool
from learner.request_start import MixedStart, StartExperts
from learner.selection import CompiledPolicy, PolicySpec
from learner.shared_prior import SharedPrior
from learner.stream_state import carried_policy, published_prior
from schemas.events import PolicyPublished

__all__ = ["NEWCOMER_SHARE", "RequestStart", "StreamPolicies", "StreamPriors"]

logger = logging.getLogger(__name__)


class StreamPriors:
    """The newest policy of every stream."""

    def __init__(self) -> None:
        self._stream_to_policy: RecentStreams[PolicyPublished] = RecentStreams()

    def update(self, policy: PolicyPublished) -> None:
        """Keep a policy unless a newer one of its stream is known."""
        known = self._stream_to_policy.get(policy.stream)
        if known is None or policy.version > known.version:
            self._stream_to_policy.put(policy.stream, policy)

    def newest(self, stream: str) -> PolicyPublished | None:
        """Return the newest policy of a stream."""
        return self._stream_to_policy.get(stream)

    def of(self, stream: str, drafter_ids: Sequence[str]) -> tuple[NDArray[np.float64], int]:
        """Return (prior over ``drafter_ids``, policy version); uniform and 0 for a new stream.

        Every entry is positive: drafters that the policy does not know share
        ``NEWCOMER_SHARE``, and drafters it knows but the pool has not are left out.
        """
        uniform = np.full(len(drafter_ids), 1.0 / len(drafter_ids))
        policy = self._stream_to_policy.get(stream)
        if policy is None:
            return uniform, 0
        known = {
            drafter.drafter_id: float(probability)
            for drafter, probability in zip(
                policy.drafters, policy.selection_probabilities, strict=True
            )
        }
        prior = np.array([known.get(drafter_id, 0.0) for drafter_id in drafter_ids])
        if not prior.sum() > 0.0:
            return uniform, policy.version
        is_new = prior <= 0.0
        share = NEWCOMER_SHARE if is_new.any() else 0.0
        prior *= (1.0 - share) / prior.sum()
        prior[is_new] = share / max(int(is_new.sum()), 1)
        return prior, policy.version


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestStart:
    """What one request starts from.

    Attributes:
        policy: The request's own, to learn in place.
        carried: The state it starts from, to be logged; None = it starts afresh from the prior.
        prior: Chance of each drafter by what was known before the request, (N,).
        policy_version: Version of the published policy, 0 for none.
        mixed: What the experts said, if they were asked.
    """

    policy: CompiledPolicy
    carried: CompiledPolicy | None
    prior: NDArray[np.float64]
    policy_version: int
    mixed: MixedStart | None = None


@dataclass(slots=True)
class _Own:
    """What this worker knows of a stream by itself."""

    policy: CompiledPolicy
    drafter_ids: tuple[str, ...]


class StreamPolicies:
    """Carries the policies of a worker's streams from request to request.

    Unless its scope is ``request``, a request starts from a copy of the stream's policy, which
    becomes the stream's when it ends: of several at a time, the last to end wins. With scope
    ``both`` the copy first moves towards what experts say (``learner.request_start``). The learner
    runs the same policy over the windows of all workers; its state is taken over once it contains
    all that this worker has emitted of the stream, so nothing that was learned here is lost.

    Args:
        spec: The policy.
        worker_key: This worker as watermarks name it, "<worker_id>/<worker_epoch>".
    """

    def __init__(self, spec: PolicySpec, worker_key: str) -> None:
        self._spec = spec
        self._worker_key = worker_key
        self._priors = StreamPriors()
        self._stream_to_own: RecentStreams[_Own] = RecentStreams()
        self._stream_to_sequence: RecentStreams[int] = RecentStreams()
        self._shared = SharedPrior()
        self._experts = StartExperts(spec)

    def update(self, policy: PolicyPublished) -> None:
        """Take note of a published policy; requests at work go on with theirs."""
        self._priors.update(policy)
        known = published_prior(policy) if self._spec.scope == "both" else None
        if known is not None:
            ids = [drafter.drafter_id for drafter in policy.drafters]
            self._shared.update(policy.stream, ids, known)

    def start(
        self, stream: str, drafter_ids: Sequence[str], prompt_token_ids: Sequence[int] = ()
    ) -> RequestStart:
        """Return what a request over these drafters starts from."""
        prior, version = self._priors.of(stream, drafter_ids)
        carried = self._carried(stream, drafter_ids)
        if self._spec.scope == "both":
            shared = self._shared.of(stream, drafter_ids)
            mixed = self._experts.start(drafter_ids, carried, shared, prompt_token_ids)
            return RequestStart(
                policy=mixed.policy,
                carried=None if carried is None else copied(mixed.policy),
                prior=mixed.prior,
                policy_version=version,
                mixed=mixed,
            )
        policy = (
            copied(carried)
            if carried
            else self._spec.build(len(drafter_ids), prior=prior, drafter_ids=drafter_ids)
        )
        return RequestStart(policy=policy, carried=carried, prior=prior, policy_version=version)

    def emitted(self, stream: str, sequence: int) -> None:
        """Note the sequence of the newest event of a stream."""
        self._stream_to_sequence.put(stream, sequence)

    def finished(
        self,
        stream: str,
        start: RequestStart,
        first_losses: NDArray[np.float64],
        drafter_ids: Sequence[str],
    ) -> None:
        """Let the policy of a request that has ended be the stream's.

        Args:
            stream: The stream.
            start: What the request started from; its policy has learned since.
            first_losses: Of the request's first windows, (W, N), from which the experts learn.
            drafter_ids: The request's drafters, (N,).
        """
        if start.mixed is not None:
            self._experts.learned(start.mixed, first_losses)
        if self._spec.scope != "request":
            self._stream_to_own.put(stream, _Own(start.policy, tuple(drafter_ids)))

    def _carried(self, stream: str, drafter_ids: Sequence[str]) -> CompiledPolicy | None:
        own, published = self._stream_to_own.get(stream), self._priors.newest(stream)
        if published is not None and (own is None or self._contains_all(published)):
            policy = self._policy_of(published)
            if policy is not None:
                ids = [drafter.drafter_id for drafter in published.drafters]
                return over_pool(policy, ids, drafter_ids)
        return over_pool(own.policy, own.drafter_ids, drafter_ids) if own else None

    def _contains_all(self, published: PolicyPublished) -> bool:
        contained = published.watermark.worker_to_sequence.get(self._worker_key, -1)
        sequence = self._stream_to_sequence.get(published.stream)
        return sequence is None or contained >= sequence

    def _policy_of(self, published: PolicyPublished) -> CompiledPolicy | None:
        try:
            return carried_policy(published, self._spec)
        except ValueError as error:
            # The learner is of another build: this worker carries its own state meanwhile.
            logger.warning("policy of stream %s not taken over: %s", published.stream, error)
            return None
