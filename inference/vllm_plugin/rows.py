"""Which request stands in which row of the batch: by vLLM's id, or by the tokens it begins with.

vLLM moves requests between rows and gives a row to another request without a word. A row belongs
to a request if the request's id says so, where ids are handed over, and its verified tokens stand
at the beginning of the row. Without ids the tokens alone decide; two requests with the same tokens
so far may then change names, which changes nothing in what is drafted or reported for them.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from inference.vllm_plugin.head_batch import RowHeads
from inference.vllm_plugin.lookup import RequestLookup
from inference.vllm_plugin.ports import RequestFacts
from inference.vllm_plugin.row_recorder import RowRecorder
from schemas.checks import IDENTIFIER
from schemas.events import NO_DRAFTER

TAIL = 16
"""Tokens that name a request where no ids are handed over; the rest is compared after them."""


@dataclass(slots=True)
class RowDraft:
    """What was drafted for a row in the step before."""

    drafter_index: int = NO_DRAFTER
    token_ids: list[int] = field(default_factory=list)
    draft_seconds: float = 0.0
    score_probability: float = 1.0

    def keep_if_verified(
        self, id_to_token_ids: Mapping[str, Sequence[int]] | None, request_id: str
    ) -> None:
        """Drop the tokens if the engine verified others: it drafts by itself now and then.

        Fewer are ours still: a grammar, or the budget of a step, cuts them short.
        """
        if id_to_token_ids is not None and self.token_ids:
            verified = [one for one in id_to_token_ids.get(request_id, ()) if one >= 0]
            if verified != self.token_ids[: len(verified)]:
                self.token_ids, self.drafter_index = [], NO_DRAFTER


@dataclass(slots=True)
class RequestRow:
    """One request at work.

    Attributes:
        key: vLLM's id; empty if none was handed over.
        stream: Its stream.
        facts: What vLLM knows of it.
        lookup: Its tokens.
        recorder: Its events.
        heads: How its heads have done.
        draft: Of the step before.
        num_idle_steps: Steps in which it stood in no row, or read its prompt.
    """

    key: str
    stream: str
    facts: RequestFacts
    lookup: RequestLookup
    recorder: RowRecorder
    heads: RowHeads
    draft: RowDraft = field(default_factory=RowDraft)
    state: torch.Tensor | None = None
    num_idle_steps: int = 0

    def continues_in(self, row: NDArray[np.int32], num_before: int) -> bool:
        """Tell whether a row's first ``num_before`` tokens are this request's."""
        return self.lookup.num_tokens == num_before and self.begins(row, num_before)

    def begins(self, row: NDArray[np.int32], num_before: int) -> bool:
        """Tell whether a row of so many tokens begins with this request's."""
        size = self.lookup.num_tokens
        return size <= num_before and np.array_equal(self.lookup.tokens[:size], row[:size])


class RowBook:
    """The requests at work."""

    def __init__(self) -> None:
        self._key_to_request: dict[str, RequestRow] = {}
        self._last_rows: list[RequestRow | None] = []

    def __len__(self) -> int:
        return len(self._key_to_request)

    @property
    def requests(self) -> Iterable[RequestRow]:
        """All of them."""
        return list(self._key_to_request.values())

    def add(self, request: RequestRow) -> None:
        """Take a request in; one without an id gets one."""
        if not request.key:
            request.key = uuid.uuid4().hex
        self._key_to_request[request.key] = request

    def remove(self, request: RequestRow) -> None:
        """Let a request go."""
        if self._key_to_request.get(request.key) is request:
            del self._key_to_request[request.key]

    def by_id(self, request_id: str) -> RequestRow | None:
        """Return the request of an id."""
        return self._key_to_request.get(request_id)

    def by_tokens(
        self,
        rows: Sequence[int],
        token_ids: NDArray[np.int32],
        num_before: Sequence[int],
    ) -> dict[int, RequestRow]:
        """Return the requests whose tokens stand in ``rows``, by row.

        Args:
            rows: Rows that emitted something.
            token_ids: (rows of the batch, positions).
            num_before: Verified tokens of every row of the batch before this step.
        """
        found: dict[int, RequestRow] = {}
        taken: set[int] = set()
        for row in rows:
            before = self._last_rows[row] if row < len(self._last_rows) else None
            if before is not None and before.continues_in(token_ids[row], num_before[row]):
                found[row] = before
                taken.add(id(before))
        missing = [row for row in rows if row not in found]
        if missing:
            tail_to_requests: dict[tuple[int, bytes], list[RequestRow]] = {}
            for request in self._key_to_request.values():
                if id(request) not in taken:
                    size = request.lookup.num_tokens
                    tail = request.lookup.tokens[max(size - TAIL, 0) : size].tobytes()
                    tail_to_requests.setdefault((size, tail), []).append(request)
            for row in missing:
                size = num_before[row]
                tail = token_ids[row, max(size - TAIL, 0) : size].tobytes()
                for request in tail_to_requests.get((size, tail), ()):
                    if id(request) not in taken and request.continues_in(token_ids[row], size):
                        found[row] = request
                        taken.add(id(request))
                        break
        return found

    def note_rows(self, rows: Sequence[RequestRow | None]) -> None:
        """Remember where the requests stood, for the next step."""
        self._last_rows = list(rows)


def event_request_id(request_id: str) -> str:
    """Return vLLM's id if events can carry it, else one made from it."""
    if IDENTIFIER.fullmatch(request_id):
        return request_id
    return f"request-{uuid.uuid5(uuid.NAMESPACE_URL, request_id).hex}"
