"""Heads inside vLLM: asked where they pay, scored by coin, swapped between steps, switched off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from inference.drafters.frozen_rows import DraftVocabulary, FrozenRows
from inference.drafters.hydra import HydraDrafter
from inference.drafters.nothing import NothingDrafter
from inference.vllm_plugin.batch import BatchDrafter
from inference.vllm_plugin.guard import MOST_IN_A_ROW
from tests.inference.vllm_fakes import HIDDEN_SIZE, LOOKUPS, FakeEngine, Kept, connection, member

VOCAB = HIDDEN_SIZE
K = 4
POOL = (*LOOKUPS, member("head", "hydra"))


def successor(tokens: Sequence[int]) -> int:
    """The target: a walk over all tokens, so that lookups have nothing to find at first."""
    return (tokens[-1] * 5 + 3) % VOCAB


def head(
    next_of: Sequence[int], *, version: int = 1, drafter_id: str = "head", value: float = 1.0
) -> HydraDrafter:
    """Return a head that says ``next_of[token]`` behind every token, whatever the state.

    With one-hot rows, each level adds the row of what it says and takes away the row it was told.
    """
    eye = torch.eye(VOCAB)
    rows = FrozenRows.of(eye, eye, DraftVocabulary.of(range(VOCAB)))
    says = torch.zeros(VOCAB, VOCAB)
    says[list(next_of), torch.arange(VOCAB)] = 1.0
    inner = 2
    weights = {
        "mix": torch.zeros(inner, 2 * VOCAB),
        "out": torch.cat([torch.zeros(VOCAB, inner), (says - eye) * value], dim=1),
        "gain": torch.full((VOCAB,), 4.0),
    }
    return HydraDrafter(drafter_id, version, weights, rows)


RIGHT = [successor([token]) for token in range(VOCAB)]
WRONG = [(successor([token]) + 1) % VOCAB for token in range(VOCAB)]


def fresh_engine(kept: Kept, **options: Any) -> tuple[BatchDrafter, FakeEngine]:
    batch = BatchDrafter(connection(kept, POOL, **options), num_levels=K, max_positions=512)
    return batch, FakeEngine(batch.step, successor)


@pytest.fixture
def kept() -> Kept:
    return Kept()


def played(kept: Kept, place: int) -> float:
    rounds = [event.rounds for event in kept.events]
    index = np.concatenate([one.drafter_index for one in rounds])
    return float((index == place).mean())


def test_a_head_before_its_first_release_is_never_asked(kept: Kept) -> None:
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 8)
    engine.run()
    batch.close()
    assert played(kept, 3) == 0.0


def test_before_the_first_release_every_window_is_scored_and_heads_propose_nothing(
    kept: Kept,
) -> None:
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 20)
    engine.run()
    batch.close()
    (event,) = kept.of_request("a")
    assert event.windows.start.tolist() == list(range(2, 20))
    heads = event.windows.realised_acceptance[..., 3]
    assert not heads[~np.isnan(heads)].any()


def test_a_head_that_knows_drafts_where_lookups_cannot(kept: Kept) -> None:
    kept.waiting = [head(RIGHT)]
    batch, engine = fresh_engine(kept)
    for number in range(12):
        engine.add(f"r-{number}", [number % VOCAB], 6, stream=f"s-{number}")
    engine.run()
    batch.close()
    assert played(kept, 3) > 0.3
    accepted = kept.counts["accepted_tokens", "head"] / kept.counts["draft_tokens", "head"]
    assert accepted > 0.9


def test_a_head_that_is_wrong_is_asked_less_and_less(kept: Kept) -> None:
    kept.waiting = [head(WRONG)]
    batch, engine = fresh_engine(kept, scoring_share=0.0)
    for number in range(40):
        engine.add(f"r-{number}", [number % VOCAB], 6, stream=f"s-{number}")
    engine.run()
    batch.close()
    late = Kept(events=kept.events[-20:])
    assert played(late, 3) < 0.1


def test_only_windows_of_the_coin_are_reported_and_they_hold_all_drafters(kept: Kept) -> None:
    kept.waiting = [head(RIGHT)]
    batch, engine = fresh_engine(kept)
    for number in range(6):
        engine.add(f"r-{number}", [number % VOCAB], 12)
    engine.run()
    batch.close()
    windows = [event.windows for event in kept.events]
    agrees = np.concatenate([one.realised_acceptance for one in windows])
    assert len(agrees)
    exists = ~np.isnan(agrees[..., 0])
    assert (agrees[..., 3][exists] == 1.0).all()


def test_a_release_is_taken_up_between_steps_and_events_name_one_version(kept: Kept) -> None:
    kept.waiting = [head(WRONG, version=1)]
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 30)
    for _ in range(5):
        engine.step()
    kept.waiting = [head(RIGHT, version=2)]
    engine.run()
    batch.close()
    events = kept.of_request("a")
    versions = [event.drafters[3].weights_version for event in events]
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    assert sum(event.num_positions for event in events) == 30


def test_a_broken_head_is_off_after_three_failures_and_on_with_its_next_release(
    kept: Kept,
) -> None:
    kept.waiting = [head(RIGHT, value=float("nan"))]
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 20)
    engine.run()
    assert batch.guard.is_off("head head")
    assert kept.counts["failures", "head head"] == MOST_IN_A_ROW
    kept.waiting = [head(RIGHT, version=2)]
    for number in range(8):
        engine.add(f"r-{number}", [number % VOCAB], 6, stream=f"s-{number}")
    engine.run()
    batch.close()
    assert not batch.guard.is_off("head head")
    assert kept.counts["draft_tokens", "head"] > 0


def test_a_retired_head_drafts_no_more(kept: Kept) -> None:
    kept.waiting = [head(RIGHT)]
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 6)
    engine.run()
    kept.waiting = [NothingDrafter("head")]
    engine.add("b", [2], 6, stream="other")
    engine.run()
    batch.close()
    (event,) = kept.of_request("b")
    assert not (event.rounds.drafter_index == 3).any()


def test_a_release_of_nobodys_head_is_passed_over(kept: Kept) -> None:
    kept.waiting = [head(RIGHT, drafter_id="stranger")]
    batch, engine = fresh_engine(kept)
    engine.add("a", [1], 6)
    engine.run()
    batch.close()
    assert played(kept, 3) == 0.0
