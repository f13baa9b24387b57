"""Whatever drafts, the output is the target's own, and the rounds tell the truth about it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.engine import PromptTooLongError
from inference.pool import DrafterPool
from inference.ports import Draft, Drafter
from inference.sampling import SamplingParams
from inference.target import Target
from schemas.events import FinishReason
from tests.inference import fakes
from tests.inference.runs import all_drafters, rounds_of
from tests.inference.tiny import VOCAB_SIZE, plain_greedy, random_prompts, tiny_gemma3, tiny_llama

MakeTarget = Callable[[int], Target]


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
