"""Hidden states recomputed from tokens: for streams with content of which no worker recorded any.

An event of a request's first segment holds the prompt, the later ones only their own tokens. What
was said so far is therefore remembered per request, and the target's cache with it, so that every
token is fed once however many segments there are. Both are bounded; what was forgotten of the
caches is computed again, and a request whose tokens were forgotten, or whose beginning was never
read, gives no more states.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inference.target import Target, TargetSession
from learner.ports import ReceivedEvent, SegmentStates
from schemas.events import Content, VerificationEvent

MAX_TOKENS = 1 << 20
"""Tokens of unfinished requests that are remembered, 8 MiB and more."""

_Key = tuple[str, int, str]


@dataclass(slots=True)
class _Request:
    """What is known of a request; ``token_ids`` are from its very beginning on."""

    first_offset: int
    token_ids: list[int] = field(default_factory=list)
    session: TargetSession | None = None

    @property
    def num_cached(self) -> int:
        """Positions that the target's cache holds of it."""
        return 0 if self.session is None else self.session.length


class RecomputedFeatures:
    """Computes the states of segments with the target (``learner.ports.FeatureComputer``).

    Args:
        target: The one that verified, in the number format of serving.
        max_cached_positions: Positions in the target's caches of unfinished requests, over all of
            them; those that were not heard of for longest are given up. 0 = every segment reads
            the whole request again.
        max_tokens: Tokens of unfinished requests that are remembered, over all of them, >= 1.

    Attributes:
        num_positions: Positions whose states were computed.
        num_fed_tokens: Tokens that the target was fed for it; more than the positions by the
            prompts, and by what was read again.
        num_unknown: Segments of requests whose beginning is not known.
        seconds: Processor time of this thread that it took.
    """

    def __init__(
        self, target: Target, *, max_cached_positions: int, max_tokens: int = MAX_TOKENS
    ) -> None:
        for name, value, least in (
            ("max_cached_positions", max_cached_positions, 0),
            ("max_tokens", max_tokens, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} outside {least}..")
        self._target = target
        self._max_cached_positions = max_cached_positions
        self._max_tokens = max_tokens
        self._requests: OrderedDict[_Key, _Request] = OrderedDict()
        self._finished: _Key | None = None
        self.num_positions = 0
        self.num_fed_tokens = 0
        self.num_unknown = 0
        self.seconds = 0.0

    @property
    def num_cached_positions(self) -> int:
        """Positions in the target's caches now."""
        return sum(request.num_cached for request in self._requests.values())

    @property
    def num_remembered_tokens(self) -> int:
        """Tokens of unfinished requests that are remembered now."""
        return sum(len(request.token_ids) for request in self._requests.values())

    def follow(self, received: ReceivedEvent) -> None:
        """Remember what an event says; every event with content is to be shown, in order.

        Raises:
            ValueError: If it is of another target, or its tokens cannot be this one's.
        """
        event = received.event
        if event.content is None:
            return
        self._refuse_other(event, event.content)
        key = _key(event)
        if self._finished is not None:
            self._requests.pop(self._finished, None)
        self._finished = key if event.is_final else None
        if event.segment_index == 0:
            self._begin(key, received.offset, event.content)
        request = self._requests.get(key)
        if request is None:
            return
        self._requests.move_to_end(key)
        if len(request.token_ids) == event.first_position:
            request.token_ids += event.content.token_ids.tolist()
        self._forget_tokens()

    def _begin(self, key: _Key, offset: int, content: Content) -> None:
        """Remember a prompt, unless this is the same beginning delivered again."""
        beginning = [*content.prompt_token_ids.tolist(), *content.token_ids.tolist()]
        known = self._requests.get(key)
        if known is None or known.token_ids[: len(beginning)] != beginning:
            self._requests[key] = _Request(offset, content.prompt_token_ids.tolist())

    def read(self, received: ReceivedEvent) -> SegmentStates | None:
        """Return the states of an event that was followed; None if its beginning is not known."""
        began = time.thread_time()
        request = self._requests.get(_key(received.event))
        states = None if request is None else self._computed(request, received.event)
        if states is None:
            self.num_unknown += 1
        self._forget_caches()
        self.seconds += time.thread_time() - began
        if request is None or states is None:
            return None
        return SegmentStates(hidden=states, first_offset=request.first_offset)

    def _computed(self, request: _Request, event: VerificationEvent) -> NDArray[np.float32] | None:
        """Compute the state behind the token before each of the event's positions."""
        first, last = event.first_position, event.first_position + event.num_positions
        found = request.token_ids[first:last]
        if event.content is None or found != event.content.token_ids.tolist() or not first:
            return None  # something between is missing
        if first == last:
            return np.empty((0, self._target.hidden_size), np.float32)
        if request.session is None:
            request.session = self._target.start()
        session = request.session
        # The cache may hold the segment already: the event was delivered twice.
        session.keep(min(session.length, first - 1))
        fed = request.token_ids[session.length : last - 1]
        hidden = session.states(fed, num_rows=last - first)
        self.num_fed_tokens += len(fed)
        self.num_positions += last - first
        rows: NDArray[np.float32] = hidden.float().cpu().numpy()
        return rows

    def _refuse_other(self, event: VerificationEvent, content: Content) -> None:
        target = self._target
        if event.target_fingerprint != target.fingerprint:
            raise ValueError(
                f"{event.event_id}: target_fingerprint {event.target_fingerprint}, expected "
                f"{target.fingerprint}"
            )
        last = event.first_position + event.num_positions
        if last > target.context_length:
            raise ValueError(
                f"{event.event_id}: {last} positions, expected at most {target.context_length}"
            )
        for token_ids in (content.prompt_token_ids, content.token_ids):
            highest = int(token_ids.max(initial=0))
            if highest >= target.vocab_size:
                raise ValueError(
                    f"{event.event_id}: token {highest}, expected 0..{target.vocab_size - 1}"
                )

    def _forget_tokens(self) -> None:
        total = self.num_remembered_tokens
        while total > self._max_tokens and len(self._requests) > 1:
            _, oldest = self._requests.popitem(last=False)
            total -= len(oldest.token_ids)

    def _forget_caches(self) -> None:
        total = self.num_cached_positions
        for request in self._requests.values():
            if total <= self._max_cached_positions:
                return
            total -= request.num_cached
            request.session = None


def _key(event: VerificationEvent) -> _Key:
    return event.worker_id, event.worker_epoch, event.request_id
