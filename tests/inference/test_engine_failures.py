"""A drafter that fails loses its request; the output stays the target's own."""

from __future__ import annotations

import logging

import pytest
import torch

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.nothing import NothingDrafter
from inference.pool import DrafterPool
from inference.ports import Draft, Drafter
from inference.sampling import SamplingParams
from inference.target import Target
from schemas.events import NO_DRAFTER
from tests.inference import fakes
from tests.inference.runs import hydra, rounds_of
from tests.inference.tiny import VOCAB_SIZE, plain_greedy, random_prompts, tiny_llama


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
