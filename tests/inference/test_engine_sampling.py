"""Sampled requests follow the target's law, repeat with their seed, and depend on no drafter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.nothing import NothingDrafter
from inference.engine import EngineOptions, RequestRun
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.sampling import SamplingParams, processed_probs
from inference.target import Target
from schemas.events import FinishReason
from tests.inference import fakes
from tests.inference.runs import all_drafters, rounds_of
from tests.inference.tiny import random_prompts, tiny_gemma3, tiny_llama

SAMPLED = SamplingParams(temperature=1.2, top_p=0.95, max_tokens=24)


def test_sampled_output_with_one_hot_drafts_depends_on_no_drafter_and_no_k() -> None:
    target = tiny_gemma3(1)
    drafters = all_drafters(target, tiny_gemma3(51))
    prompt = random_prompts(7, count=1, length=15)[0]
    for seed in range(2):
        outputs = {
            tuple(
                rounds_of(
                    target,
                    drafters,
                    prompt,
                    SAMPLED,
                    num_speculative_tokens=k,
                    policy=policy,
                    seed=seed,
                )[0].output_token_ids
            )
            for k, policy in enumerate(
                [*(f"fixed:{index}" for index in range(len(drafters))), "normal_hedge"]
            )
        }
        assert len(outputs) == 1


@pytest.mark.parametrize("draws_drafts", [False, True])
def test_a_seeded_request_repeats_bit_for_bit_alone_and_in_company(draws_drafts: bool) -> None:
    """A11."""
    target = tiny_llama(2)
    other = tiny_llama(52)
    prompts = random_prompts(8, count=2, length=11)
    options = EngineOptions(draws_drafts=draws_drafts, score_block=3)

    def start(prompt: list[int], seed: int, pool: DrafterPool) -> RequestRun:
        return fakes.start_run(
            target, pool, prompt, SAMPLED, options=options, policy="hedge", seed=seed
        )

    def new_pool() -> DrafterPool:
        return DrafterPool([CausalLmDrafter(other, target, drafter_id="other"), NothingDrafter()])

    alone = [start(prompts[0], 7, new_pool()) for _ in range(2)]
    pool = new_pool()
    company, neighbour = start(prompts[0], 7, pool), start(prompts[1], 8, pool)
    for run in alone:
        fakes.finish(run)
    while FinishReason.UNFINISHED in (company.finish_reason, neighbour.finish_reason):
        for run in (neighbour, company):
            if run.finish_reason is FinishReason.UNFINISHED:
                run.step()
    assert alone[0].output_token_ids == alone[1].output_token_ids == company.output_token_ids
    assert torch.equal(alone[0].trajectory.hidden(12, 30), company.trajectory.hidden(12, 30))
    by_itself = start(prompts[1], 8, new_pool())
    fakes.finish(by_itself)
    assert neighbour.output_token_ids == by_itself.output_token_ids
    different = start(prompts[0], 9, new_pool())
    fakes.finish(different)
    assert different.output_token_ids != company.output_token_ids


def highest_chi_square(degrees: int) -> float:
    """Return what chi-square exceeds once in a thousand (Wilson and Hilferty's approximation)."""
    spread = 2.0 / (9.0 * degrees)
    return degrees * (1.0 - spread + 3.09 * spread**0.5) ** 3  # type: ignore[no-any-return]


def exact_law(target: Target, prompt: list[int], params: SamplingParams) -> NDArray[np.float64]:
    """Return the law of three tokens of the bare model, (V, V, V)."""
    size = target.vocab_size
    law = np.ones((size, size, size))
    for first in range(size):
        for second in range(size):
            ids = torch.tensor([[*prompt, first, second]])
            with torch.inference_mode():
                logits = target.model(input_ids=ids, use_cache=False).logits[0, -3:]
            rows = processed_probs(logits, params).double().numpy()
            law[first, second] *= rows[0, first] * rows[1, second] * rows[2]
    return law


@pytest.mark.parametrize("draws_drafts", [False, True])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_draws_of_the_whole_engine_follow_the_exact_law(
    draws_drafts: bool, temperature: float
) -> None:
    """A9, A10: drawn drafts with their q, and arg-max drafts as one-hot, in one request."""
    target, other = (tiny_llama(seed, vocab_size=6, num_layers=1) for seed in (54, 60))
    params = SamplingParams(temperature=temperature, max_tokens=3)
    prompt, num_draws = [1, 2, 3, 4], 1000
    drafters: list[Drafter] = [CausalLmDrafter(other, target, drafter_id="other")]
    if draws_drafts:
        drafters.append(fakes.random_draws(torch.full((6,), 1 / 6)))
    counts = np.zeros((6, 6, 6))
    for seed in range(num_draws):
        run, _ = rounds_of(
            target,
            drafters,
            prompt,
            params,
            num_speculative_tokens=2,
            policy="hedge",
            draws_drafts=draws_drafts,
            score_block=0,
            seed=seed,
        )
        counts[tuple(run.output_token_ids)] += 1
    expected = num_draws * exact_law(target, prompt, params)
    large = expected >= 5.0
    found = np.append(counts[large], counts[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    assert large.sum() >= 18
    assert ((found - wanted) ** 2 / wanted).sum() < highest_chi_square(len(found) - 1)
    # Sampling noise of the plain law has this size too (its mean total variation).
    noise = np.sqrt(2.0 * expected / np.pi).sum() / 2.0 / num_draws
    assert np.abs(counts - expected).sum() / 2.0 / num_draws < 1.3 * noise


def test_distributions_are_kept_only_while_windows_need_them() -> None:
    target = tiny_llama()
    params = SamplingParams(temperature=1.0, max_tokens=40)
    for score_block, most in ((0, 0), (4, 4 + 4 + 5)):
        options = EngineOptions(score_block=score_block)
        run = fakes.start_run(target, [NothingDrafter()], [1, 2], params, options=options)
        while run.finish_reason is FinishReason.UNFINISHED:
            run.step()
            kept = run.trajectory._probs
            assert len(kept) <= most
