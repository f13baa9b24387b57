"""A worker that serves recorded requests again: same pool, same scoring, no target.

What a drafter would have proposed at every position of a recorded answer is asked of the drafter
itself (``inference.scoring``), and acceptance against the recorded tokens is exact: verification
is greedy. The rounds are then walked as the engine plays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
import torch
from numpy.typing import NDArray

from inference.drafters.frozen_rows import FrozenRows
from inference.pool import DrafterPool
from inference.ports import Predictions, WindowBatch
from inference.sampling import SamplingParams
from inference.scoring import ScoredBatch, scored_batch
from inference.trajectory import Trajectory
from learner.trial import is_shadow
from learner.walk import WindowTrace
from pipeline.bench.learning.traces import RequestTrace
from schemas.events import (
    AcceptanceRule,
    Content,
    DrafterVersion,
    FeatureReference,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)

NUM_SPECULATIVE_TOKENS = 4
_DRAFT_SECONDS, _VERIFY_SECONDS = 0.004, 0.03
"""What events say of every round: all versions of a head cost the same."""

_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_GREEDY = SamplingRule(acceptance_rule=AcceptanceRule.GREEDY, temperature=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetFacts:
    """Whose answers are replayed."""

    target_id: str
    fingerprint: str
    tokenizer_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """One request, every drafter scored on all of its windows.

    Attributes:
        versions: The drafters, those in their own places first, (N,).
        batch: All windows of the request.
        accepted: Tokens each drafter would have had accepted from each output position on but the
            first, int64 (P - 1, N).
    """

    versions: tuple[DrafterVersion, ...]
    batch: ScoredBatch
    accepted: NDArray[np.int64]

    @property
    def num_own(self) -> int:
        """Drafters in their own places."""
        return sum(not is_shadow(one.drafter_id) for one in self.versions)


@torch.inference_mode()
def scores(pool: DrafterPool, request_id: str, trace: RequestTrace, rows: FrozenRows) -> Scores:
    """Score the pool, as this request sees it, on a recorded answer."""
    dtype, tokens = rows.head.dtype, trace.token_ids
    trajectory = Trajectory(
        trace.prompt_token_ids.tolist(),
        SamplingParams(max_tokens=len(tokens)),
        max_output_tokens=len(tokens),
        hidden_size=rows.head.shape[1],
        dtype=dtype,
        device=rows.head.device,
    )
    trajectory.extend(tokens.tolist(), torch.from_numpy(trace.hidden).to(dtype), None)
    session = pool.of_request(request_id).start(
        trajectory, stream="bench", vocab_size=len(rows.embeddings), draws_drafts=False
    )
    first, last = trajectory.num_prompt_tokens + 1, len(trajectory) - 1
    starts = np.arange(first, max(last, first), dtype=np.int64)
    windows = WindowBatch(
        starts=starts,
        num_levels=np.minimum(last - starts, NUM_SPECULATIVE_TOKENS),
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
    )
    predictions: list[Predictions | None] = [None] * session.num_drafters
    if len(starts):
        predictions = session.predict(windows)
    batch = scored_batch(trajectory, windows, predictions)
    reached = np.cumprod(batch.realised_acceptance == 1.0, axis=1).sum(axis=1)
    # From the last position nothing is drafted: only the bonus token is missing.
    accepted = np.zeros((max(len(tokens) - 1, 0), len(predictions)), dtype=np.int64)
    accepted[: len(starts)] = reached
    return Scores(versions=session.versions, batch=batch, accepted=accepted)


def round_lengths(accepted: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return what every round emits when one drafter drafts them all, (R,).

    Args:
        accepted: Tokens it would have had accepted from each position on, (P - 1,).
    """
    lengths, position = [], 0
    while position < len(accepted):
        lengths.append(int(accepted[position]) + 1)
        position += lengths[-1]
    return np.array(lengths, dtype=np.int64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The rounds of one request, its first token left out, which no drafter can propose.

    Attributes:
        drafters: Drafter of every round, (R,).
        lengths: Tokens every round emitted, (R,).
    """

    drafters: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def by_one(cls, accepted: NDArray[np.int64], drafter: int = 0) -> Served:
        """Let one drafter draft all rounds."""
        lengths = round_lengths(accepted)
        return cls(drafters=np.full(len(lengths), drafter), lengths=lengths)

    @property
    def num_rounds(self) -> int:
        """Verifications."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens they emitted."""
        return int(self.lengths.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Sender:
    """Who sends an event."""

    worker_id: str
    sequence: int


def verification_event(
    request_id: str,
    trace: RequestTrace,
    found: Scores,
    served: Served,
    sender: Sender,
    facts: TargetFacts,
    *,
    labels: RequestTrace | None = None,
) -> VerificationEvent:
    """Return the event that a worker with consent sends of a request, all in one segment.

    Args:
        request_id: Its id; features are recorded under it.
        trace: The request.
        found: Its scores.
        served: Its rounds.
        sender: Who sends it.
        facts: Of the target.
        labels: What the content claims that the target wrote; None = what it wrote.
    """
    num_prompt, told = len(trace.prompt_token_ids), labels or trace
    num_drafters = len(found.versions)
    return VerificationEvent(
        event_id=f"{sender.worker_id}-{sender.sequence}",
        worker_id=sender.worker_id,
        worker_epoch=0,
        sequence=sender.sequence,
        produced_at=_EPOCH,
        stream="bench",
        request_id=request_id,
        segment_index=0,
        is_final=True,
        finish_reason=FinishReason.LENGTH,
        target_id=facts.target_id,
        target_fingerprint=facts.fingerprint,
        tokenizer_hash=facts.tokenizer_hash,
        policy_name="fixed:0",
        policy_version=0,
        prior_probabilities=np.full(num_drafters, 1.0 / num_drafters),
        drafters=found.versions,
        sampling=_GREEDY,
        num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
        num_prompt_tokens=num_prompt,
        first_position=num_prompt,
        num_positions=len(trace.token_ids),
        rounds=_rounds(num_prompt, served),
        windows=ScoredWindows(
            start=found.batch.starts,
            num_levels=found.batch.num_levels,
            acceptance_probability=found.batch.acceptance_probability,
            realised_acceptance=found.batch.realised_acceptance,
        ),
        content=Content(
            prompt_token_ids=trace.prompt_token_ids.astype(np.int32),
            token_ids=told.token_ids.astype(np.int32),
            target_top_token_ids=told.top_token_ids.astype(np.int32),
            target_top_log_probabilities=np.minimum(told.top_log_probs, np.float16(0.0)),
            target_tail_mass=told.tail_mass,
            features=FeatureReference(
                uri=request_id, first_row=0, num_rows=len(trace.token_ids), sha256="0" * 64
            ),
        ),
    )


def _rounds(num_prompt: int, served: Served) -> Rounds:
    """Put the prompt's own round before those that were drafted."""
    emitted = np.concatenate([[1], served.lengths])
    drafters = np.concatenate([[-1], served.drafters])
    accepted = emitted - 1
    num_rounds = len(emitted)
    return Rounds(
        first_position=(num_prompt + np.cumsum(emitted) - emitted).astype(np.int32),
        drafter_index=drafters.astype(np.int16),
        num_draft_tokens=np.where(drafters < 0, 0, np.maximum(accepted, 1)).astype(np.int16),
        num_accepted_tokens=accepted.astype(np.int16),
        num_emitted_tokens=emitted.astype(np.int16),
        num_scored_windows=np.zeros(num_rounds, np.int16),
        selection_probability=np.ones(num_rounds, np.float32),
        draft_seconds=np.where(drafters < 0, 0.0, _DRAFT_SECONDS).astype(np.float32),
        verify_seconds=np.full(num_rounds, _VERIFY_SECONDS, np.float32),
        score_seconds=np.zeros(num_rounds, np.float32),
    )


def shuffled(trace: RequestTrace, rng: np.random.Generator) -> RequestTrace:
    """Return what a poisoned event claims: the tokens of the answer in another order."""
    order = rng.permutation(len(trace.token_ids))
    return RequestTrace(
        prompt_token_ids=trace.prompt_token_ids,
        token_ids=trace.token_ids[order],
        hidden=trace.hidden,
        top_token_ids=trace.top_token_ids[order],
        top_log_probs=trace.top_log_probs[order],
        tail_mass=trace.tail_mass[order],
    )


class ReplayedFeatures:
    """The recorded states of requests (``learner.ports.FeatureStore``), float32 when read.

    Args:
        id_to_trace: Requests by id; grows as they are served.
    """

    def __init__(self) -> None:
        self.id_to_trace: dict[str, RequestTrace] = {}

    def read(self, reference: FeatureReference) -> NDArray[np.float32]:
        """Return the states of a request, (P, H).

        Raises:
            LookupError: If it was never served.
        """
        return self.id_to_trace[reference.uri].hidden.astype(np.float32)


def acceptances(
    pool: DrafterPool, traces: Sequence[RequestTrace], rows: FrozenRows
) -> list[Served]:
    """Serve requests with the first drafter of a pool alone."""
    found = [scores(pool, f"request-{i}", trace, rows) for i, trace in enumerate(traces)]
    return [Served.by_one(one.accepted[:, 0]) for one in found]


def window_trace(found: Scores, num_prompt: int) -> WindowTrace:
    """Return a request as selection walks it, over the drafters in their own places.

    Args:
        found: Its scores.
        num_prompt: Tokens of its prompt.
    """
    size, own = len(found.accepted), found.num_own
    is_idle = np.zeros(size, dtype=np.bool_)
    is_idle[-1:] = True  # from the last position nobody drafts, and a round is due
    return WindowTrace(
        num_positions=size,
        starts=found.batch.starts.astype(np.int64) - num_prompt - 1,
        num_levels=found.batch.num_levels,
        is_whole=found.batch.num_levels == NUM_SPECULATIVE_TOKENS,
        acceptance_probability=found.batch.acceptance_probability[:, :, :own],
        realised_acceptance=found.batch.realised_acceptance[:, :, :own],
        is_idle=is_idle,
    )
