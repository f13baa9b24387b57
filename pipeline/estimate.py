"""What a fleet would write: events, log, Parquet, features, before anybody turns capture on.

Nothing is guessed from formulas: events of the described shape are made, encoded and written to
a Parquet file in memory, and their bytes are counted. Acceptances are drawn, so how well the file
compresses is that of drawn ones.
"""

from __future__ import annotations

import io
import math
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from pipeline.settings import Settings
from schemas.arrow import LoggedEvent, events_to_table, write_table
from schemas.codec import encode
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
from schemas.topics import VERIFICATION_EVENTS

SECONDS_PER_DAY = 86_400
EVENTS_PER_PARTITION = 100.0
"""Events per second that one learner is asked to follow, well below what it can."""

NUM_KEPT_TOKENS = 8
SAMPLE_REQUESTS = 40
_HASH = "0" * 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The traffic.

    Attributes:
        requests_per_second: Of all workers together.
        prompt_tokens, output_tokens: Per request.
        acceptance_length: Tokens per verification, bonus included, >= 1.
        content_share: Share of requests whose content is recorded, [0, 1].
        hidden_size: H of the target, for recorded features; 0 = none are recorded.
        is_sampled: Whether targets sample: acceptances are then probabilities, which compress less.
    """

    requests_per_second: float
    prompt_tokens: int = 500
    output_tokens: int = 300
    acceptance_length: float = 2.0
    content_share: float = 0.0
    hidden_size: int = 0
    is_sampled: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What it takes; bytes are of one copy, uncompressed in the log."""

    events_per_second: float
    bytes_per_event: float
    log_bytes_per_day: float
    log_bytes_kept: float
    parquet_bytes_per_day: float
    feature_bytes_per_day: float
    num_partitions: int


def estimate(settings: Settings, fleet: Fleet) -> Estimate:
    """Return what the fleet takes with these settings."""
    events_by_kind = {
        has_content: _sample(settings, fleet, has_content) for has_content in (False, True)
    }
    events_per_request = len(events_by_kind[False]) / SAMPLE_REQUESTS
    share = {True: fleet.content_share, False: 1.0 - fleet.content_share}

    def mean_bytes(size: Callable[[list[VerificationEvent]], float]) -> float:
        return sum(share[kind] * size(one) for kind, one in events_by_kind.items() if share[kind])

    encoded = mean_bytes(lambda events: sum(len(encode(one)) for one in events) / len(events))
    stored = mean_bytes(lambda events: parquet_bytes(events) / len(events))
    per_second = fleet.requests_per_second * events_per_request
    per_day = per_second * SECONDS_PER_DAY
    rows_per_day = fleet.requests_per_second * SECONDS_PER_DAY * fleet.output_tokens
    return Estimate(
        events_per_second=per_second,
        bytes_per_event=encoded,
        log_bytes_per_day=per_day * encoded,
        log_bytes_kept=per_day * encoded * settings.event_log.retention_days,
        parquet_bytes_per_day=per_day * stored,
        feature_bytes_per_day=rows_per_day * fleet.content_share * fleet.hidden_size * 2,
        num_partitions=max(math.ceil(per_second / EVENTS_PER_PARTITION), 1),
    )


def parquet_bytes(events: list[VerificationEvent]) -> int:
    """Return the size of a Parquet file of these events."""
    rows = [
        LoggedEvent(
            topic=VERIFICATION_EVENTS,
            partition=0,
            offset=offset,
            appended_at=event.produced_at,
            event=event,
        )
        for offset, event in enumerate(events)
    ]
    file = io.BytesIO()
    write_table(events_to_table(rows), file)
    return len(file.getvalue())


def _sample(settings: Settings, fleet: Fleet, has_content: bool) -> list[VerificationEvent]:
    """Return the events of some requests of the described shape."""
    rng = np.random.default_rng(0)
    events: list[VerificationEvent] = []
    for number in range(SAMPLE_REQUESTS):
        position, segment_index = 0, 0
        while position < fleet.output_tokens:
            emitted = _emitted(rng, settings, fleet, fleet.output_tokens - position)
            events.append(
                _event(
                    rng,
                    settings,
                    fleet,
                    emitted,
                    position=position,
                    sequence=len(events),
                    request=number,
                    segment_index=segment_index,
                    has_content=has_content,
                )
            )
            position += int(emitted.sum())
            segment_index += 1
    return events


def _emitted(
    rng: np.random.Generator, settings: Settings, fleet: Fleet, num_left: int
) -> NDArray[np.int16]:
    """Draw the tokens of the rounds of one segment, which ends once it is long enough."""
    wanted = min(settings.worker.segment_tokens, num_left)
    most = settings.worker.num_speculative_tokens
    share = min(max(fleet.acceptance_length - 1.0, 0.0) / max(most, 1), 1.0)
    counts: list[int] = []
    while sum(counts) < wanted:
        counts.append(min(1 + int(rng.binomial(most, share)), num_left - sum(counts)))
    return np.array(counts, np.int16)


