"""Another model as drafter: same tokens, its own cache, its own context."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.drafters.causal_lm import (
    CausalLmDrafter,
    ContextExhaustedError,
    VocabularyMismatchError,
    check_same_tokens,
)
from inference.ports import WindowBatch
from inference.sampling import SamplingParams, processed_probs
from inference.target import Target
from inference.trajectory import Trajectory
from tests.inference.tiny import (
    VOCAB_SIZE,
    plain_greedy,
    start_trajectory,
    tiny_gemma3,
    tiny_llama,
    tiny_tokenizer,
)

SAMPLED = SamplingParams(temperature=0.9, top_k=9)


def extend(trajectory: Trajectory, *token_ids: int) -> None:
    """Verify more tokens."""
    hidden = trajectory._hidden.new_zeros((len(token_ids), trajectory._hidden.shape[1]))
    trajectory.extend(token_ids, hidden, None)


def test_it_drafts_what_the_bare_model_would_write() -> None:
    target, model = tiny_llama(1), tiny_gemma3(2)
    drafter = CausalLmDrafter(model, target, drafter_id="lm")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    trajectory = start_trajectory(target, prompt)
    extend(trajectory, 8)
    session = drafter.start(trajectory, stream="s", draws_drafts=False)
    draft = session.draft(6, np.random.default_rng(0))
    assert list(draft.token_ids) == plain_greedy(model, [[*prompt, 8]], 6)[0]
    assert draft.probs is None


def test_it_rolls_back_what_was_rejected() -> None:
    target, model = tiny_llama(1), tiny_gemma3(2)
    drafter = CausalLmDrafter(model, target, drafter_id="lm")
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    trajectory = start_trajectory(target, prompt)
    extend(trajectory, 8)
    session = drafter.start(trajectory, stream="s", draws_drafts=False)
    rng = np.random.default_rng(1)
    for num_accepted in (0, 2, 5, 1, 0):
        drafted = session.draft(5, rng).token_ids
        bonus = int(rng.integers(1, 27))
        extend(trajectory, *drafted[:num_accepted], bonus)
        expected = plain_greedy(model, [trajectory.token_ids], 5)[0]
        assert list(session.draft(5, rng).token_ids) == expected


def test_drawn_drafts_come_with_the_distribution_they_were_drawn_from() -> None:
    target, model = tiny_llama(1), tiny_llama(2)
    drafter = CausalLmDrafter(model, target, drafter_id="lm")
    trajectory = start_trajectory(target, [3, 1, 4, 1, 5], SAMPLED)
    extend(trajectory, 8)
    session = drafter.start(trajectory, stream="s", draws_drafts=True)
    draft = session.draft(4, np.random.default_rng(3))
    assert draft.probs is not None
    ids = torch.tensor([[*trajectory.token_ids, *draft.token_ids]])
    with torch.inference_mode():
        logits = model.model(input_ids=ids, use_cache=False).logits[0, -5:-1]
    torch.testing.assert_close(draft.probs, processed_probs(logits, SAMPLED), atol=1e-5, rtol=1e-4)
    assert (draft.probs.gather(1, torch.tensor(draft.token_ids)[:, None]) > 0).all()


@pytest.mark.parametrize(("ours", "theirs"), [(40, 33), (33, 40)])
@pytest.mark.parametrize("draws_drafts", [False, True])
def test_padded_vocabularies_share_what_both_have(
    ours: int, theirs: int, draws_drafts: bool
) -> None:
    """A13: sizes differ by padding only; ids beyond the shared range are never drafted."""
    target, model = tiny_llama(1, vocab_size=theirs), tiny_llama(2, vocab_size=ours)
    # Embeddings are often padded beyond the tokenizer; the extra rows would win every arg-max.
    model.model.lm_head.weight.data[min(ours, theirs) :] *= 50.0
    drafter = CausalLmDrafter(model, target, drafter_id="lm")
    assert drafter.num_shared_tokens == 33
    params = SAMPLED if draws_drafts else SamplingParams()
    trajectory = start_trajectory(target, [3, 1, 4], params)
    extend(trajectory, 8)
    session = drafter.start(trajectory, stream="s", draws_drafts=draws_drafts)
    draft = session.draft(8, np.random.default_rng(4))
    assert max(draft.token_ids) < 33
    if draws_drafts:
        assert draft.probs is not None
        assert draft.probs.shape == (8, theirs)
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(8))


def test_no_draft_is_beyond_the_target_that_has_fewer_rows_than_tokens() -> None:
    target, model = tiny_llama(1, vocab_size=33), tiny_llama(2)
    target.tokenizer = model.tokenizer
    model.model.lm_head.weight.data[33:] *= 50.0
    drafter = CausalLmDrafter(model, target, drafter_id="lm")
    trajectory = start_trajectory(target, [3, 1, 4])
    extend(trajectory, 8)
    session = drafter.start(trajectory, stream="s", draws_drafts=False)
    assert max(session.draft(8, np.random.default_rng(4)).token_ids) < 33


def test_invalid_vocabulary_is_refused_by_token_not_by_size() -> None:
    """A13: equal sizes, another token at one id."""
    target, model = tiny_llama(1), tiny_llama(2)
    vocabulary = model.tokenizer.get_vocab()
    swapped = {**vocabulary, "b": vocabulary["c"], "c": vocabulary["b"]}
    model.tokenizer = FakeTokenizer(swapped)
    with pytest.raises(
        VocabularyMismatchError, match="drafter lm: token 2 is 'c', in the target 'b'"
    ):
        CausalLmDrafter(model, target, drafter_id="lm")


class FakeTokenizer:
    """A tokenizer that is a table."""

    def __init__(self, vocabulary: dict[str, int]) -> None:
        self._tokens = sorted(vocabulary, key=lambda token: vocabulary[token])

    def __len__(self) -> int:
        return len(self._tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Return the tokens."""
        return [self._tokens[i] for i in ids]


