"""Selection across the requests of a worker: what each starts from, and what it leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inference.ports import Selector
from inference.priors import StreamPolicies
from learner.carried import packed
from learner.request_selector import RequestSelector
from learner.selection import PolicySpec
from schemas.events import PolicyPublished, VerificationEvent


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What one request starts from.

    Attributes:
        selector: Its own, to learn in place.
        table, numbers: The state it starts from, packed, to be logged; empty = from the prior.
        prior: The stream's prior over the pool, (N,).
        policy_version: Version of the published policy, 0 for none.
        hand_back: Called with the drafters' ids when the request has ended: its selector may
            become the stream's.
    """

    selector: Selector
    table: NDArray[np.float64]
    numbers: NDArray[np.float64]
    prior: NDArray[np.float64]
    policy_version: int
    hand_back: Callable[[Sequence[str]], None]


class Selection(Protocol):
    """Keeps what selection knows between the requests of a worker."""

    def update(self, policy: PolicyPublished) -> None:
        """Take note of a published policy; requests at work go on with theirs."""

    def begin(
        self, stream: str, drafter_ids: Sequence[str], prompt_token_ids: Sequence[int]
    ) -> Begun:
        """Return what a request over these drafters starts from."""

    def emitted(self, event: VerificationEvent) -> None:
        """Note an event of this worker, in order of sequence."""


class DrafterSelection:
    """Selection among drafters, for tokens per verification.

    Args:
        spec: The policy.
        num_speculative_tokens: K of every draft.
        worker_key: This worker as watermarks name it.
    """

    def __init__(self, spec: PolicySpec, num_speculative_tokens: int, worker_key: str) -> None:
        self._spec = spec
        self._num_speculative_tokens = num_speculative_tokens
        self._streams = StreamPolicies(spec, worker_key)

    def update(self, policy: PolicyPublished) -> None:
        """Take note of a published policy."""
        self._streams.update(policy)

    def begin(
        self, stream: str, drafter_ids: Sequence[str], prompt_token_ids: Sequence[int]
    ) -> Begun:
        """Start from the carried policy, or afresh from the prior."""
        start = self._streams.start(stream, drafter_ids, prompt_token_ids)
        selector = RequestSelector(self._spec, start.policy, self._num_speculative_tokens)
        table, numbers = packed(start.carried)
        return Begun(
            selector=selector,
            table=table,
            numbers=numbers,
            prior=start.prior,
            policy_version=start.policy_version,
            hand_back=lambda ids: self._streams.finished(stream, start, selector.first_losses, ids),
        )

    def emitted(self, event: VerificationEvent) -> None:
        """Note the sequence of the stream's newest event."""
        self._streams.emitted(event.stream, event.sequence)
