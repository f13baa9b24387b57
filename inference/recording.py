"""Recording: the rounds and windows of one request become verification events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from inference.sampling import top_tokens
from inference.scoring import ScoredBatch
from inference.trajectory import Trajectory
from schemas.events import (
    Content,
    DrafterVersion,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One verification, as ``schemas.events.Rounds`` has it."""

    first_position: int
    drafter_index: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_emitted_tokens: int
    num_scored_windows: int
    selection_probability: float
    draft_seconds: float
    verify_seconds: float
    score_seconds: float
    batch_size: int = 1
    score_probability: float = 1.0

    @property
    def seconds(self) -> float:
        """Time of the whole round."""
        return self.draft_seconds + self.verify_seconds + self.score_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFacts:
    """What stays the same in all events of one request.

    ``policy_table`` and ``policy_numbers`` are the state that the policy started from, packed, or
    empty. ``num_kept_tokens`` is C, how many tokens of the target's distribution are recorded;
    content (tokens, distributions) is recorded only if ``has_content``.
    """

    worker_id: str
    worker_epoch: int
    stream: str
    request_id: str
    target_id: str
    target_fingerprint: str
    tokenizer_hash: str
    policy_name: str
    policy_version: int
    prior_probabilities: NDArray[np.float64]
    policy_table: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    policy_numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    sampling: SamplingRule
    num_speculative_tokens: int
    has_content: bool
    num_kept_tokens: int


@dataclass(slots=True)
class _Segment:
    first_position: int
    rounds: list[Round] = field(default_factory=list)
    awake: list[NDArray[np.bool_]] = field(default_factory=list)
    scored: list[ScoredBatch] = field(default_factory=list)
    top_ids: list[torch.Tensor] = field(default_factory=list)
    top_logits: list[torch.Tensor] = field(default_factory=list)
    log_totals: list[torch.Tensor] = field(default_factory=list)


