"""The recurrent head: what it drafts is what it is scored on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from inference.drafters.frozen_rows import DraftVocabulary, FrozenRows, frequent_tokens
from inference.drafters.head import predict_heads
from inference.drafters.hydra import HydraDrafter, hydra_shapes, initial_hydra_weights
from inference.drafters.seen_tokens import SeenTokens
from inference.ports import NO_PROPOSAL, Predictions, WindowBatch
from inference.sampling import SamplingParams, processed_probs
from inference.target import Target
from inference.trajectory import Trajectory
from tests.inference.tiny import VOCAB_SIZE, start_trajectory, tiny_llama

LEVELS = 4
SAMPLED = SamplingParams(temperature=1.1, top_p=0.9)


def head(
    target: Target, seed: int, *, size: int = 25, rows: FrozenRows | None = None
) -> HydraDrafter:
    """Return a head with random weights on the even tokens first."""
    counts = {token: 1 for token in range(0, VOCAB_SIZE, 2)}
    vocabulary = frequent_tokens(counts, size=size, vocab_size=VOCAB_SIZE)
    rows = rows or FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    generator = torch.Generator().manual_seed(seed)
    weights = initial_hydra_weights(target.hidden_size, 8, generator)
    weights["out"].normal_(0.0, 0.4, generator=generator)
    weights["gain"].uniform_(0.5, 1.5, generator=generator)
    return HydraDrafter(f"head-{seed}", seed, weights, rows)


def verified(target: Target, params: SamplingParams, length: int = 30) -> Trajectory:
    """Return a request with the target's own states and random tokens behind the prompt."""
    token_ids = np.random.default_rng(1).integers(0, VOCAB_SIZE, 6 + length).tolist()
    trajectory = start_trajectory(target, token_ids[:6], params)
    output = target.start().forward(token_ids[:-1])
    probs = None if params.is_greedy else processed_probs(output.logits[5:], params)
    trajectory.extend(token_ids[6:], output.hidden[5:], probs)
    return trajectory


def cut(trajectory: Trajectory, target: Target, length: int) -> Trajectory:
    """Return the same request when it had ``length`` tokens."""
    shorter = start_trajectory(target, trajectory.token_ids[:6], trajectory.params)
    shorter.extend(trajectory.token_ids[6:length], trajectory.hidden(6, length), None)
    return shorter


def windows_of(trajectory: Trajectory) -> WindowBatch:
    """Return every complete window."""
    starts = np.arange(7, len(trajectory) - LEVELS)
    return WindowBatch(
        starts=starts,
        num_levels=np.full(len(starts), LEVELS),
        num_speculative_tokens=LEVELS,
    )


def test_predictions_equal_drafts_as_long_as_all_levels_before_were_right() -> None:
    target = tiny_llama()
    trajectory = verified(target, SamplingParams())
    one = head(target, 1)
    windows = windows_of(trajectory)
    proposals = one.start(trajectory, stream="s", draws_drafts=False).predict(windows).proposals
    assert proposals is not None
    num_checked = 0
    for start, row in zip(windows.starts, proposals, strict=True):
        draft = (
            one.start(cut(trajectory, target, int(start)), stream="s", draws_drafts=False)
            .draft(LEVELS, np.random.default_rng(0))
            .token_ids
        )
        for level in range(LEVELS):
            if list(draft[:level]) != trajectory.token_ids[start : start + level]:
                break
            assert row[level] == draft[level]
            num_checked += 1
    assert num_checked >= len(windows.starts)


@pytest.mark.parametrize("draws_drafts", [False, True])
def test_known_levels_are_passed_over_and_the_others_predicted_alike(draws_drafts: bool) -> None:
    target = tiny_llama()
    trajectory = verified(target, SAMPLED if draws_drafts else SamplingParams())
    session = head(target, 1).start(trajectory, stream="s", draws_drafts=draws_drafts)
    windows = windows_of(trajectory)
    whole, rest = session.predict(windows), session.predict(replace(windows, num_known_levels=2))
    if draws_drafts:
        assert whole.probs is not None
        assert rest.probs is not None
        assert torch.equal(rest.probs[:, 2:], whole.probs[:, 2:])
        assert rest.probs.shape == whole.probs.shape
    else:
        assert whole.proposals is not None
        assert rest.proposals is not None
        assert rest.proposals[:, 2:].tolist() == whole.proposals[:, 2:].tolist()
        assert (rest.proposals[:, :2] == NO_PROPOSAL).all()


def test_a_window_whose_levels_all_match_is_scored_as_it_would_be_drafted() -> None:
    """The text of the request is the head's own draft, so every level is reached."""
    target = tiny_llama()
    one = head(target, 2)
    trajectory = verified(target, SamplingParams(), length=3)
    session = one.start(trajectory, stream="s", draws_drafts=False)
    draft = session.draft(LEVELS, np.random.default_rng(0)).token_ids
    start = len(trajectory)
    trajectory.extend([*draft, 1], torch.zeros((LEVELS + 1, target.hidden_size)), None)
    windows = WindowBatch(
        starts=np.array([start]), num_levels=np.array([LEVELS]), num_speculative_tokens=LEVELS
    )
    proposals = session.predict(windows).proposals
    assert proposals is not None
    assert tuple(proposals[0]) == draft


