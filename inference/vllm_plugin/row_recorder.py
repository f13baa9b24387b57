"""One request of a batch as verification events: its rounds, its windows, and its content."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inference.vllm_plugin.lookup import RequestLookup
from inference.vllm_plugin.lookup_kernels import NO_TOKEN, NUM_LOOKUPS
from inference.vllm_plugin.ports import RequestFacts
from schemas.events import (
    Content,
    DrafterVersion,
    FinishReason,
    Rounds,
    ScoredWindows,
    VerificationEvent,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRound:
    """One verification of one row, in the order of the columns of ``Rounds``."""

    first_position: int
    drafter_index: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    draft_seconds: float
    verify_seconds: float
    score_seconds: float
    batch_size: int
    score_probability: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EventFacts:
    """What all events of this process have in common.

    Attributes:
        lookup_places: Places of the two lookups in the pool; -1 = not in it.
        head_places: Places of the heads.
        identity: Fields of ``VerificationEvent`` that never change.
    """

    num_drafters: int
    num_levels: int
    lookup_places: tuple[int, ...]
    head_places: tuple[int, ...]
    identity: dict[str, Any]


@dataclass(slots=True)
class _Segment:
    first_position: int
    rounds: list[RowRound] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)


class RowRecorder:
    """Collects the rounds of one request and cuts them into events.

    Windows are scored at every position while no head is in force, and otherwise where the step's
    coin said so (``score_at``), which was tossed before the draft was known.

    Args:
        facts: Of this process.
        request_id, stream: Of the request, as events name them.
        request: What vLLM knows of it.
        lookup: Its tokens and what was proposed for them.
        has_content: Whether tokens may be reported.

    Attributes:
        is_dense: Whether windows are scored at every position; changed between segments alone.
    """

    def __init__(
        self,
        facts: EventFacts,
        *,
        request_id: str,
        stream: str,
        request: RequestFacts,
        lookup: RequestLookup,
        has_content: bool,
    ) -> None:
        self._facts = facts
        self._ids: dict[str, Any] = {
            "request_id": request_id,
            "stream": stream,
            "sampling": request.sampling,
        }
        self._is_scored = not request.is_constrained
        self._lookup = lookup
        self.has_content = has_content
        self.is_dense = True
        self.num_prompt_tokens = lookup.num_tokens
        self._segment = _Segment(self.num_prompt_tokens)
        self._segment_index = 0
        self._next_window = self.num_prompt_tokens + 1
        self._start_to_heads: dict[int, NDArray[np.int32]] = {}

    @property
    def request_id(self) -> str:
        """Of the request, as events name it."""
        return str(self._ids["request_id"])

    @property
    def num_positions(self) -> int:
        """Positions in the segment that is being collected."""
        return self._lookup.num_tokens - self._segment.first_position

    @property
    def first_position(self) -> int:
        """Of the segment that is being collected."""
        return self._segment.first_position

    def add_round(self, verified: RowRound, states: torch.Tensor | None) -> None:
        """Add a round, with the states (emitted, H) behind its tokens if they are recorded."""
        self._segment.rounds.append(verified)
        if states is not None and self.has_content:
            self._segment.states.append(states)

    def score_at(self, start: int, heads: NDArray[np.int32]) -> None:
        """Score the window at ``start``, for which the heads propose tokens (heads, K).

        Those in their own places come first, then those beside them.
        """
        self._start_to_heads[start] = heads

    def skip_incomplete(self) -> None:
        """Leave out windows that began under versions that are no longer in force."""
        self._next_window = max(self._next_window, self._lookup.num_tokens)
        self._start_to_heads.clear()

    def cut(
        self,
        drafters: Sequence[DrafterVersion],
        finish_reason: FinishReason,
        *,
        sequence: int,
        last: int | None = None,
    ) -> tuple[VerificationEvent, torch.Tensor | None]:
        """Close the segment and return its event with the states of its positions, if recorded.

        Args:
            drafters: Versions in force during the segment, N of the pool and those beside heads.
            finish_reason: ``UNFINISHED`` on every segment but the last.
            sequence: Of the event.
            last: Tokens of the request when it ended; tokens of the last round beyond it never
                reached the output.
        """
        segment, is_final = self._segment, finish_reason is not FinishReason.UNFINISHED
        end = self._lookup.num_tokens if last is None else last
        rounds = _cut_rounds(segment.rounds, end)
        num_beside = len(drafters) - self._facts.num_drafters
        windows, num_complete = self._windows(end, num_beside, is_final=is_final)
        event = VerificationEvent(
            event_id=uuid.uuid4().hex,
            produced_at=datetime.now(UTC),
            sequence=sequence,
            segment_index=self._segment_index,
            is_final=is_final,
            finish_reason=finish_reason,
            drafters=tuple(drafters),
            num_prompt_tokens=self.num_prompt_tokens,
            first_position=segment.first_position,
            num_positions=end - segment.first_position,
            rounds=_columns(rounds, num_complete),
            windows=windows,
            content=self._content(end) if self.has_content else None,
            policy_version=0,
            prior_probabilities=np.pad(
                np.full(self._facts.num_drafters, 1 / self._facts.num_drafters), (0, num_beside)
            ),
            num_speculative_tokens=self._facts.num_levels,
            **self._ids,
            **self._facts.identity,
        )
        states = torch.cat(segment.states)[: event.num_positions] if segment.states else None
        self._segment_index += 1
        self._segment = _Segment(end)
        return event, states if states is not None and len(states) == event.num_positions else None

    def _windows(self, end: int, num_beside: int, *, is_final: bool) -> tuple[ScoredWindows, int]:
        """Return the windows that are complete and were not reported yet, and how many."""
        levels = self._facts.num_levels
        stop = end - 1 if is_final else end - levels
        starts = self._starts(stop)
        num_levels = np.minimum(levels, np.maximum(end - 1 - starts, 1))
        agrees = self._agreement(starts, end, num_beside)
        agrees[np.arange(levels) >= num_levels[:, None]] = np.nan
        self._next_window = max(self._next_window, stop)
        windows = ScoredWindows(
            start=starts.astype(np.int32),
            num_levels=num_levels.astype(np.int16),
            acceptance_probability=agrees,
            realised_acceptance=agrees.copy(),
        )
        return windows, len(starts)

    def _starts(self, stop: int) -> NDArray[np.int64]:
        if not self._is_scored or not self._facts.num_levels:
            return np.empty(0, np.int64)
        if self.is_dense:
            return np.arange(self._next_window, max(stop, self._next_window))
        chosen = sorted(start for start in self._start_to_heads if start < stop)
        return np.array(chosen, dtype=np.int64)

    def _agreement(
        self, starts: NDArray[np.int64], end: int, num_beside: int
    ) -> NDArray[np.float16]:
        """Return whether each drafter's token was the one emitted, float16 (W, K, N)."""
        facts, tokens = self._facts, self._lookup.tokens
        num_drafters = facts.num_drafters + num_beside
        shape = (len(starts), facts.num_levels, num_drafters)
        # Who proposes nothing is never accepted; only heads in force may not have been asked.
        agrees = np.zeros(shape, dtype=np.float16)
        positions = np.minimum(starts[:, None] + np.arange(facts.num_levels), end - 1)
        emitted = tokens[positions]
        proposed = self._lookup.proposals(starts)
        for lookup in range(NUM_LOOKUPS):
            place = facts.lookup_places[lookup]
            if place >= 0:
                agrees[..., place] = proposed[:, lookup] == emitted
        if len(starts) and not self.is_dense:
            heads = np.stack([self._start_to_heads.pop(start) for start in starts.tolist()])
            places = (*facts.head_places, *range(facts.num_drafters, num_drafters))
            for index, place in enumerate(places):
                was_asked = heads[:, index, :1] != NO_TOKEN
                found = (heads[:, index] == emitted).astype(np.float16)
                agrees[..., place] = np.where(was_asked, found, np.float16(np.nan))
        return agrees

    def _content(self, end: int) -> Content:
        tokens, first = self._lookup.tokens, self._segment.first_position
        prompt = tokens[: self.num_prompt_tokens] if self._segment_index == 0 else tokens[:0]
        size = end - first
        return Content(
            prompt_token_ids=prompt.astype(np.int32),
            token_ids=tokens[first:end].astype(np.int32),
            target_top_token_ids=np.empty((size, 0), np.int32),
            target_top_log_probabilities=np.empty((size, 0), np.float16),
            target_tail_mass=np.ones(size, np.float16),
        )


