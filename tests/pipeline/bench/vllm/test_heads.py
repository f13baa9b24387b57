"""The head that the vLLM benchmark releases: trained on what is there, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from inference.drafters.frozen_rows import DraftVocabulary, FrozenRows
from inference.drafters.hydra_training import TrainableHydra
from learner.examples import ExampleMemory, Segment
from pipeline.bench.vllm.heads import trained_weights

NUM_TOKENS, HIDDEN_SIZE, INNER_SIZE = 12, 16, 8
QUIET = Console(quiet=True)


@pytest.fixture
def rows() -> FrozenRows:
    table = torch.randn(NUM_TOKENS, HIDDEN_SIZE, generator=torch.Generator().manual_seed(0))
    return FrozenRows.of(table, table, DraftVocabulary.of(list(range(NUM_TOKENS))))


@pytest.fixture
def counting() -> Segment:
    """Text that counts up, with states that say nothing of it."""
    token_ids = np.arange(60) % NUM_TOKENS
    return Segment(
        partition=0,
        offset=0,
        hidden=np.zeros((60, HIDDEN_SIZE), dtype=np.float32),
        token_ids=token_ids,
        top_token_ids=token_ids[:, None],
        top_probabilities=np.ones((60, 1), dtype=np.float32),
    )


def test_it_learns_what_the_answers_show(rows: FrozenRows, counting: Segment) -> None:
    head = TrainableHydra("head", rows, inner_size=INNER_SIZE)
    memory = ExampleMemory(100)
    memory.add(counting)
    batch = memory.draw(60, 4, np.random.default_rng(1))
    assert batch is not None
    found = trained_weights(rows, [counting], 300, inner_size=INNER_SIZE, console=QUIET)
    untrained = head.initial_weights()
    assert found.keys() == untrained.keys(), "the vocabulary is not its to give"
    assert head.loss(found, batch) < 0.2 * head.loss(untrained, batch)
    again = trained_weights(rows, [counting], 300, inner_size=INNER_SIZE, console=QUIET)
    assert all(torch.equal(found[name], again[name]) for name in found)


def test_answers_without_an_example_are_told(rows: FrozenRows, counting: Segment) -> None:
    one = replace(
        counting,
        hidden=counting.hidden[:1],
        token_ids=counting.token_ids[:1],
        top_token_ids=counting.top_token_ids[:1],
        top_probabilities=counting.top_probabilities[:1],
    )
    with pytest.raises(ValueError, match="no training example"):
        trained_weights(rows, [one], 5, inner_size=INNER_SIZE, console=QUIET)