def test_drawn_drafts_carry_the_distributions_that_windows_are_scored_with() -> None:
    target = tiny_llama()
    one = head(target, 3)
    trajectory = verified(target, SAMPLED)
    windows = windows_of(trajectory)
    scored = one.start(trajectory, stream="s", draws_drafts=True).predict(windows).probs
    assert scored is not None
    assert scored.shape == (len(windows.starts), LEVELS, VOCAB_SIZE)
    for start, row in zip(windows.starts, scored, strict=True):
        shorter = cut(trajectory, target, int(start))
        draft = one.start(shorter, stream="s", draws_drafts=True).draft(
            1, np.random.default_rng(int(start))
        )
        assert draft.probs is not None
        torch.testing.assert_close(draft.probs[0], row[0], atol=1e-5, rtol=1e-4)
        assert draft.probs[0, draft.token_ids[0]] > 0
        outside = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        outside[one.rows.vocabulary.token_ids] = False
        outside[shorter.token_ids] = False
        assert not draft.probs[0, outside].any()


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED])
def test_heads_scored_together_are_scored_as_alone(params: SamplingParams) -> None:
    target = tiny_llama()
    trajectory = verified(target, params)
    first = head(target, 4)
    heads = [first, head(target, 5, rows=first.rows), head(target, 6, rows=first.rows)]
    assert len({one.group_key for one in heads}) == 1
    assert head(target, 7).group_key != first.group_key
    draws = not params.is_greedy
    sessions = [one.start(trajectory, stream="s", draws_drafts=draws) for one in heads]
    windows = windows_of(trajectory)
    together: list[Predictions] = predict_heads(sessions, windows)
    for session, found in zip(sessions, together, strict=True):
        alone = session.predict(windows)
        if draws:
            assert found.probs is not None
            torch.testing.assert_close(found.probs, alone.probs, atol=1e-5, rtol=1e-4)
        else:
            assert np.array_equal(found.proposals, alone.proposals)  # type: ignore[arg-type]


def test_an_untrained_head_is_the_targets_head_one_position_too_early() -> None:
    target = tiny_llama()
    vocabulary = frequent_tokens({}, size=VOCAB_SIZE, vocab_size=VOCAB_SIZE)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    weights = initial_hydra_weights(target.hidden_size, 8, torch.Generator().manual_seed(0))
    trajectory = verified(target, SamplingParams())
    state = trajectory.hidden(len(trajectory) - 1, len(trajectory))[0]
    expected = int((target.head_rows @ state).argmax())
    session = HydraDrafter("h", 0, weights, rows).start(trajectory, stream="s", draws_drafts=False)
    assert session.draft(3, np.random.default_rng(0)).token_ids == (expected,) * 3


@pytest.mark.parametrize("name", ["mix", "out", "gain"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("draws_drafts", [False, True])
def test_weights_that_are_not_finite_are_refused_at_work(
    name: str, value: float, draws_drafts: bool
) -> None:
    target = tiny_llama()
    trajectory = verified(target, SAMPLED if draws_drafts else SamplingParams())
    one = head(target, 8)
    one.weights[name].view(-1)[0] = value
    session = one.start(trajectory, stream="s", draws_drafts=draws_drafts)
    with pytest.raises(FloatingPointError):
        session.draft(3, np.random.default_rng(0))
    with pytest.raises(FloatingPointError):
        session.predict(windows_of(trajectory))


def test_shapes_of_weights_are_those_of_the_description() -> None:
    weights = initial_hydra_weights(16, 8, torch.Generator().manual_seed(0))
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == hydra_shapes(16, 8)
    assert not weights["out"].any()
    assert weights["gain"].eq(0.5).all()


def test_frequent_tokens_are_chosen_by_count_then_filled_with_low_ids() -> None:
    counts = {30: 5, 7: 9, 12: 5, 39: 1}
    assert frequent_tokens(counts, size=2, vocab_size=40).token_ids.tolist() == [7, 12]
    assert frequent_tokens(counts, size=3, vocab_size=40).token_ids.tolist() == [7, 12, 30]
    found = frequent_tokens(counts, size=7, vocab_size=40).token_ids.tolist()
    assert found == [0, 1, 2, 7, 12, 30, 39]
    assert len(frequent_tokens({}, size=99, vocab_size=40).token_ids) == 40


def test_a_draft_vocabulary_is_its_set_of_tokens() -> None:
    one, same = DraftVocabulary.of([5, 1, 9]), DraftVocabulary.of([9, 5, 1])
    assert one.token_ids.tolist() == [1, 5, 9]
    assert one.sha256 == same.sha256
    assert one.sha256 != DraftVocabulary.of([1, 5, 8]).sha256
    assert head(tiny_llama(), 1).version.draft_vocabulary_hash


@pytest.mark.parametrize("token_ids", [[], [1, 2, 1]])
def test_invalid_draft_vocabulary_is_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match=f"{len(token_ids)} draft tokens"):
        DraftVocabulary.of(token_ids)


def test_tokens_that_the_request_has_seen_can_be_proposed_and_no_others() -> None:
    target = tiny_llama()
    trajectory = verified(target, SamplingParams())
    one = head(target, 3)
    seen = SeenTokens(one.rows, trajectory)
    seen.catch_up()
    vocabulary = set(one.rows.vocabulary.token_ids.tolist())
    assert set(seen.token_ids.tolist()) == set(trajectory.token_ids) - vocabulary
    for token, position in zip(seen.token_ids.tolist(), seen.first_positions, strict=True):
        assert trajectory.token_ids.index(token) == position
    last = int(seen.first_positions[-1])
    states = torch.randn(2, target.hidden_size)
    logits = seen.logits(states, np.array([last, last + 1]))
    assert logits[0, -1] == -torch.inf
    torch.testing.assert_close(logits[1], states[1] @ target.head_rows[seen.token_ids].T)
