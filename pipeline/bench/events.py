"""Verification events for benchmarks: the shape of real ones, with drawn acceptances."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
from numpy.typing import NDArray

from schemas.events import (
    AcceptanceRule,
    DrafterVersion,
    FinishReason,
    Rounds,
    SamplingRule,
    ScoredWindows,
    VerificationEvent,
)


def bench_event(
    seed: int, *, num_windows: int = 64, num_drafters: int = 8, num_speculative_tokens: int = 8
) -> VerificationEvent:
    """Return one greedy segment without content, all windows complete.

    Args:
        seed: Of the acceptances.
        num_windows: Scored start positions, >= 1.
        num_drafters: N, >= 1.
        num_speculative_tokens: K, >= 1.
    """
    generator = np.random.default_rng(seed)
    accepted = generator.random((num_windows, num_speculative_tokens, num_drafters)) < 0.7
    acceptance = accepted.astype(np.float16)
    lengths = np.cumprod(accepted[:, :, 0], axis=1).sum(axis=1)
    rounds = _rounds(generator, lengths, num_speculative_tokens)
    return VerificationEvent(
        event_id=f"bench.{seed}",
        worker_id="bench",
        worker_epoch=1,
        sequence=seed,
        produced_at=datetime.now(UTC),
        stream="bench",
        request_id=f"request-{seed}",
        segment_index=0,
        is_final=True,
        finish_reason=FinishReason.STOP,
        target_id="target",
        target_fingerprint="fingerprint",
        tokenizer_hash="tokenizer",
        policy_name="normal_hedge",
        policy_version=0,
        prior_probabilities=np.full(num_drafters, 1.0 / num_drafters),
        drafters=tuple(
            DrafterVersion(
                drafter_id=f"drafter-{index}", weights_version=1, draft_vocabulary_hash=""
            )
            for index in range(num_drafters)
        ),
        sampling=SamplingRule(acceptance_rule=AcceptanceRule.GREEDY, temperature=0.0),
        num_speculative_tokens=num_speculative_tokens,
        num_prompt_tokens=5,
        first_position=5,
        num_positions=int(rounds.num_emitted_tokens.sum()),
        rounds=rounds,
        windows=ScoredWindows(
            start=(5 + np.arange(num_windows)).astype(np.int32),
            num_levels=np.full(num_windows, num_speculative_tokens, np.int16),
            acceptance_probability=acceptance,
            realised_acceptance=acceptance,
        ),
        content=None,
    )


def _rounds(
    generator: np.random.Generator, lengths: NDArray[np.int64], num_speculative_tokens: int
) -> Rounds:
    """Return the rounds of the first drafter, whose drafts are accepted as its windows say.

    Args:
        generator: Of the seconds.
        lengths: Tokens accepted of a draft from each position, (W,); all K beyond.
        num_speculative_tokens: K.
    """
    accepted, position = [], 0
    while position < len(lengths) + num_speculative_tokens:
        inside = position < len(lengths)
        accepted.append(int(lengths[position]) if inside else num_speculative_tokens)
        position += accepted[-1] + 1
    count = len(accepted)
    emitted = np.array(accepted, np.int16) + np.int16(1)
    seconds = generator.uniform(0.001, 0.02, (3, count)).astype(np.float32)
    return Rounds(
        first_position=(5 + np.cumsum(emitted) - emitted).astype(np.int32),
        drafter_index=np.zeros(count, np.int16),
        num_draft_tokens=np.full(count, num_speculative_tokens, np.int16),
        num_accepted_tokens=(emitted - 1).astype(np.int16),
        num_emitted_tokens=emitted,
        num_scored_windows=np.zeros(count, np.int16),
        selection_probability=np.ones(count, np.float32),
        draft_seconds=seconds[0],
        verify_seconds=seconds[1],
        score_seconds=seconds[2],
    )
