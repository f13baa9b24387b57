"""Events of all requests of an engine process: who reports, what is in force, what is counted."""

from __future__ import annotations

import uuid
from dataclasses import replace

import torch

from inference.ports import Drafter
from inference.vllm_plugin.ports import Connection
from inference.vllm_plugin.row_recorder import EventFacts
from inference.vllm_plugin.rows import RequestRow
from schemas.events import NO_DRAFTER, DrafterVersion, FinishReason, VerificationEvent

POLICY = "expected_speed"
"""Names the rule in events: the most tokens per second expected, by certainty and by cost."""


class Reporting:
    """Cuts requests into events and hands them over.

    Args:
        connection: To the event log.
        num_levels: K.
        lookup_places: Places of the two lookups in the pool; -1 = not in it.
        head_places: Places of the heads.

    Attributes:
        facts: What all events have in common.
        versions: In force.
        num_events: Handed over.
    """

    def __init__(
        self,
        connection: Connection,
        num_levels: int,
        lookup_places: tuple[int, ...],
        head_places: tuple[int, ...],
    ) -> None:
        self._connection = connection
        options, target = connection.options, connection.target
        self.versions: list[DrafterVersion] = [one.version for one in options.pool]
        self.facts = EventFacts(
            num_drafters=len(self.versions),
            num_levels=num_levels,
            lookup_places=lookup_places,
            head_places=head_places,
            identity={
                "worker_id": options.worker_id,
                "worker_epoch": options.worker_epoch,
                "target_id": target.target_id,
                "target_fingerprint": target.fingerprint,
                "tokenizer_hash": target.tokenizer_hash,
                "policy_name": POLICY,
            },
        )
        self.num_events = 0
        self._num_requests = 0

    def request_id(self, request_id: str, *, is_continued: bool) -> str:
        """Return the id that a request's events carry; one that vLLM did not tell is made up.

        One that is met in the middle, after a failure, gets another id than before: its events
        begin anew.
        """
        self._num_requests += 1
        if not request_id:
            return f"{self._num_requests}-{uuid.uuid4().hex[:12]}"
        return f"{request_id[:180]}+{self._num_requests}" if is_continued else request_id

    def renew(self, drafter: Drafter) -> None:
        """Let another version of a drafter be in force; segments were cut before."""
        for place, version in enumerate(self.versions):
            if version.drafter_id == drafter.version.drafter_id:
                self.versions[place] = drafter.version

    def is_full(self, request: RequestRow) -> bool:
        """Tell whether a segment is long enough to be reported."""
        return request.recorder.num_positions >= self._connection.options.segment_tokens

    def cut(self, request: RequestRow) -> None:
        """Report what a request has done since its last event, if anything."""
        if request.recorder.num_positions:
            self._emit(request, FinishReason.UNFINISHED, None)

    def end(self, request: RequestRow, max_positions: int) -> None:
        """Report the end of a request."""
        reason, last = ending(request, self._connection.target.eos_token_ids, max_positions)
        self._emit(request, reason, last)
        self._connection.counters.count("requests")

    def has_ended(self, request: RequestRow, max_positions: int) -> bool:
        """Tell whether a request's tokens say that nothing follows them."""
        reason, _ = ending(request, self._connection.target.eos_token_ids, max_positions)
        return reason is not FinishReason.ABORTED

    def count_round(self, request: RequestRow, num_drafted: int, num_emitted: int) -> None:
        """Count a verification."""
        counters, place = self._connection.counters, request.draft.drafter_index
        name = self.versions[place].drafter_id if num_drafted else "none"
        counters.count("verifications", drafter=name)
        counters.count("emitted_tokens", num_emitted, drafter=name)
        if num_drafted and place != NO_DRAFTER:
            counters.count("draft_tokens", num_drafted, drafter=name)
            counters.count("accepted_tokens", min(num_emitted - 1, num_drafted), drafter=name)

    def _emit(self, request: RequestRow, reason: FinishReason, last: int | None) -> None:
        own = request.heads.place_to_version
        versions = [own.get(place, one) for place, one in enumerate(self.versions)]
        event, states = request.recorder.cut(
            [*versions, *request.heads.beside], reason, sequence=self.num_events, last=last
        )
        self.num_events += 1
        self._connection.sink.emit(self._with_features(event, states))

    def _with_features(
        self, event: VerificationEvent, states: torch.Tensor | None
    ) -> VerificationEvent:
        recorder = self._connection.recorder
        if recorder is None or states is None or event.content is None:
            return event
        features = recorder.record(states)
        return replace(event, content=replace(event.content, features=features))


def ending(
    request: RequestRow, eos_token_ids: frozenset[int], max_positions: int
) -> tuple[FinishReason, int]:
    """Return why a request ended, as far as its tokens tell, and how many tokens it had then.

    The last step may have emitted more than vLLM kept: what stands behind an end token, or beyond
    the most that was asked for, never reached the output.
    """
    lookup, facts = request.lookup, request.facts
    first, reported = request.recorder.num_prompt_tokens, request.recorder.first_position
    limit = max_positions
    if facts.max_tokens is not None:
        limit = min(limit, (facts.num_prompt_tokens or first) + facts.max_tokens)
    last = min(lookup.num_tokens, limit)
    ends = facts.stop_token_ids | (frozenset() if facts.ignores_end else eos_token_ids)
    for position, token in enumerate(lookup.tokens[reported:last].tolist(), start=reported):
        if token in ends:
            return FinishReason.STOP, position + 1
    reason = FinishReason.LENGTH if last == limit else FinishReason.ABORTED
    return reason, max(last, reported)
