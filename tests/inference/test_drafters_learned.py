"""Heads that read what stood before: served as they are trained, scored as they draft."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from inference.drafters.eagle import SIZES, EagleDrafter, eagle_shapes
from inference.drafters.eagle_training import TrainableEagle
from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary, FrozenRows, frequent_tokens
from inference.drafters.token_lm import TokenLmDrafter, token_lm_shapes
from inference.drafters.token_lm_training import TrainableTokenLm
from inference.ports import WindowBatch
from inference.sampling import SamplingParams
from inference.target import Target
from inference.trajectory import Trajectory
from learner.examples import ExampleMemory, Segment, TrainingBatch
from learner.updates.losses import LossSettings
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from tests.inference.test_drafters_hydra import LEVELS, SAMPLED, cut, verified, windows_of
from tests.inference.tiny import VOCAB_SIZE, tiny_llama

KINDS = ["eagle", "token_lm"]
CONTEXT = 5
Trainable = TrainableEagle | TrainableTokenLm
Drafter = EagleDrafter | TokenLmDrafter


def rows_of(target: Target, size: int = 25) -> FrozenRows:
    """Return the frozen rows of the even tokens first."""
    counts = {token: 1 for token in range(0, VOCAB_SIZE, 2)}
    vocabulary = frequent_tokens(counts, size=size, vocab_size=VOCAB_SIZE)
    return FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)


def trainable_of(kind: str, target: Target, *, size: int = 25) -> Trainable:
    """Return a head to train; the emitted token alone counts."""
    terms = LossSettings(emitted_weight=1.0, soft_weight=0.0)
    rows = rows_of(target, size)
    if kind == "eagle":
        return TrainableEagle(
            "head", rows, inner_size=8, num_heads=2, num_context=CONTEXT, loss_settings=terms
        )
    return TrainableTokenLm(
        "head", rows, inner_size=32, rank=8, num_read=CONTEXT + 1, loss_settings=terms
    )


def random_weights(source: Trainable, seed: int) -> dict[str, torch.Tensor]:
    """Return weights far from the untrained ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.4 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in source.initial_weights().items()
    }


def served(source: Trainable, weights: dict[str, torch.Tensor], rows: FrozenRows) -> Drafter:
    """Return what serves these weights."""
    tensors = source.artifact(weights)
    del tensors[VOCABULARY]
    kind = EagleDrafter if isinstance(source, TrainableEagle) else TokenLmDrafter
    return kind("head", 3, tensors, rows)


def drafter_of(kind: str, target: Target, seed: int = 1) -> Drafter:
    """Return a head with random weights."""
    source = trainable_of(kind, target)
    return served(source, random_weights(source, seed), rows_of(target))


def segment_of(trajectory: Trajectory) -> Segment:
    """Return the request's output as it would be recorded."""
    first = trajectory.num_prompt_tokens
    tokens = np.asarray(trajectory.token_ids[first:])
    return Segment(
        partition=0,
        offset=0,
        hidden=trajectory.hidden(first, len(trajectory)).numpy(),
        token_ids=tokens,
        top_token_ids=np.zeros((len(tokens), 0), dtype=np.int64),
        top_probabilities=np.zeros((len(tokens), 0), dtype=np.float32),
    )


def examples_of(trajectory: Trajectory) -> TrainingBatch:
    """Return every example of the request's output."""
    memory = ExampleMemory(1000)
    memory.add(segment_of(trajectory))
    batch = memory.draw(1000, LEVELS, np.random.default_rng(0), num_context=CONTEXT)
    assert batch is not None
    return batch