def _cut_rounds(rounds: Sequence[RowRound], end: int) -> list[tuple[RowRound, int, int]]:
    """Return the rounds with the tokens they emitted and accepted before ``end``."""
    kept = []
    for one in rounds:
        emitted = max(min(one.num_emitted_tokens, end - one.first_position), 0)
        kept.append((one, emitted, min(one.num_accepted_tokens, emitted)))
    return kept


def _columns(rounds: Sequence[tuple[RowRound, int, int]], num_complete: int) -> Rounds:
    """Return the rounds as columns; the windows are learned with the last of them."""

    def column(read: Callable[[RowRound], float], dtype: Any) -> NDArray[Any]:
        return np.array([read(one) for one, _, _ in rounds], dtype=dtype)

    size = len(rounds)
    emitted = np.array([count for _, count, _ in rounds], dtype=np.int64)
    first = rounds[0][0].first_position if rounds else 0
    scored = np.zeros(size, dtype=np.int16)
    if size:
        scored[-1] = num_complete
    return Rounds(
        first_position=(first + np.cumsum(emitted) - emitted).astype(np.int32),
        drafter_index=column(lambda one: one.drafter_index, np.int16),
        num_draft_tokens=column(lambda one: one.num_draft_tokens, np.int16),
        num_accepted_tokens=np.array([count for _, _, count in rounds], dtype=np.int16),
        num_emitted_tokens=emitted.astype(np.int16),
        num_scored_windows=scored,
        selection_probability=np.ones(size, dtype=np.float32),
        draft_seconds=column(lambda one: one.draft_seconds, np.float32),
        verify_seconds=column(lambda one: one.verify_seconds, np.float32),
        score_seconds=column(lambda one: one.score_seconds, np.float32),
        batch_size=column(lambda one: one.batch_size, np.int16),
        score_probability=column(lambda one: one.score_probability, np.float32),
    )
