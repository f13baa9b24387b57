"""Whole requests over tiny targets: drafters of every kind, rounds, and what must hold of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.frozen_rows import FrozenRows, frequent_tokens
from inference.drafters.hydra import HydraDrafter, initial_hydra_weights
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.engine import EngineOptions, RequestRun
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.recording import Round
from inference.sampling import SamplingParams
from inference.target import Target
from schemas.events import NO_DRAFTER
from tests.inference import fakes
from tests.inference.tiny import VOCAB_SIZE


def hydra(target: Target, seed: int, *, spread: float) -> HydraDrafter:
    """Return a head on a third of the vocabulary; ``spread`` 0 is the untrained one."""
    vocabulary = frequent_tokens({}, size=VOCAB_SIZE // 3, vocab_size=VOCAB_SIZE)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    weights = initial_hydra_weights(target.hidden_size, 8, generator)
    weights["out"].normal_(0.0, spread or 1e-9, generator=generator)
    return HydraDrafter(f"hydra-{seed}-{spread}", 0, weights, rows)


def all_drafters(target: Target, other: Target) -> list[Drafter]:
    """Return one drafter of every kind."""
    return [
        NothingDrafter(),
        PromptLookupDrafter(),
        SuffixDrafter(),
        CausalLmDrafter(target, target, drafter_id="copy"),
        CausalLmDrafter(other, target, drafter_id="other"),
        hydra(target, 1, spread=0.0),
        hydra(target, 2, spread=0.5),
        fakes.random_tokens(VOCAB_SIZE),
    ]


def rounds_of(
    target: Target,
    drafters: Sequence[Drafter] | DrafterPool,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    num_speculative_tokens: int = 4,
    policy: str = "fixed:0",
    draws_drafts: bool = False,
    score_block: int = 4,
    seed: int = 0,
) -> tuple[RequestRun, list[Round]]:
    """Play one request to its end."""
    options = EngineOptions(
        num_speculative_tokens=num_speculative_tokens,
        score_block=score_block,
        draws_drafts=draws_drafts,
    )
    run = fakes.start_run(
        target, drafters, prompt, params, options=options, policy=policy, seed=seed
    )
    rounds = fakes.finish(run)
    check_accounting(run, rounds, num_speculative_tokens)
    return run, rounds


def check_accounting(run: RequestRun, rounds: Sequence[Round], num_speculative_tokens: int) -> None:
    """Check what must hold of the rounds of any request that ended by itself (A18, A20)."""
    assert rounds[0].drafter_index == NO_DRAFTER
    assert rounds[0].num_draft_tokens == 0
    assert rounds[0].first_position == run.trajectory.num_prompt_tokens
    for before, after in pairwise(rounds):
        assert after.first_position == before.first_position + before.num_emitted_tokens
        assert before.num_emitted_tokens == before.num_accepted_tokens + 1
    for one in rounds:
        assert 0 <= one.num_accepted_tokens <= one.num_draft_tokens <= num_speculative_tokens
        assert one.num_accepted_tokens <= one.num_emitted_tokens <= one.num_accepted_tokens + 1
        assert 0.0 < one.selection_probability <= 1.0
        assert min(one.draft_seconds, one.verify_seconds, one.score_seconds) >= 0.0
    assert rounds[-1].num_emitted_tokens >= 1
    assert sum(one.num_emitted_tokens for one in rounds) == len(run.output_token_ids)
