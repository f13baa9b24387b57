"""Whatever drafts, the output is the target's own, and the rounds tell the truth about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.hydra import (
    FrozenRows,
    HydraDrafter,
    frequent_tokens,
    initial_hydra_weights,
)
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.engine import EngineOptions, PromptTooLongError, RequestRun
from inference.pool import DrafterPool
from inference.ports import Draft, Drafter
from inference.recording import Round
from inference.sampling import SamplingParams, processed_probs
from inference.target import Target
from schemas.events import NO_DRAFTER, FinishReason
from tests.inference import fakes
from tests.inference.tiny import (
    VOCAB_SIZE,
    plain_greedy,
    random_prompts,
    tiny_gemma3,
    tiny_llama,
)

MakeTarget = Callable[[int], Target]


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


@pytest.mark.parametrize("make_target", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("seed", range(5))
def test_greedy_output_equals_the_bare_model_for_every_drafter_and_k(
    make_target: MakeTarget, seed: int
) -> None:
    """Ten random models with 21 prompts each, all longer than the sliding window."""
    target = make_target(seed)
    drafters = all_drafters(target, make_target(seed + 50))
    prompts = random_prompts(seed, count=21, length=15)
    expected = plain_greedy(target, prompts, 18)
    policies = [*(f"fixed:{index}" for index in range(len(drafters))), "hedge"]
    num_accepted = 0
    for number, prompt in enumerate(prompts):
        run, rounds = rounds_of(
            target,
            drafters,
            prompt,
            SamplingParams(max_tokens=18),
            num_speculative_tokens=(5 * number + seed) % 9,
            policy=policies[number % len(policies)],
        )
        assert run.output_token_ids == expected[number]
        assert run.finish_reason is FinishReason.LENGTH
        num_accepted += sum(one.num_accepted_tokens for one in rounds)
    assert num_accepted > 35


def test_a_perfect_drafter_is_accepted_whole() -> None:
    target = tiny_gemma3()
    prompt = random_prompts(1, count=1, length=15)[0]
    copy = CausalLmDrafter(target, target, drafter_id="copy")
    _, rounds = rounds_of(target, [copy], prompt, SamplingParams(max_tokens=26))
    assert [one.num_accepted_tokens for one in rounds] == [0, 4, 4, 4, 4, 4]


@pytest.mark.parametrize("place", range(1, 17))
@pytest.mark.parametrize("is_scripted", [True, False])
def test_the_output_ends_at_the_first_eos_wherever_it_stands_in_a_block(
    place: int, is_scripted: bool
) -> None:
    """A1: tokens behind it are neither emitted nor accepted."""
    target = tiny_llama(3)
    prompt = random_prompts(2, count=1, length=12)[0]
    plain = plain_greedy(target, [prompt], 24)[0]
    expected = plain[: plain.index(plain[place]) + 1]
    drafter = (
        fakes.scripted([*prompt, *plain])
        if is_scripted
        else CausalLmDrafter(tiny_llama(3), target, drafter_id="copy")
    )
    target.eos_token_ids = frozenset({plain[place]})
    run, rounds = rounds_of(
        target, [drafter], prompt, SamplingParams(max_tokens=24), num_speculative_tokens=7
    )
    assert run.output_token_ids == expected
    assert run.finish_reason is FinishReason.STOP
    # The prompt's own round emits one token; from then on blocks of 8 end where the text does.
    emitted = [1] + [min(8, len(expected) - i) for i in range(1, len(expected), 8)]
    assert [one.num_emitted_tokens for one in rounds] == emitted
    last = rounds[-1]
    assert last.num_accepted_tokens == min(last.num_emitted_tokens, last.num_draft_tokens)


def test_eos_is_passed_where_it_is_to_be_ignored() -> None:
    target = tiny_llama(3)
    prompt = random_prompts(2, count=1, length=12)[0]
    plain = plain_greedy(target, [prompt], 12)[0]
    target.eos_token_ids = frozenset({plain[4]})
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    run, _ = rounds_of(target, [NothingDrafter()], prompt, params)
    assert run.output_token_ids == plain
    assert run.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("place", range(8))
@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_ids_text_and_reason_end_at_the_stop_string(place: int, num_tokens: int) -> None:
    """A7, H4: the stop string spans tokens and completes anywhere in a block."""
    target = tiny_llama(7)
    prompt = random_prompts(3, count=1, length=12)[0]
    plain = plain_greedy(target, [prompt], 24)[0]
    stop = target.decode(plain[place : place + num_tokens])
    assert len(stop) == num_tokens
    count = next(n for n in range(1, 25) if stop in target.decode(plain[:n]))
    for drafter in (NothingDrafter(), fakes.scripted([*prompt, *plain])):
        run, _ = rounds_of(
            target,
            [drafter],
            prompt,
            SamplingParams(max_tokens=24, stop=("never seen", stop)),
            num_speculative_tokens=7,
        )
        assert run.output_token_ids == plain[:count]
        text = target.decode(plain[:count])
        assert run.text == text[: text.index(stop)]
        assert run.finish_reason is FinishReason.STOP


def greedy_without_early_end(
    target: Target, prompt: list[int], num_tokens: int, min_tokens: int
) -> list[int]:
    """Write token by token with the bare model, ends masked until ``min_tokens``."""
    output: list[int] = []
    while len(output) < num_tokens:
        ids = torch.tensor([[*prompt, *output]])
        with torch.inference_mode():
            logits = target.model(input_ids=ids, use_cache=False).logits[0, -1]
        if len(output) < min_tokens:
            ends = torch.tensor(sorted(target.eos_token_ids))
            logits = logits.index_fill(0, ends, -torch.inf)
        output.append(int(logits.argmax()))
        if output[-1] in target.eos_token_ids:
            break
    return output


@pytest.mark.parametrize("min_tokens", range(10))
def test_no_request_ends_before_min_tokens(min_tokens: int) -> None:
    """A6: the mask follows the row of the draft, not the round."""
    target = tiny_llama(1)
    prompt = random_prompts(4, count=1, length=12)[0]
    plain = plain_greedy(target, [prompt], 6)[0]
    drafters: list[Drafter] = [
        CausalLmDrafter(tiny_llama(1), target, drafter_id="copy"),
        fakes.random_tokens(VOCAB_SIZE),
        NothingDrafter(),
    ]
    target.eos_token_ids = frozenset(plain[:4])
    expected = greedy_without_early_end(target, prompt, 16, min_tokens)
    params = SamplingParams(max_tokens=16, min_tokens=min_tokens)
    for index in range(len(drafters)):
        run, _ = rounds_of(
            target,
            [*drafters, fakes.scripted([*prompt, *expected])],
            prompt,
            params,
            policy=f"fixed:{index}",
            num_speculative_tokens=5,
        )
        assert run.output_token_ids == expected
        assert len(run.output_token_ids) >= max(min_tokens, 1)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 8, 9])
def test_a_draft_never_overshoots_max_tokens(max_tokens: int) -> None:
    """A16."""
    target = tiny_llama()
    prompt = random_prompts(5, count=1, length=10)[0]
    plain = plain_greedy(target, [prompt], 12)[0]
    run, rounds = rounds_of(
        target,
        [fakes.scripted([*prompt, *plain])],
        prompt,
        SamplingParams(max_tokens=max_tokens),
        num_speculative_tokens=7,
    )
    assert run.output_token_ids == plain[:max_tokens]
    assert run.finish_reason is FinishReason.LENGTH
    assert all(one.num_emitted_tokens == one.num_accepted_tokens + 1 for one in rounds)


@pytest.mark.parametrize("length", [56, 60, 62, 63])
def test_a_draft_never_overshoots_the_context(length: int) -> None:
    """A16: context 64, K = 8."""
    target = tiny_llama(context_length=64)
    prompt = random_prompts(6, count=1, length=length)[0]
    plain = plain_greedy(target, [prompt], 64 - length)[0]
    for drafter in (
        PromptLookupDrafter(longest=2, shortest=1),
        CausalLmDrafter(target, target, drafter_id="copy"),
    ):
        run, _ = rounds_of(
            target, [drafter], prompt, SamplingParams(max_tokens=500), num_speculative_tokens=8
        )
        assert run.output_token_ids == plain
        assert run.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [64, 70])
def test_invalid_prompt_without_room_is_refused_with_both_lengths(length: int) -> None:
    target = tiny_llama(context_length=64)
    with pytest.raises(PromptTooLongError, match=f"{length} prompt tokens, context 64"):
        fakes.start_run(target, [NothingDrafter()], [1] * length, SamplingParams())


def test_invalid_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        fakes.start_run(tiny_llama(), [NothingDrafter()], [], SamplingParams())


def test_unlimited_max_tokens_costs_no_memory_beyond_the_context() -> None:
    target = tiny_llama(context_length=64)
    run, _ = rounds_of(target, [NothingDrafter()], [1] * 60, SamplingParams(max_tokens=10**12))
    assert len(run.output_token_ids) == 4


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
    target, other = tiny_llama(18, vocab_size=6), tiny_llama(60, vocab_size=6)
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


def fails(drafter: Drafter, target: Target) -> None:
    """Check that a drafter that misbehaves loses its request and nothing else happens."""
    prompt = random_prompts(9, count=1, length=12)[0]
    expected = plain_greedy(target, [prompt], 16)[0]
    pool = DrafterPool([drafter, NothingDrafter()])
    for requests in (1, 2):
        run, _ = rounds_of(target, pool, prompt, SamplingParams(max_tokens=16), policy="hedge")
        assert run.output_token_ids == expected
        assert pool.failures == {drafter.version.drafter_id: requests}
        assert run.drafters.is_awake.tolist() == [False, True]


@pytest.mark.parametrize(
    "drafter",
    [
        fakes.not_finite(float("nan"), VOCAB_SIZE),
        fakes.not_finite(float("inf"), VOCAB_SIZE),
        fakes.raising(RuntimeError("broken"), after=2),
        fakes.raising(IndexError("beyond the table")),
        fakes.raising(MemoryError()),
        fakes.proposing(Draft(token_ids=(1,) * 9)),
        fakes.proposing(Draft(token_ids=(-1,))),
        fakes.proposing(Draft(token_ids=(VOCAB_SIZE,))),
        fakes.proposing(Draft(token_ids=(1,), probs=torch.full((1, 7), 1 / 7))),
        fakes.proposing(Draft(token_ids=(1, 2), probs=torch.full((1, VOCAB_SIZE), 0.1))),
    ],
)
def test_a_drafter_that_misbehaves_sits_out_the_request_and_is_counted(
    drafter: fakes.FakeDrafter, caplog: pytest.LogCaptureFixture
) -> None:
    """A22, A13: nothing of it reaches the target."""
    with caplog.at_level(logging.WARNING):
        fails(drafter, tiny_llama())
    assert f"drafter {drafter.drafter_id} sits out this request" in caplog.text


def test_a_head_with_nan_weights_sits_out() -> None:
    target = tiny_llama()
    for name in ("mix", "out", "gain"):
        head = hydra(target, 1, spread=0.1)
        head.weights[name].view(-1)[0] = float("nan")
        fails(head, target)


def test_a_drafter_whose_context_ends_sits_out_the_rest() -> None:
    """A15: the request goes on without it, and only this request."""
    target = tiny_llama()
    short = CausalLmDrafter(tiny_llama(context_length=20), target, drafter_id="short")
    fails(short, target)


def test_the_request_goes_on_when_every_drafter_has_failed() -> None:
    target = tiny_llama()
    prompt = random_prompts(9, count=1, length=12)[0]
    drafters = [
        fakes.raising(RuntimeError("broken"), drafter_id="one"),
        fakes.not_finite(float("nan"), VOCAB_SIZE, drafter_id="two"),
    ]
    run, rounds = rounds_of(target, drafters, prompt, SamplingParams(max_tokens=16), policy="hedge")
    assert run.output_token_ids == plain_greedy(target, [prompt], 16)[0]
    assert rounds[-1].drafter_index == NO_DRAFTER


def test_a_drafter_that_cannot_start_is_not_asked() -> None:
    def refuse() -> None:
        raise ValueError("no memory for another request")

    broken = fakes.random_tokens(VOCAB_SIZE)
    broken.on_start = refuse
    fails(broken, tiny_llama())
    assert broken.num_drafts == 0


def test_the_second_request_starts_from_the_configured_k() -> None:
    """A21: how long a draft may be is no state of the drafter."""
    target = tiny_llama()
    prompts = random_prompts(10, count=2, length=12)
    pool = DrafterPool([fakes.proposing(Draft(token_ids=(1, 2, 3, 4, 5)))])
    lengths = [
        [
            one.num_draft_tokens
            for one in rounds_of(
                target, pool, prompt, SamplingParams(max_tokens=30), num_speculative_tokens=5
            )[1]
        ]
        for prompt in prompts
    ]
    assert [one[1] for one in lengths] == [5, 5]


def test_an_aborted_request_ends_where_it_is() -> None:
    target = tiny_llama()
    drafter = fakes.random_tokens(VOCAB_SIZE)
    run = fakes.start_run(target, [drafter], [1, 2, 3], SamplingParams(max_tokens=30))
    run.step()
    run.step()
    run.end(FinishReason.ABORTED)
    assert run.finish_reason is FinishReason.ABORTED
    assert drafter.finished == [[1, 2, 3, *run.output_token_ids]]


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


BFLOAT16_GAP = 0.1
"""Logits of the tiny models reach about 6, where one bfloat16 step is 1/32; most flips are ties."""


def test_bfloat16_differs_from_plain_only_where_two_logits_nearly_tie() -> None:
    """A12: one row and many rows round differently in bfloat16, so only near-ties may flip."""
    num_equal = 0
    for seed in range(4):
        target = tiny_llama(seed, dtype=torch.bfloat16)
        prompts = random_prompts(seed, count=10, length=12)
        expected = plain_greedy(target, prompts, 24)
        copy = CausalLmDrafter(target, target, drafter_id="copy")
        for prompt, plain in zip(prompts, expected, strict=True):
            run, _ = rounds_of(target, [copy], prompt, SamplingParams(max_tokens=24))
            found = run.output_token_ids
            same = next((i for i in range(24) if found[i] != plain[i]), 24)
            num_equal += same == 24
            if same < 24:
                ids = torch.tensor([[*prompt, *plain[:same]]])
                with torch.inference_mode():
                    logits = target.model(input_ids=ids, use_cache=False).logits[0, -1].float()
                assert logits.max() - logits[found[same]] < BFLOAT16_GAP
    assert num_equal >= 20
