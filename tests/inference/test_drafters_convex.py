"""The convex head: convex it is, what it drafts is what it is scored on, and it learns."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from inference.drafters.convex import MAPS, ConvexDrafter, convex_shapes
from inference.drafters.convex_training import TrainableConvex
from inference.drafters.frozen_rows import VOCABULARY, FrozenRows, frequent_tokens
from inference.ports import WindowBatch
from inference.sampling import SamplingParams
from inference.target import Target
from learner.examples import TrainingBatch
from learner.updates.losses import LossSettings
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.optimistic import OptimisticGradient, OptimisticSettings
from learner.updates.regret_report import regret_report, stream_minimisers
from learner.updates.rule import guarded_gradient
from tests.inference.test_drafters_hydra import LEVELS, SAMPLED, cut, verified, windows_of
from tests.inference.tiny import VOCAB_SIZE, tiny_llama


def rows_of(target: Target, size: int = 25) -> FrozenRows:
    """Return the frozen rows of the most frequent tokens, the even ones first."""
    counts = {token: 1 for token in range(0, VOCAB_SIZE, 2)}
    vocabulary = frequent_tokens(counts, size=size, vocab_size=VOCAB_SIZE)
    return FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)


def trainable_of(target: Target, *, rank: int | None = 6, size: int = 25) -> TrainableConvex:
    """Return a head to train."""
    return TrainableConvex("convex", rows_of(target, size), num_levels=LEVELS, rank=rank, seed=4)


def head(target: Target, seed: int, *, rank: int | None = 6) -> ConvexDrafter:
    """Return a head with random maps."""
    source = trainable_of(target, rank=rank)
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(source.initial_weights()[MAPS].shape, generator=generator) * 0.4
    tensors = source.artifact({MAPS: maps})
    del tensors[VOCABULARY]
    return ConvexDrafter("convex", seed, tensors, rows_of(target))


def batch_of(seed: int, *, num_examples: int = 12) -> TrainingBatch:
    """Return random examples with a record of the target."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_examples, LEVELS)
    mass = torch.rand((*shape, 4), generator=generator)
    draw = partial(torch.randint, 0, VOCAB_SIZE, generator=generator)
    return TrainingBatch(
        hidden=torch.randn((num_examples, 16), generator=generator),
        fed_token_ids=draw(shape),
        label_token_ids=draw(shape),
        top_token_ids=torch.rand((*shape, VOCAB_SIZE), generator=generator).topk(3).indices,
        top_probabilities=(mass / mass.sum(-1, keepdim=True))[..., :3],
    )


@pytest.mark.parametrize("rank", [6, None])
def test_the_loss_is_convex_in_the_weights(rank: int | None) -> None:
    """Along any line, halfway costs no more than the mean of the ends."""
    source = trainable_of(tiny_llama(2), rank=rank)
    shape = source.initial_weights()[MAPS].shape
    generator = torch.Generator().manual_seed(0)
    for seed in range(10):
        batch = batch_of(seed)
        first, second = (torch.randn(shape, generator=generator) for _ in range(2))
        ends = [float(source.loss({MAPS: one}, batch)) for one in (first, second)]
        middle = float(source.loss({MAPS: (first + second) / 2.0}, batch))
        assert middle <= sum(ends) / 2.0 + 1e-5
        assert middle < sum(ends) / 2.0 - 1e-3


def test_the_gradient_changes_no_faster_than_the_smoothness_says() -> None:
    source = trainable_of(tiny_llama(2))
    shape = source.initial_weights()[MAPS].shape
    generator = torch.Generator().manual_seed(0)
    for seed in range(5):
        batch = batch_of(seed)
        points = [torch.randn(shape, generator=generator) * 0.05 for _ in range(2)]
        slopes = [
            guarded_gradient(
                partial(source.loss, batch=batch), {MAPS: one}, max_norm=float("inf")
            ).tensors[MAPS]
            for one in points
        ]
        change = float((slopes[1] - slopes[0]).norm() / (points[1] - points[0]).norm())
        assert 0.0 < change <= source.smoothness(batch)


