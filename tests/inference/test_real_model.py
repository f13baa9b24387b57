"""The real target in float32: with drafters its text is what it writes alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from inference.drafters.frozen_rows import FrozenRows, frequent_tokens
from inference.drafters.hydra import HydraDrafter, initial_hydra_weights
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.pool import DrafterPool
from inference.sampling import SamplingParams
from inference.target import Target, load_target
from pipeline.prompts import read_prompts
from schemas.events import FinishReason
from tests.inference import fakes

NUM_TOKENS = 16
NUM_PROMPTS = 40
pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def target(smollm2: Path) -> Target:
    """Load the real target once."""
    torch.set_num_threads(1)
    return load_target(smollm2, dtype=torch.float32)


@pytest.fixture(scope="module")
def pool(target: Target) -> DrafterPool:
    """Return the pool of the demo, one head untrained and one perturbed."""
    vocabulary = frequent_tokens({}, size=4096, vocab_size=target.vocab_size)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    generator = torch.Generator().manual_seed(0)
    untrained = initial_hydra_weights(target.hidden_size, 128, generator)
    perturbed = {
        name: tensor + 0.01 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in untrained.items()
    }
    return DrafterPool(
        [
            NothingDrafter(),
            PromptLookupDrafter(),
            SuffixDrafter(),
            HydraDrafter("untrained", 0, untrained, rows),
            HydraDrafter("perturbed", 0, perturbed, rows),
        ]
    )


def prompts() -> list[str]:
    """Return every third or so of the project's own prompts, all domains among them."""
    known = [prompt.text for prompt in read_prompts()]
    return known[:: len(known) // NUM_PROMPTS][:NUM_PROMPTS]


@torch.inference_mode()
def written_alone(target: Target, prompt: Sequence[int]) -> list[int]:
    """Return the greedy text of the bare model with the cache of transformers."""
    cache, output = None, list[int]()
    ids = torch.tensor([list(prompt)])
    while len(output) < NUM_TOKENS:
        found = target.model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
        cache = found.cache
        output.append(int(found.logits[0, -1].argmax()))
        if output[-1] in target.eos_token_ids:
            break
        ids = torch.tensor([[output[-1]]])
    return output


@torch.inference_mode()
def chosen_at_once(target: Target, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """Return the most probable token at every place of ``output``, from one bare forward.

    If that is ``output`` itself, then ``output`` is the greedy text, token after token.
    """
    ids = torch.tensor([[*prompt, *output[:-1]]])
    found = target.model(input_ids=ids, use_cache=False, logits_to_keep=len(output))
    return found.logits[0].argmax(-1).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("part", range(4))
def test_greedy_text_of_real_prompts_is_the_targets_own(
    target: Target, pool: DrafterPool, part: int
) -> None:
    """40 prompts in four parts, one per drafter compared token by token with plain decoding.

    Every drafter of the pool drafts some rounds in each part.
    """
    chosen = set[int]()
    accepted = 0
    for number, text in enumerate(prompts()[part::4]):
        prompt = target.encode(text)
        run = fakes.start_run(
            target,
            pool,
            prompt,
            SamplingParams(max_tokens=NUM_TOKENS),
            policy=f"fixed:{number % 5}" if number < 5 else "hedge",
            seed=number,
        )
        rounds = fakes.finish(run)
        output = run.output_token_ids
        if part == 0 and number < 5:
            assert output == written_alone(target, prompt), text
        assert output == chosen_at_once(target, prompt, output), text
        assert len(output) == NUM_TOKENS or output[-1] in target.eos_token_ids
        assert run.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        chosen |= {one.drafter_index for one in rounds}
        accepted += sum(one.num_accepted_tokens for one in rounds)
    assert chosen == {-1, 0, 1, 2, 3, 4}
    assert accepted > 0
    assert not pool.failures