class SegmentRecorder:
    """Collects one request and cuts it into events.

    Args:
        facts: Of the request.
        trajectory: Of the request.
        on_logits: Told every round's logits at the emitted positions, (emitted, V).

    Attributes:
        seconds: Time spent recording, which the serving thread pays.
    """

    def __init__(
        self,
        facts: RequestFacts,
        trajectory: Trajectory,
        *,
        on_logits: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        self._facts = facts
        self._trajectory = trajectory
        self._on_logits = on_logits
        self.seconds = 0.0
        self._segment_index = 0
        self._segment = _Segment(first_position=trajectory.num_prompt_tokens)

    @property
    def num_positions(self) -> int:
        """Positions in the segment that is being collected."""
        return len(self._trajectory) - self._segment.first_position

    def note_awake(self, is_awake: NDArray[np.bool_]) -> None:
        """Note which drafters could be selected for the round that begins, (N,)."""
        self._segment.awake.append(is_awake.copy())

    def add_round(self, verified: Round, logits: torch.Tensor, scored: ScoredBatch | None) -> None:
        """Add a round with the target's logits at its emitted positions, (emitted, V)."""
        began = time.perf_counter()
        self._segment.rounds.append(verified)
        if scored is not None:
            self._segment.scored.append(scored)
        if self._on_logits is not None:
            self._on_logits(logits)
        if self._facts.has_content:
            self._keep_top(logits)
        self.seconds += time.perf_counter() - began

    def cut(
        self,
        drafters: Sequence[DrafterVersion],
        finish_reason: FinishReason,
        *,
        sequence: int,
    ) -> tuple[VerificationEvent, torch.Tensor | None]:
        """Close the segment and return its event with the hidden states of its positions.

        The states, (P, H), are None without content.
        """
        began = time.perf_counter()
        segment, facts = self._segment, self._facts
        last = len(self._trajectory)
        is_first = self._segment_index == 0
        event = VerificationEvent(
            event_id=uuid.uuid4().hex,
            produced_at=datetime.now(UTC),
            sequence=sequence,
            segment_index=self._segment_index,
            is_final=finish_reason is not FinishReason.UNFINISHED,
            finish_reason=finish_reason,
            drafters=tuple(drafters),
            num_prompt_tokens=self._trajectory.num_prompt_tokens,
            first_position=segment.first_position,
            num_positions=last - segment.first_position,
            num_awake_rounds=_awake_rounds(segment, len(drafters)),
            rounds=_rounds(segment.rounds),
            windows=self._windows(len(drafters)),
            content=self._content() if facts.has_content else None,
            worker_id=facts.worker_id,
            worker_epoch=facts.worker_epoch,
            stream=facts.stream,
            request_id=facts.request_id,
            target_id=facts.target_id,
            target_fingerprint=facts.target_fingerprint,
            tokenizer_hash=facts.tokenizer_hash,
            policy_name=facts.policy_name,
            policy_version=facts.policy_version,
            prior_probabilities=facts.prior_probabilities,
            policy_table=facts.policy_table if is_first else np.empty(0),
            policy_numbers=facts.policy_numbers if is_first else np.empty(0),
            sampling=facts.sampling,
            num_speculative_tokens=facts.num_speculative_tokens,
        )
        hidden = None
        if facts.has_content:
            hidden = self._trajectory.hidden(segment.first_position, last).clone()
        self._segment_index += 1
        self._segment = _Segment(first_position=last)
        self.seconds += time.perf_counter() - began
        return event, hidden

    def _keep_top(self, logits: torch.Tensor) -> None:
        """Keep what a round must not wait for; the rest is computed once per segment."""
        wide = logits.float()
        largest, token_ids = top_tokens(wide, self._facts.num_kept_tokens)
        self._segment.top_ids.append(token_ids.cpu())
        self._segment.top_logits.append(largest.cpu())
        self._segment.log_totals.append(wide.logsumexp(-1, keepdim=True).cpu())

    def _windows(self, num_drafters: int) -> ScoredWindows:
        shape = (0, self._facts.num_speculative_tokens, num_drafters)
        empty = ScoredBatch(
            starts=np.empty(0, np.int32),
            num_levels=np.empty(0, np.int16),
            acceptance_probability=np.empty(shape, np.float16),
            realised_acceptance=np.empty(shape, np.float16),
        )
        batches = self._segment.scored or [empty]
        return ScoredWindows(
            start=np.concatenate([batch.starts for batch in batches]),
            num_levels=np.concatenate([batch.num_levels for batch in batches]),
            acceptance_probability=np.concatenate([b.acceptance_probability for b in batches]),
            realised_acceptance=np.concatenate([b.realised_acceptance for b in batches]),
        )

    def _content(self) -> Content:
        tokens, segment = self._trajectory.token_ids, self._segment
        prompt = tokens[: self._trajectory.num_prompt_tokens] if self._segment_index == 0 else []
        none = torch.empty((0, self._facts.num_kept_tokens))
        log_probs = torch.cat([none, *segment.top_logits]) - torch.cat(
            [none[:, :1], *segment.log_totals]
        )
        tail = (1.0 - log_probs.exp().sum(-1)).clamp(0.0, 1.0)
        top_ids = torch.cat([none.long(), *segment.top_ids])
        return Content(
            prompt_token_ids=np.array(prompt, dtype=np.int32),
            token_ids=np.array(tokens[segment.first_position :], dtype=np.int32),
            target_top_token_ids=top_ids.numpy().astype(np.int32),
            target_top_log_probabilities=log_probs.numpy().astype(np.float16),
            target_tail_mass=tail.numpy().astype(np.float16),
        )


def _awake_rounds(segment: _Segment, num_drafters: int) -> NDArray[np.int32]:
    """Count the rounds in which each drafter was awake; empty if that was not noted.

    The target may fail in a round that was noted: it is no round then.
    """
    if len(segment.awake) < len(segment.rounds):
        return np.empty(0, np.int32)
    awake = np.array(segment.awake[: len(segment.rounds)], dtype=np.int32)
    return np.asarray(awake.reshape(-1, num_drafters).sum(axis=0, dtype=np.int32))


def _rounds(rounds: Sequence[Round]) -> Rounds:
    def column(name: str, dtype: Any) -> NDArray[Any]:
        return np.array([getattr(verified, name) for verified in rounds], dtype=dtype)

    return Rounds(
        first_position=column("first_position", np.int32),
        drafter_index=column("drafter_index", np.int16),
        num_draft_tokens=column("num_draft_tokens", np.int16),
        num_accepted_tokens=column("num_accepted_tokens", np.int16),
        num_emitted_tokens=column("num_emitted_tokens", np.int16),
        num_scored_windows=column("num_scored_windows", np.int16),
        selection_probability=column("selection_probability", np.float32),
        draft_seconds=column("draft_seconds", np.float32),
        verify_seconds=column("verify_seconds", np.float32),
        score_seconds=column("score_seconds", np.float32),
        batch_size=column("batch_size", np.int16),
        score_probability=column("score_probability", np.float32),
    )
