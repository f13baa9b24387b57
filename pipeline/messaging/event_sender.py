"""Verification events on their way out: encoded, kept under the size limit, appended."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.eventlog.ports import EventLog, Message
from schemas.avro import SchemaTable
from schemas.codec import cloud_event_headers, encode
from schemas.errors import ContractError
from schemas.events import Content, VerificationEvent
from schemas.topics import VERIFICATION_EVENTS

logger = logging.getLogger(__name__)


class LogEventSender:
    """Appends events, keyed by stream: the ``send`` of ``inference.emission.Emitter``.

    What could never be stored must not be tried for ever. An event too large loses, one after the
    other and no more than it must, the less probable of the target's top tokens, its reference to
    features, and its content, by all of which selection still learns; one that is too large even
    so is left out.

    Args:
        open_log: Opens the event log at the first send, in the thread and process that use it.
        source: Who sends, for the headers.
        max_value_bytes: Largest encoded event; brokers refuse above 1 MiB unless told otherwise.
        trace_headers: Headers that the events of a request get besides their own.

    Attributes:
        num_with_fewer_top_tokens: Events sent with fewer of the target's top tokens.
        num_without_features: Events sent without their features as well.
        num_without_content: Events sent without any content.
        num_unsendable: Events left out because of their size, or because they cannot be encoded.
    """

    def __init__(
        self,
        open_log: Callable[[], EventLog],
        *,
        source: str,
        max_value_bytes: int = 1_000_000,
        trace_headers: Callable[[str], Mapping[str, bytes]] = lambda _: {},
    ) -> None:
        self._open_log = open_log
        self._source = source
        self._max_value_bytes = max_value_bytes
        self._trace_headers = trace_headers
        self._log: EventLog | None = None
        self._counts: Counter[str] = Counter()
        self.num_unsendable = 0

    @property
    def num_with_fewer_top_tokens(self) -> int:
        """Events whose top tokens were cut, and that was enough."""
        return self._counts["top tokens"]

    @property
    def num_without_features(self) -> int:
        """Events that lost their features too, and that was enough."""
        return self._counts["features"]

    @property
    def num_without_content(self) -> int:
        """Events that lost all content."""
        return self._counts["content"]

    def __call__(self, events: Sequence[VerificationEvent]) -> None:
        """Append in order; returns once durable."""
        if self._log is None:
            self._log = self._open_log()
        # A registry that refuses our schema must not make every event one that cannot be sent.
        table = self._log.schemas
        messages = [message for event in events if (message := self._message(event, table))]
        if messages:
            self._log.append(VERIFICATION_EVENTS, messages)

    def _message(self, event: VerificationEvent, table: SchemaTable) -> Message | None:
        try:
            value = self._fitting(event, table)
        except Exception as error:
            # Whatever the encoder raises it would raise again, and hold up all that comes after.
            self.num_unsendable += 1
            logger.warning("event %s left out: %s", event.event_id, error)
            return None
        headers = cloud_event_headers(event, source=self._source)
        headers |= self._trace_headers(event.request_id)
        return Message(key=event.stream.encode(), value=value, headers=headers)

    def _fitting(self, event: VerificationEvent, table: SchemaTable) -> bytes:
        value = b""
        for what_is_lost, smaller in _smaller_and_smaller(event):
            value = encode(smaller, table=table)
            if len(value) <= self._max_value_bytes:
                self._counts[what_is_lost] += 1
                return value
        raise ContractError(
            "value",
            found=f"{len(value)} bytes even without content",
            expected=f"at most {self._max_value_bytes} bytes",
        )


def _smaller_and_smaller(event: VerificationEvent) -> Iterator[tuple[str, VerificationEvent]]:
    """Yield the event, then with less and less of its content, and what each one has lost."""
    yield "nothing", event
    content = event.content
    if content is None:
        return
    num_top_tokens = content.target_top_token_ids.shape[1]
    while num_top_tokens > 1:
        num_top_tokens //= 2
        content = _with_fewer_top_tokens(content, num_top_tokens)
        yield "top tokens", replace(event, content=content)
    if content.features is not None:
        yield "features", replace(event, content=replace(content, features=None))
    yield "content", replace(event, content=None)


def _with_fewer_top_tokens(content: Content, num_kept: int) -> Content:
    """Cut the least probable; their mass goes to the tail."""
    log_probabilities = content.target_top_log_probabilities
    cut = np.exp(log_probabilities[:, num_kept:].astype(np.float32)).sum(axis=1)
    tail = np.minimum(content.target_tail_mass.astype(np.float32) + cut, 1.0)
    return replace(
        content,
        target_top_token_ids=content.target_top_token_ids[:, :num_kept].copy(),
        target_top_log_probabilities=log_probabilities[:, :num_kept].copy(),
        target_tail_mass=tail.astype(np.float16),
    )