@pytest.mark.parametrize("term", ["counts_tail", "acceptance_weight", "negative_weight"])
def test_terms_that_are_not_convex_have_no_smoothness(term: str) -> None:
    terms = LossSettings(**{term: 1.0})  # type: ignore[arg-type]
    source = TrainableConvex(
        "convex", rows_of(tiny_llama()), num_levels=LEVELS, loss_settings=terms
    )
    with pytest.raises(ValueError, match="is not convex"):
        source.smoothness(batch_of(0))


def test_the_head_keeps_the_bounds_of_theory_on_recorded_examples() -> None:
    """Not a toy model of the head, but the head: loss, minimisers, regret and bounds."""
    source = trainable_of(tiny_llama(2))
    batches = [batch_of(seed // 2) for seed in range(8)]
    losses = [partial(source.loss, batch=batch) for batch in batches]
    start, radius = source.initial_weights(), 0.5
    smooth = [source.smoothness(batch) for batch in batches]
    minimisers = stream_minimisers(
        losses, start, radius=radius, smoothness=smooth, tolerance=0.05, max_steps=300
    )
    gradient = OnlineGradientSettings(
        form="projected",
        learning_rate=0.02,
        radius=radius,
        max_gradient_norm=float("inf"),
        max_step_norm=float("inf"),
    )
    for rule, delays in (
        (OnlineGradient(start, gradient), None),
        (OnlineGradient(start, gradient), [2] * 8),
        (OptimisticGradient(start, OptimisticSettings(gradient=gradient)), None),
    ):
        report = regret_report(rule, losses, minimisers, radius=radius, delays=delays)
        assert report.regret > 0.0
        assert report.keeps_bound
        assert (report.hint_error is None) == (report.rule == "online_gradient")
    assert report.path_length > 0.0


def test_an_untrained_head_is_the_targets_head_one_position_too_early() -> None:
    target = tiny_llama()
    source = trainable_of(target, size=VOCAB_SIZE)
    tensors = source.artifact(source.initial_weights())
    del tensors[VOCABULARY]
    drafter = ConvexDrafter("convex", 0, tensors, rows_of(target, VOCAB_SIZE))
    trajectory = verified(target, SamplingParams())
    state = trajectory.hidden(len(trajectory) - 1, len(trajectory))[0]
    session = drafter.start(trajectory, stream="s", draws_drafts=False)
    expected = int((target.head_rows @ state).argmax())
    assert session.draft(3, np.random.default_rng(0)).token_ids == (expected,) * 3


@pytest.mark.parametrize("rank", [6, None])
def test_predictions_equal_drafts_as_long_as_all_levels_before_were_right(
    rank: int | None,
) -> None:
    target = tiny_llama()
    trajectory = verified(target, SamplingParams())
    one = head(target, 1, rank=rank)
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


def test_drawn_drafts_carry_the_distributions_that_windows_are_scored_with() -> None:
    target = tiny_llama()
    one = head(target, 3)
    trajectory = verified(target, SAMPLED)
    windows = windows_of(trajectory)
    scored = one.start(trajectory, stream="s", draws_drafts=True).predict(windows).probs
    assert scored is not None
    for start, row in zip(windows.starts, scored, strict=True):
        shorter = cut(trajectory, target, int(start))
        session = one.start(shorter, stream="s", draws_drafts=True)
        draft = session.draft(2, np.random.default_rng(int(start)))
        assert draft.probs is not None
        torch.testing.assert_close(draft.probs[0], row[0], atol=1e-5, rtol=1e-4)
        assert draft.probs[1, draft.token_ids[1]] > 0


def test_training_and_serving_compute_the_same() -> None:
    """B1: the loss of the examples of a request is that of the served distributions."""
    target = tiny_llama()
    source = trainable_of(target)
    trajectory = verified(target, SamplingParams(temperature=1.0))
    start = 12
    maps = torch.randn(
        source.initial_weights()[MAPS].shape, generator=torch.Generator().manual_seed(5)
    )
    tensors = source.artifact({MAPS: maps})
    del tensors[VOCABULARY]
    session = ConvexDrafter("convex", 0, tensors, rows_of(target)).start(
        trajectory, stream="s", draws_drafts=True
    )
    session.seen.catch_up = lambda: None  # type: ignore[method-assign]  # the vocabulary alone
    windows = WindowBatch(
        starts=np.array([start]), num_levels=np.array([LEVELS]), num_speculative_tokens=LEVELS
    )
    probs = session.predict(windows).probs
    assert probs is not None
    tokens = torch.tensor(trajectory.token_ids)
    batch = TrainingBatch(
        hidden=trajectory.hidden(start - 1, start),
        fed_token_ids=tokens[None, start - 1 : start - 1 + LEVELS],
        label_token_ids=tokens[None, start : start + LEVELS],
        top_token_ids=torch.zeros((1, LEVELS, 0), dtype=torch.int64),
        top_probabilities=torch.zeros((1, LEVELS, 0)),
    )
    found = probs[0, torch.arange(LEVELS), tokens[start : start + LEVELS]]
    terms = torch.where(found > 0, -found.log(), 0.0)
    expected = sum(0.5 * 0.8**level * float(term) for level, term in enumerate(terms))
    assert float((found > 0).sum()) >= 1
    assert float(source.loss({MAPS: maps}, batch)) == pytest.approx(expected, rel=1e-4)


def test_levels_beyond_the_trained_ones_use_the_last_map() -> None:
    target = tiny_llama()
    trajectory = verified(target, SamplingParams())
    one = head(target, 6)
    draft = one.start(trajectory, stream="s", draws_drafts=False).draft(
        LEVELS + 2, np.random.default_rng(0)
    )
    assert len(draft.token_ids) == LEVELS + 2


def test_it_learns_what_repeats() -> None:
    source = trainable_of(tiny_llama(2), rank=None)
    update = OnlineGradient(source.initial_weights(), OnlineGradientSettings(learning_rate=0.05))
    batch = batch_of(3)
    losses = [update.step(partial(source.loss, batch=batch)).loss for _ in range(60)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("draws_drafts", [False, True])
def test_weights_that_are_not_finite_are_refused_at_work(draws_drafts: bool) -> None:
    target = tiny_llama()
    trajectory = verified(target, SAMPLED if draws_drafts else SamplingParams())
    one = head(target, 8)
    one.weights[MAPS][:] = float("nan")
    broken = ConvexDrafter("convex", 0, one.weights, one.rows)
    session = broken.start(trajectory, stream="s", draws_drafts=draws_drafts)
    with pytest.raises(FloatingPointError):
        session.draft(3, np.random.default_rng(0))
    with pytest.raises(FloatingPointError):
        session.predict(windows_of(trajectory))


def test_shapes_of_weights_are_those_of_the_description() -> None:
    tensors = trainable_of(tiny_llama()).artifact(trainable_of(tiny_llama()).initial_weights())
    del tensors[VOCABULARY]
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert found == convex_shapes(LEVELS, 16, 6)
    assert not tensors[MAPS].any()


def test_levels_that_are_known_already_change_nothing_behind_them() -> None:
    target = tiny_llama()
    trajectory = verified(target, SamplingParams())
    session = head(target, 3).start(trajectory, stream="s", draws_drafts=False)
    windows = windows_of(trajectory)
    whole = session.predict(windows).proposals
    rest = session.predict(replace(windows, num_known_levels=2)).proposals
    assert whole is not None
    assert rest is not None
    assert rest.shape == whole.shape
    assert np.array_equal(rest[:, 2:], whole[:, 2:])