def _event(
    rng: np.random.Generator,
    settings: Settings,
    fleet: Fleet,
    emitted: NDArray[np.int16],
    *,
    position: int,
    sequence: int,
    request: int,
    segment_index: int,
    has_content: bool,
) -> VerificationEvent:
    first = fleet.prompt_tokens + position
    num_positions = int(emitted.sum())
    ids = [one.drafter_id for one in settings.drafters]
    is_final = position + num_positions >= fleet.output_tokens
    return VerificationEvent(
        event_id=uuid.UUID(int=int(rng.integers(2**62))).hex,
        produced_at=datetime.now(UTC),
        worker_id=settings.worker.worker_id,
        worker_epoch=1,
        sequence=sequence,
        stream="default",
        request_id=f"cmpl-{request:032x}",
        segment_index=segment_index,
        is_final=is_final,
        finish_reason=FinishReason.LENGTH if is_final else FinishReason.UNFINISHED,
        target_id="target-of-a-name",
        target_fingerprint=_HASH,
        tokenizer_hash=_HASH,
        policy_name=settings.worker.policy,
        policy_version=1,
        prior_probabilities=np.full(len(ids), 1.0 / len(ids)),
        policy_table=rng.random(15 * len(ids)) if segment_index == 0 else np.empty(0),
        policy_numbers=rng.random(39) if segment_index == 0 else np.empty(0),
        drafters=tuple(
            DrafterVersion(drafter_id=one, weights_version=1, draft_vocabulary_hash="")
            for one in ids
        ),
        sampling=SamplingRule(acceptance_rule=AcceptanceRule.ONE_HOT, temperature=1.0),
        num_speculative_tokens=settings.worker.num_speculative_tokens,
        num_prompt_tokens=fleet.prompt_tokens,
        first_position=first,
        num_positions=num_positions,
        num_awake_rounds=np.full(len(ids), len(emitted), np.int32),
        rounds=_rounds(rng, emitted, first, settings.worker.num_speculative_tokens, len(ids)),
        windows=_windows(rng, first, first + num_positions, settings, fleet, is_final=is_final),
        content=_content(rng, fleet, num_positions, segment_index) if has_content else None,
    )


def _rounds(
    rng: np.random.Generator, emitted: NDArray[np.int16], first: int, most: int, num_drafters: int
) -> Rounds:
    count = len(emitted)
    seconds = rng.random((3, count)).astype(np.float32)
    starts = first + np.concatenate([[0], np.cumsum(emitted)[:-1]])
    return Rounds(
        first_position=starts.astype(np.int32),
        drafter_index=rng.integers(0, num_drafters, count).astype(np.int16),
        num_draft_tokens=np.maximum(np.full(count, most), emitted - 1).astype(np.int16),
        num_accepted_tokens=(emitted - 1).astype(np.int16),
        num_emitted_tokens=emitted,
        num_scored_windows=np.zeros(count, np.int16),
        selection_probability=rng.random(count).astype(np.float32) * 0.9 + 0.05,
        draft_seconds=seconds[0],
        verify_seconds=seconds[1],
        score_seconds=seconds[2],
    )


def _windows(
    rng: np.random.Generator,
    first: int,
    end: int,
    settings: Settings,
    fleet: Fleet,
    *,
    is_final: bool,
) -> ScoredWindows:
    """Return the windows that the positions first..end - 1 complete."""
    most = settings.worker.num_speculative_tokens
    start = np.arange(max(first - most, fleet.prompt_tokens), end if is_final else end - most)
    shape = (len(start), most, len(settings.drafters))
    rate = min(max(fleet.acceptance_length - 1.0, 0.0) / max(most, 1), 1.0)
    num_levels = np.minimum(end - start, most)
    realised = (rng.random(shape) < rate).astype(np.float16)
    probability = realised
    if fleet.is_sampled:
        probability = (rng.random(shape) ** (1.0 / max(rate, 0.05) - 1.0)).astype(np.float16)
    never_drafts = [one.kind == "none" for one in settings.drafters]
    realised[..., never_drafts] = probability[..., never_drafts] = 0.0
    is_beyond = np.arange(most) >= num_levels[:, None]
    for values in (realised, probability):
        values[is_beyond] = np.nan
    return ScoredWindows(
        start=start.astype(np.int32),
        num_levels=num_levels.astype(np.int16),
        acceptance_probability=probability,
        realised_acceptance=realised,
    )


def _content(rng: np.random.Generator, fleet: Fleet, count: int, segment_index: int) -> Content:
    def tokens(*shape: int) -> NDArray[np.int32]:
        return rng.zipf(1.3, shape).clip(0, 49_000).astype(np.int32)

    features = FeatureReference(
        uri="features/2026-01-01/worker-0/1-1.safetensors",
        first_row=0,
        num_rows=count,
        sha256=_HASH,
    )
    return Content(
        prompt_token_ids=tokens(fleet.prompt_tokens if segment_index == 0 else 0),
        token_ids=tokens(count),
        target_top_token_ids=tokens(count, NUM_KEPT_TOKENS),
        target_top_log_probabilities=-rng.random((count, NUM_KEPT_TOKENS)).astype(np.float16),
        target_tail_mass=rng.random(count).astype(np.float16),
        features=features if fleet.hidden_size else None,
    )