@pytest.mark.parametrize("kind", KINDS)
def test_predictions_equal_drafts_as_long_as_all_levels_before_were_right(kind: str) -> None:
    target = tiny_llama()
    trajectory = verified(target, SamplingParams())
    one = drafter_of(kind, target)
    windows = windows_of(trajectory)
    proposals = one.start(trajectory, stream="s", draws_drafts=False).predict(windows).proposals
    assert proposals is not None
    num_checked = 0
    for start, row in zip(windows.starts, proposals, strict=True):
        session = one.start(cut(trajectory, target, int(start)), stream="s", draws_drafts=False)
        draft = session.draft(LEVELS, np.random.default_rng(0)).token_ids
        for level in range(LEVELS):
            if list(draft[:level]) != trajectory.token_ids[start : start + level]:
                break
            assert row[level] == draft[level]
            num_checked += 1
    assert num_checked >= len(windows.starts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_session_that_grows_says_what_a_fresh_one_says(kind: str) -> None:
    """Keys and values that were kept are those of a fresh session."""
    target = tiny_llama()
    whole = verified(target, SamplingParams())
    one = drafter_of(kind, target)
    growing = cut(whole, target, 8)
    session = one.start(growing, stream="s", draws_drafts=False)
    for length in (9, 10, 14, 22):
        known = len(growing)
        growing.extend(whole.token_ids[known:length], whole.hidden(known, length), None)
        fresh = one.start(cut(whole, target, length), stream="s", draws_drafts=False)
        rng = np.random.default_rng(0)
        assert session.draft(LEVELS, rng) == fresh.draft(LEVELS, rng)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_drafts_carry_the_distributions_that_windows_are_scored_with(kind: str) -> None:
    target = tiny_llama()
    one = drafter_of(kind, target)
    trajectory = verified(target, SAMPLED)
    windows = windows_of(trajectory)
    scored = one.start(trajectory, stream="s", draws_drafts=True).predict(windows).probs
    assert scored is not None
    assert scored.shape == (len(windows.starts), LEVELS, VOCAB_SIZE)
    for start, row in zip(windows.starts, scored, strict=True):
        shorter = cut(trajectory, target, int(start))
        session = one.start(shorter, stream="s", draws_drafts=True)
        draft = session.draft(2, np.random.default_rng(int(start)))
        assert draft.probs is not None
        torch.testing.assert_close(draft.probs[0], row[0], atol=1e-5, rtol=1e-4)
        assert draft.probs[1, draft.token_ids[1]] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_serving_compute_the_same(kind: str) -> None:
    """B1: the loss of a recorded window is that of the distributions it would be served with."""
    target = tiny_llama()
    source = trainable_of(kind, target)
    weights = random_weights(source, 2)
    # Its prompt is one token long, so that what is recorded is all there is to read.
    first = verified(target, SamplingParams(temperature=1.0))
    trajectory = Trajectory(
        first.token_ids[5:6],
        first.params,
        max_output_tokens=64,
        hidden_size=target.hidden_size,
        dtype=target.dtype,
        device=target.device,
    )
    trajectory.extend(first.token_ids[6:], first.hidden(6, len(first)), None)
    session = served(source, weights, rows_of(target)).start(
        trajectory, stream="s", draws_drafts=True
    )
    session.seen.catch_up = lambda: None  # type: ignore[method-assign]  # the vocabulary alone
    batch = examples_of(trajectory)
    order = batch.fed_token_ids.shape[0]
    starts = np.arange(1 + CONTEXT + 1, len(trajectory) - LEVELS)
    windows = WindowBatch(
        starts=starts, num_levels=np.full(len(starts), LEVELS), num_speculative_tokens=LEVELS
    )
    probs = session.predict(windows).probs
    assert probs is not None
    tokens = torch.tensor(trajectory.token_ids)
    num_checked = 0
    for row, start in zip(probs, starts.tolist(), strict=True):
        newest = trajectory.hidden(start - 1, start)[0]
        (place,) = [i for i in range(order) if torch.equal(batch.hidden[i], newest)]
        one = TrainingBatch(
            hidden=batch.hidden[place : place + 1],
            fed_token_ids=batch.fed_token_ids[place : place + 1],
            label_token_ids=batch.label_token_ids[place : place + 1],
            top_token_ids=batch.top_token_ids[place : place + 1],
            top_probabilities=batch.top_probabilities[place : place + 1],
            context_hidden=batch.context_hidden[place : place + 1],
            context_token_ids=batch.context_token_ids[place : place + 1],
        )
        found = row[torch.arange(LEVELS), tokens[start : start + LEVELS]]
        terms = torch.where(found > 0, -found.log(), 0.0).tolist()
        expected = sum(0.8**level * term for level, term in enumerate(terms))
        assert float(source.loss(weights, one)) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        num_checked += int((found > 0).sum())
    assert num_checked >= len(starts)


@pytest.mark.parametrize("kind", KINDS)
def test_what_stood_before_is_read_as_far_back_as_it_says(kind: str) -> None:
    target = tiny_llama()
    params = SamplingParams(temperature=1.0)
    one = drafter_of(kind, target)
    # Flat distributions: sure ones would all be the same.
    one.weights["final_norm" if kind == "eagle" else "out"].mul_(0.02)
    trajectory = verified(target, params)
    length = len(trajectory)

    def probs_with(position: int) -> torch.Tensor:
        """Return what follows when the token at a position was another one."""
        other = verified(target, params)
        other.token_ids[position] = (other.token_ids[position] + 2) % VOCAB_SIZE
        session = one.start(other, stream="s", draws_drafts=True)
        session.seen.catch_up = lambda: None  # type: ignore[method-assign]
        draft = session.draft(1, np.random.default_rng(0))
        assert draft.probs is not None
        return draft.probs[0]

    plain = probs_with(2)  # in the prompt, further back than anything is read
    assert not torch.equal(probs_with(length - 1), plain)
    assert not torch.equal(probs_with(length - 1 - CONTEXT), plain)
    assert torch.equal(probs_with(length - 2 - CONTEXT), plain)


@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_a_text_by_heart_and_drafts_it(kind: str) -> None:
    """B1: training accuracy proves nothing; what is drafted does."""
    target = tiny_llama(2)
    trajectory = verified(target, SamplingParams(), length=24)
    source = trainable_of(kind, target, size=VOCAB_SIZE)
    update = OnlineGradient(source.initial_weights(), OnlineGradientSettings(learning_rate=0.02))
    batch = examples_of(trajectory)
    losses = [update.step(partial(source.loss, batch=batch)).loss for _ in range(300)]
    assert losses[-1] < 0.1 * losses[0]
    one = served(source, update.served_weights, rows_of(target, VOCAB_SIZE))
    starts = range(6 + CONTEXT + 1, len(trajectory) - LEVELS)
    for start in starts:
        session = one.start(cut(trajectory, target, start), stream="s", draws_drafts=False)
        draft = session.draft(LEVELS, np.random.default_rng(0)).token_ids
        assert list(draft) == trajectory.token_ids[start : start + LEVELS]


def test_an_untrained_head_with_attention_is_the_targets_head_one_position_too_early() -> None:
    target = tiny_llama()
    source = trainable_of("eagle", target, size=VOCAB_SIZE)
    one = served(source, source.initial_weights(), rows_of(target, VOCAB_SIZE))
    trajectory = verified(target, SamplingParams())
    state = trajectory.hidden(len(trajectory) - 1, len(trajectory))[0]
    expected = int((target.head_rows @ state).argmax())
    session = one.start(trajectory, stream="s", draws_drafts=False)
    assert session.draft(3, np.random.default_rng(0)).token_ids == (expected,) * 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draws_drafts", [False, True])
def test_weights_that_are_not_finite_are_refused_at_work(kind: str, draws_drafts: bool) -> None:
    target = tiny_llama()
    trajectory = verified(target, SAMPLED if draws_drafts else SamplingParams())
    one = drafter_of(kind, target)
    next(reversed(one.weights.values()))[:] = float("nan")
    session = one.start(trajectory, stream="s", draws_drafts=draws_drafts)
    with pytest.raises(FloatingPointError):
        session.draft(3, np.random.default_rng(0))
    with pytest.raises(FloatingPointError):
        session.predict(windows_of(trajectory))


def test_shapes_of_weights_are_those_of_the_description() -> None:
    target = tiny_llama()
    shapes = {
        "eagle": eagle_shapes(16, 8),
        "token_lm": token_lm_shapes(16, 32, 8, CONTEXT + 1),
    }
    for kind, expected in shapes.items():
        source = trainable_of(kind, target)
        tensors = source.artifact(source.initial_weights())
        del tensors[VOCABULARY]
        assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected


@pytest.mark.parametrize(
    ("num_heads", "num_context", "message"),
    [
        (3, 4, "head: num_heads=3 .* hidden size 16"),
        (16, 4, "head: num_heads=16 .* even size"),
        (2, 0, "head: num_context=0"),
    ],
)
def test_invalid_sizes_of_attention_are_refused(
    num_heads: int, num_context: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainableEagle(
            "head",
            rows_of(tiny_llama()),
            inner_size=8,
            num_heads=num_heads,
            num_context=num_context,
        )


def test_heads_of_attention_are_64_wide_unless_told() -> None:
    for hidden_size, expected in ((16, 1), (128, 2)):
        rows = FrozenRows.of(
            torch.zeros(8, hidden_size), torch.zeros(8, hidden_size), DraftVocabulary.of([1, 2])
        )
        source = TrainableEagle("head", rows, inner_size=8, num_heads=None, num_context=7)
        sizes = source.artifact(source.initial_weights())[SIZES]
        assert sizes.tolist() == [expected, 7]


@pytest.mark.parametrize("kind", KINDS)
def test_levels_that_are_known_already_change_nothing_behind_them(kind: str) -> None:
    target = tiny_llama()
    trajectory = verified(target, SamplingParams())
    session = drafter_of(kind, target).start(trajectory, stream="s", draws_drafts=False)
    windows = windows_of(trajectory)
    whole = session.predict(windows).proposals
    rest = session.predict(replace(windows, num_known_levels=2)).proposals
    assert whole is not None
    assert rest is not None
    assert rest.shape == whole.shape
    assert np.array_equal(rest[:, 2:], whole[:, 2:])