def test_equal_tokenizers_share_all_tokens() -> None:
    assert check_same_tokens(tiny_tokenizer(), tiny_tokenizer(), drafter_id="lm") == VOCAB_SIZE


def test_it_drafts_up_to_its_own_context_and_then_says_so() -> None:
    """A15: context 12."""
    target, model = tiny_llama(1), tiny_llama(2, context_length=12)
    session = CausalLmDrafter(model, target, drafter_id="lm").start(
        trajectory := start_trajectory(target, [1] * 8), stream="s", draws_drafts=False
    )
    rng = np.random.default_rng(0)
    for length, drafted in ((9, 4), (10, 3), (11, 2), (12, 1)):
        extend(trajectory, length)
        assert len(session.draft(6, rng).token_ids) == drafted
    extend(trajectory, 13)
    with pytest.raises(ContextExhaustedError, match="13 tokens, context 12"):
        session.draft(6, rng)
    windows = WindowBatch(starts=np.array([9]), num_levels=np.array([2]), num_speculative_tokens=2)
    with pytest.raises(ContextExhaustedError):
        session.predict(windows)


def test_logits_that_are_not_finite_are_refused() -> None:
    target, model = tiny_llama(1), tiny_llama(2)
    model.model.lm_head.weight.data[5, 0] = float("nan")
    session = CausalLmDrafter(model, target, drafter_id="lm").start(
        trajectory := start_trajectory(target, [1, 2]), stream="s", draws_drafts=False
    )
    extend(trajectory, 3)
    with pytest.raises(FloatingPointError, match="not finite"):
        session.draft(2, np.random.default_rng(0))


def copy_of(model: Target, *, version: int) -> CausalLmDrafter:
    """Return a drafter of another version."""
    return CausalLmDrafter(model, tiny_llama(1), drafter_id="lm", weights_version=version)


def test_a_new_version_reuses_nothing_of_the_old_ones_cache() -> None:
    """B5: the cache belongs to the session, and a session to one version."""
    target, old, new = tiny_llama(1), tiny_llama(2), tiny_llama(3)
    rng = np.random.default_rng(0)
    trajectory = start_trajectory(target, [5, 6, 7, 8])
    extend(trajectory, 9)
    copy_of(old, version=1).start(trajectory, stream="s", draws_drafts=False).draft(4, rng)
    warm = copy_of(new, version=2).start(trajectory, stream="s", draws_drafts=False)
    assert list(warm.draft(4, rng).token_ids) == plain_greedy(new, [trajectory.token_ids], 4)[0]
    version = copy_of(new, version=2).version
    assert version == replace(copy_of(old, version=1).version, weights_version=2)
