"""Examples are aligned as serving is, and the memory holds the newest."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from learner.examples import ExampleMemory, Segment, TrainingBatch

LEVELS = 3


def segment(offset: int, length: int, *, partition: int = 0) -> Segment:
    """Return a segment whose tokens and states tell where they come from."""
    first = 1000 * partition + 100 * offset
    tokens = first + np.arange(length)
    return Segment(
        partition=partition,
        offset=offset,
        hidden=np.repeat(tokens[:, None], 2, axis=1).astype(np.float32),
        token_ids=tokens,
        top_token_ids=np.stack([tokens, tokens + 1], axis=1),
        top_probabilities=np.repeat(np.array([[0.75, 0.25]], np.float32), length, axis=0),
    )


def drawn(memory: ExampleMemory, size: int, seed: int = 0) -> TrainingBatch:
    """Draw a batch that must exist."""
    batch = memory.draw(size, LEVELS, np.random.default_rng(seed))
    assert batch is not None
    return batch


def test_inputs_and_labels_are_aligned_as_serving_aligns_them() -> None:
    """B1: the state that predicted a token is fed that token and is to predict the next."""
    memory = ExampleMemory(100)
    memory.add(segment(0, 6))
    batch = drawn(memory, 99)
    order = np.argsort(batch.fed_token_ids[:, 0].numpy())
    assert batch.hidden[order, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert batch.fed_token_ids[order].tolist() == [
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 5],
        [4, 5, 0],
    ]
    assert batch.label_token_ids[order].tolist() == [
        [1, 2, 3],
        [2, 3, 4],
        [3, 4, 5],
        [4, 5, -1],
        [5, -1, -1],
    ]


def test_no_example_reaches_over_the_end_of_its_segment() -> None:
    memory = ExampleMemory(100)
    for offset, length in enumerate((1, 4, 0, 2, 7)):
        memory.add(segment(offset, length))
    batch = drawn(memory, 99)
    fed, labels = batch.fed_token_ids.numpy(), batch.label_token_ids.numpy()
    assert len(fed) == 3 + 1 + 6
    assert (labels[:, 0] == fed[:, 0] + 1).all()
    known = labels >= 0
    assert (labels[known] // 100 == np.repeat(fed[:, :1] // 100, LEVELS, axis=1)[known]).all()
    assert (batch.hidden[:, 0].numpy() == fed[:, 0]).all()


def test_a_batch_repeats_no_example_and_all_are_equally_likely() -> None:
    memory = ExampleMemory(100)
    memory.add(segment(0, 3))
    memory.add(segment(1, 9))
    counts: dict[int, int] = {}
    for seed in range(2000):
        fed = drawn(memory, 4, seed).fed_token_ids[:, 0].tolist()
        assert len(set(fed)) == 4
        for token in fed:
            counts[token] = counts.get(token, 0) + 1
    assert sorted(counts) == [0, 1, *range(100, 108)]
    # Each of ten is in a batch with chance 0.4: 800 of 2000, standard deviation 22.
    assert max(abs(count - 800) for count in counts.values()) < 90


def test_the_same_dice_draw_the_same_batch() -> None:
    memory = ExampleMemory(100)
    memory.add(segment(0, 50))
    left, right = drawn(memory, 8, 3), drawn(memory, 8, 3)
    assert left.fed_token_ids.equal(right.fed_token_ids)
    assert not left.fed_token_ids.equal(drawn(memory, 8, 4).fed_token_ids)


def test_the_memory_forgets_the_oldest_beyond_its_bound() -> None:
    memory = ExampleMemory(10)
    for offset in range(5):
        memory.add(segment(offset, 4))
    assert memory.first_offsets() == {0: 3}
    assert set((drawn(memory, 99).fed_token_ids[:, 0] // 100).tolist()) == {3, 4}


def test_the_newest_segment_is_kept_even_if_it_is_too_long() -> None:
    memory = ExampleMemory(3)
    memory.add(segment(0, 2))
    memory.add(segment(1, 9))
    assert memory.first_offsets() == {0: 1}
    assert len(drawn(memory, 99).hidden) == 8


def test_first_offsets_are_per_partition() -> None:
    memory = ExampleMemory(100)
    for partition, offset in ((1, 4), (0, 7), (1, 5), (0, 8)):
        memory.add(segment(offset, 2, partition=partition))
    assert memory.first_offsets() == {1: 4, 0: 7}


@pytest.mark.parametrize("lengths", [[], [0], [1, 1, 0]])
def test_nothing_is_drawn_where_nothing_can_be_learned(lengths: list[int]) -> None:
    memory = ExampleMemory(100)
    for offset, length in enumerate(lengths):
        memory.add(segment(offset, length))
    assert memory.draw(4, LEVELS, np.random.default_rng(0)) is None


def test_the_targets_distribution_stands_at_the_position_of_its_label() -> None:
    memory = ExampleMemory(100)
    memory.add(segment(0, 6))
    memory.add(replace_top(segment(1, 6), 0))
    batch = drawn(memory, 99)
    is_known = batch.label_token_ids >= 0
    has_top = batch.top_probabilities.sum(-1) > 0
    first = batch.label_token_ids[:, 0] < 100
    assert torch.equal(has_top[first], is_known[first])
    assert not has_top[~first].any(), "nothing was recorded there"
    assert torch.equal(batch.top_token_ids[..., 0][has_top], batch.label_token_ids[has_top])
    assert torch.equal(
        batch.top_probabilities[has_top], torch.tensor([[0.75, 0.25]]).expand(int(has_top.sum()), 2)
    )


def replace_top(one: Segment, num_top: int) -> Segment:
    """Return the segment with only ``num_top`` tokens of the distribution."""
    return replace(
        one,
        top_token_ids=one.top_token_ids[:, :num_top],
        top_probabilities=one.top_probabilities[:, :num_top],
    )


def test_the_context_is_what_stood_before_and_never_reaches_into_another_segment() -> None:
    memory = ExampleMemory(100)
    memory.add(segment(0, 5))
    memory.add(segment(1, 3))
    batch = memory.draw(99, LEVELS, np.random.default_rng(0), num_context=3)
    assert batch is not None
    order = np.argsort(batch.fed_token_ids[:, 0].numpy())
    assert batch.context_token_ids[order].tolist() == [
        [-1, -1, -1],
        [-1, -1, 0],
        [-1, 0, 1],
        [0, 1, 2],
        [-1, -1, -1],
        [-1, -1, 100],
    ]
    expected = batch.context_token_ids.clamp_min(0).float()
    assert torch.equal(batch.context_hidden[..., 0], expected)


def test_without_a_context_nothing_else_changes() -> None:
    memory = ExampleMemory(100)
    memory.add(segment(0, 9))
    plain = drawn(memory, 4)
    more = memory.draw(4, LEVELS, np.random.default_rng(0), num_context=2)
    assert more is not None
    assert torch.equal(plain.hidden, more.hidden)
    assert torch.equal(plain.label_token_ids, more.label_token_ids)
    assert plain.context_token_ids.shape == (4, 0)
