"""Valid messages with explicit knobs, for the tests of every room.

What a test does not name is drawn from ``seed``, so two events differ wherever that is allowed.
For anything more special, build an event and change it with ``dataclasses.replace``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from schemas.arrow import LoggedEvent
from schemas.events import (
    NO_DRAFTER,
    AcceptanceRule,
    Content,
    CostModel,
    DrafterReleased,
    DrafterVersion,
    FeatureReference,
    FinishReason,
    GateEvidence,
    PolicyPublished,
    ReleaseState,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
    Watermark,
)
from schemas.topics import VERIFICATION_EVENTS

PRODUCED_AT = datetime(2026, 3, 29, 1, 30, 0, 123457, tzinfo=UTC)


def make_drafters(num_drafters: int, *, weights_version: int = 1) -> tuple[DrafterVersion, ...]:
    """Return ``drafter-0``, ``drafter-1``, ... with one weights version."""
    return tuple(
        DrafterVersion(
            drafter_id=f"drafter-{index}",
            weights_version=weights_version,
            draft_vocabulary_hash="" if index % 2 == 0 else f"vocabulary-{index}",
        )
        for index in range(num_drafters)
    )


def make_rounds(
    generator: np.random.Generator,
    *,
    num_positions: int,
    num_drafters: int,
    num_speculative_tokens: int,
    first_position: int = 0,
) -> Rounds:
    """Draw rounds that emit at least ``num_positions`` tokens, each accepted + 1."""
    draft_limit = num_speculative_tokens if num_drafters else 0
    drafted = generator.integers(0, draft_limit + 1, num_positions)
    accepted = generator.integers(0, drafted + 1)
    count = int(np.searchsorted(np.cumsum(accepted + 1), num_positions) + 1) if num_positions else 0
    drafted, accepted = drafted[:count], accepted[:count]
    lowest = 0 if num_drafters else NO_DRAFTER
    index = generator.integers(lowest, max(num_drafters, 1) + lowest, count)
    seconds = generator.uniform(0.001, 0.05, (3, count)).astype(np.float32)
    return Rounds(
        first_position=(first_position + np.cumsum(accepted + 1) - accepted - 1).astype(np.int32),
        drafter_index=np.where(drafted == 0, NO_DRAFTER, index).astype(np.int16),
        num_draft_tokens=drafted.astype(np.int16),
        num_accepted_tokens=accepted.astype(np.int16),
        num_emitted_tokens=(accepted + 1).astype(np.int16),
        num_scored_windows=np.zeros(count, np.int16),
        selection_probability=generator.uniform(0.1, 1.0, count).astype(np.float32),
        draft_seconds=seconds[0],
        verify_seconds=seconds[1],
        score_seconds=seconds[2],
    )


def make_windows(
    generator: np.random.Generator,
    *,
    num_windows: int,
    num_drafters: int,
    num_speculative_tokens: int,
    first_position: int,
    rule: AcceptanceRule,
    acceptance_probability: NDArray[np.floating] | float | None = None,
    realised_acceptance: NDArray[np.floating] | float | None = None,
) -> ScoredWindows:
    """Draw complete windows that start at consecutive positions; given values broadcast."""
    shape = (num_windows, num_speculative_tokens, num_drafters)
    drawn = generator.random((2, *shape))
    if rule is AcceptanceRule.GREEDY:
        drawn = np.broadcast_to(np.round(drawn[:1]), drawn.shape)
    probability = drawn[0] if acceptance_probability is None else acceptance_probability
    if realised_acceptance is None and rule is AcceptanceRule.GREEDY:
        realised_acceptance = probability
    realised = drawn[1] if realised_acceptance is None else realised_acceptance
    return ScoredWindows(
        start=(first_position + np.arange(num_windows)).astype(np.int32),
        num_levels=np.full(num_windows, num_speculative_tokens, np.int16),
        acceptance_probability=np.broadcast_to(probability, shape).astype(np.float16),
        realised_acceptance=np.broadcast_to(realised, shape).astype(np.float16),
    )


def make_content(
    generator: np.random.Generator,
    *,
    num_prompt_tokens: int,
    num_positions: int,
    num_top_tokens: int = 4,
    vocabulary_size: int = 1000,
    features: FeatureReference | None = None,
) -> Content:
    """Draw token ids and a truncated target distribution whose mass adds up to 1."""
    size = (num_positions, num_top_tokens)
    probabilities = generator.dirichlet(np.ones(num_top_tokens + 1), num_positions)
    top = -np.sort(-probabilities[:, :num_top_tokens], axis=1)
    ids = generator.random((num_positions, vocabulary_size)).argsort(axis=1)[:, :num_top_tokens]
    return Content(
        prompt_token_ids=generator.integers(0, vocabulary_size, num_prompt_tokens, np.int32),
        token_ids=generator.integers(0, vocabulary_size, num_positions, np.int32),
        target_top_token_ids=ids.reshape(size).astype(np.int32),
        target_top_log_probabilities=np.log(np.maximum(top, 1e-4)).astype(np.float16),
        target_tail_mass=probabilities[:, num_top_tokens].astype(np.float16),
        features=features,
    )


def make_event(
    *,
    num_windows: int = 6,
    num_drafters: int = 3,
    num_speculative_tokens: int = 4,
    stream: str = "stream-a",
    worker_id: str = "worker-0",
    worker_epoch: int = 1,
    sequence: int = 0,
    request_id: str = "request-0",
    segment_index: int = 0,
    is_final: bool = True,
    finish_reason: FinishReason | None = None,
    produced_at: datetime = PRODUCED_AT,
    policy_name: str = "normal_hedge",
    policy_version: int = 0,
    drafters: tuple[DrafterVersion, ...] | None = None,
    weights_version: int = 1,
    acceptance_rule: AcceptanceRule = AcceptanceRule.GREEDY,
    num_prompt_tokens: int = 5,
    first_position: int | None = None,
    acceptance_probability: NDArray[np.floating] | float | None = None,
    realised_acceptance: NDArray[np.floating] | float | None = None,
    with_content: bool = False,
    num_top_tokens: int = 4,
    features: FeatureReference | None = None,
    seed: int = 0,
) -> VerificationEvent:
    """Build one valid event.

    Windows start at consecutive positions from ``first_position`` (the end of the prompt unless
    given) and are complete; rounds cover at least those positions. ``acceptance_probability``
    and ``realised_acceptance`` broadcast to (num_windows, K, N); under the greedy rule the
    second follows the first. ``drafters`` overrides ``num_drafters`` and ``weights_version``.
    ``event_id`` is "<worker_id>.<worker_epoch>.<sequence>".
    """
    generator = np.random.default_rng([seed, sequence])
    pool = make_drafters(num_drafters, weights_version=weights_version)
    pool = pool if drafters is None else drafters
    first = num_prompt_tokens if first_position is None else first_position
    rounds = make_rounds(
        generator,
        num_positions=max(1, num_windows + num_speculative_tokens - 1),
        num_drafters=len(pool),
        num_speculative_tokens=num_speculative_tokens,
        first_position=first,
    )
    num_positions = int(rounds.num_emitted_tokens.sum())
    content = make_content(
        generator,
        num_prompt_tokens=num_prompt_tokens if segment_index == 0 else 0,
        num_positions=num_positions,
        num_top_tokens=num_top_tokens,
        features=features,
    )
    is_greedy = acceptance_rule is AcceptanceRule.GREEDY
    return VerificationEvent(
        event_id=f"{worker_id}.{worker_epoch}.{sequence}",
        worker_id=worker_id,
        worker_epoch=worker_epoch,
        sequence=sequence,
        produced_at=produced_at,
        stream=stream,
        request_id=request_id,
        segment_index=segment_index,
        is_final=is_final,
        finish_reason=finish_reason or (FinishReason.STOP if is_final else FinishReason.UNFINISHED),
        target_id="target-0",
        target_fingerprint="fingerprint-0",
        tokenizer_hash="tokenizer-0",
        policy_name=policy_name,
        policy_version=policy_version,
        prior_probabilities=np.full(len(pool), 1.0 / max(len(pool), 1)),
        drafters=pool,
        sampling=SamplingRule(
            acceptance_rule=acceptance_rule, temperature=0.0 if is_greedy else 0.7
        ),
        num_speculative_tokens=num_speculative_tokens,
        num_prompt_tokens=num_prompt_tokens,
        first_position=first,
        num_positions=num_positions,
        rounds=rounds,
        windows=make_windows(
            generator,
            num_windows=num_windows,
            num_drafters=len(pool),
            num_speculative_tokens=num_speculative_tokens,
            first_position=first,
            rule=acceptance_rule,
            acceptance_probability=acceptance_probability,
            realised_acceptance=realised_acceptance,
        ),
        content=content if with_content else None,
    )


def make_logged(
    events: Sequence[VerificationEvent],
    *,
    topic: str = VERIFICATION_EVENTS,
    partition: int = 0,
    first_offset: int = 0,
    appended_at: datetime = PRODUCED_AT,
) -> list[LoggedEvent]:
    """Place events at consecutive offsets, one millisecond apart."""
    return [
        LoggedEvent(
            topic=topic,
            partition=partition,
            offset=first_offset + index,
            appended_at=appended_at + timedelta(milliseconds=index),
            event=event,
        )
        for index, event in enumerate(events)
    ]


def make_policy(
    *,
    stream: str = "stream-a",
    version: int = 1,
    parent_version: int = 0,
    produced_at: datetime = PRODUCED_AT,
    learner_id: str = "learner-0",
    policy_name: str = "normal_hedge",
    num_drafters: int = 3,
    drafters: tuple[DrafterVersion, ...] | None = None,
    num_speculative_tokens: int = 4,
    accumulators: Mapping[str, NDArray[np.float64]] | None = None,
    watermark: Watermark | None = None,
    seed: int = 0,
) -> PolicyPublished:
    """Build one valid policy; ``drafters`` overrides ``num_drafters``."""
    generator = np.random.default_rng([seed, version])
    pool = make_drafters(num_drafters) if drafters is None else drafters
    log_weights = generator.normal(size=len(pool))
    weights = np.exp(log_weights)
    return PolicyPublished(
        stream=stream,
        version=version,
        parent_version=parent_version,
        produced_at=produced_at,
        learner_id=learner_id,
        policy_name=policy_name,
        drafters=pool,
        log_weights=log_weights,
        accumulators={"regret": generator.normal(size=len(pool)), "num_windows": np.array(7.0)}
        if accumulators is None
        else accumulators,
        selection_probabilities=weights / weights.sum() if len(pool) else weights,
        num_speculative_tokens=np.full(len(pool), num_speculative_tokens, np.int16),
        cost=CostModel(
            draft_seconds=generator.uniform(0.001, 0.01, len(pool)),
            score_seconds=np.full(len(pool), np.nan),
            verify_seconds=generator.uniform(0.01, 0.05, num_speculative_tokens + 1),
        ),
        watermark=Watermark(partition_to_offset={0: 12}, worker_to_sequence={"worker-0/1": 11})
        if watermark is None
        else watermark,
    )


def make_release(
    *,
    drafter_id: str = "drafter-0",
    version: int = 1,
    parent_version: int = 0,
    state: ReleaseState = ReleaseState.CANDIDATE,
    produced_at: datetime = PRODUCED_AT,
    artifact_uri: str = "memory://drafters/drafter-0/1",
    manifest_sha256: str = "0123456789abcdef" * 4,
    evidence: GateEvidence | None = None,
    reason: str = "trained on 12 events",
) -> DrafterReleased:
    """Build one valid release."""
    return DrafterReleased(
        drafter_id=drafter_id,
        version=version,
        parent_version=parent_version,
        state=state,
        produced_at=produced_at,
        artifact_uri=artifact_uri,
        manifest_sha256=manifest_sha256,
        architecture="hydra",
        target_fingerprint="fingerprint-0",
        tokenizer_hash="tokenizer-0",
        draft_vocabulary_hash="vocabulary-0",
        training_window=Watermark(
            partition_to_offset={0: 12}, worker_to_sequence={"worker-0/1": 11}
        ),
        evidence=evidence,
        reason=reason,
    )
