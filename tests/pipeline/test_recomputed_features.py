"""States computed from tokens are those that the worker had, whatever is cut, forgotten or lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.sampling import SamplingParams
from inference.target import Target, load_target
from learner.online_trainer import OnlineTrainer
from learner.ports import FeatureComputer
from learner.training import DrafterTrainer, TrainingSettings
from pipeline.recomputed_features import RecomputedFeatures
from pipeline.releases.registry import DrafterRegistry
from schemas.events import VerificationEvent
from tests.inference.serving import HiddenStates, Outbox, new_worker, request_of
from tests.inference.tiny import random_prompts, tiny_gemma3, tiny_llama
from tests.learner.fakes import PlacedEvent
from tests.learner.test_training_of_heads import head_of
from tests.learner.trainers import Releases, placed, same, train

NUM_TOKENS = 40
SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=3)


def served(
    target: Target, prompts: Sequence[Sequence[int]], states: HiddenStates | None = None
) -> list[VerificationEvent]:
    """Serve requests in segments of 16 tokens; their events are mingled as two workers' are."""
    per_request = []
    for number, prompt in enumerate(prompts):
        outbox = Outbox()
        worker = new_worker(target, [PromptLookupDrafter()], outbox, states=states)
        worker.serve(request_of(prompt, SAMPLED, request_id=f"request-{number}"))
        worker_id = f"worker-{number}"
        per_request.append([replace(one, worker_id=worker_id) for one in outbox.events])
    return [
        events[index]
        for index in range(max(map(len, per_request)))
        for events in per_request
        if index < len(events)
    ]


def bare(events: Sequence[VerificationEvent]) -> list[VerificationEvent]:
    """Return the events as a worker sends them that records no states."""
    return [
        replace(one, content=replace(one.content, features=None)) for one in events if one.content
    ]


def recorded(event: VerificationEvent, states: HiddenStates) -> NDArray[np.float32]:
    """Return what the worker had."""
    assert event.content is not None
    assert event.content.features is not None
    return states.read(event.content.features)


def computed(
    computer: FeatureComputer, events: Sequence[PlacedEvent]
) -> list[NDArray[np.float32] | None]:
    """Return the states of every event, read in order."""
    found = []
    for received in events:
        computer.follow(received)
        states = computer.read(received)
        found.append(None if states is None else states.hidden)
    return found


@pytest.mark.real_model
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)], ids=["float32", "bfloat16"]
)
def test_states_of_the_real_target_are_the_workers_within_the_number_format(
    smollm2: Path, dtype: torch.dtype, most: float
) -> None:
    target = load_target(smollm2, dtype=dtype)
    texts = ["Name three rivers and three rivers.", "Write a loop in Python that prints names."]
    states = HiddenStates()
    events = served(target, [target.encode(text) for text in texts], states)
    assert len(events) >= 4
    computer = RecomputedFeatures(target, max_cached_positions=10_000)
    for event, found in zip(events, computed(computer, placed(bare(events))), strict=True):
        expected = recorded(event, states)
        assert found is not None
        assert found.shape == expected.shape
        if dtype == torch.float32:
            assert np.abs(found - expected).max() < 1e-4
        error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert error.max() < most
    assert computer.num_positions == sum(event.num_positions for event in events)


@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("positions", [0, 60, 10_000])
def test_a_cache_that_is_too_small_costs_time_and_no_state(
    make: Callable[[int], Target], positions: int
) -> None:
    target, states = make(2), HiddenStates()
    events = served(target, random_prompts(1, count=3, length=12), states)
    computer = RecomputedFeatures(target, max_cached_positions=positions)
    for received in placed(bare(events)):
        (found,) = computed(computer, [received])
        assert computer.num_cached_positions <= positions
        assert found is not None
        original = next(one for one in events if one.event_id == received.event.event_id)
        np.testing.assert_allclose(found, recorded(original, states), atol=1e-4)
    once = 3 * (12 + NUM_TOKENS - 1)
    if positions == 10_000:
        assert computer.num_fed_tokens == once
    else:
        assert computer.num_fed_tokens > once
    assert computer.seconds > 0.0


def test_tokens_of_requests_that_end_are_forgotten_and_of_others_bounded() -> None:
    target = tiny_llama(2)
    events = placed(bare(served(target, random_prompts(1, count=4, length=12))))
    computer = RecomputedFeatures(target, max_cached_positions=10_000, max_tokens=100)
    found = computed(computer, events)
    known = [states is not None for states in found]
    assert known[:3] == [True, True, True]
    assert not all(known)
    assert computer.num_unknown == known.count(False)
    unbounded = RecomputedFeatures(target, max_cached_positions=10_000)
    computed(unbounded, events)
    assert unbounded.num_unknown == 0
    last = events[-1]
    unbounded.follow(replace_event(last, request_id="another", segment_index=3))
    assert unbounded.num_remembered_tokens == 0


def replace_event(received: PlacedEvent, **change: object) -> PlacedEvent:
    """Return it with another event."""
    event = replace(received.event, **change)  # type: ignore[arg-type]
    return PlacedEvent(partition=received.partition, offset=received.offset, event=event)


def test_nothing_is_made_up_where_a_segment_is_missing() -> None:
    target = tiny_llama(2)
    events = bare(served(target, random_prompts(1, count=1, length=12)))
    assert len(events) == 3
    computer = RecomputedFeatures(target, max_cached_positions=100)
    first, _, last = placed(events)
    found = computed(computer, [first, last])
    assert found[0] is not None
    assert found[1] is None
    assert computed(computer, [placed(events)[1]]) == [None]
    assert computer.num_unknown == 2


def test_a_segment_that_is_delivered_twice_has_the_same_states() -> None:
    target = tiny_llama(2)
    first, second, last = placed(bare(served(target, random_prompts(1, count=1, length=12))))
    computer = RecomputedFeatures(target, max_cached_positions=100)
    once = computed(computer, [first, second, last])
    computer = RecomputedFeatures(target, max_cached_positions=100)
    twice = computed(computer, [first, first, second, first, second, last])
    for index, same_as in enumerate([0, 0, 1, 0, 1, 2]):
        left, right = twice[index], once[same_as]
        assert left is not None
        assert right is not None
        np.testing.assert_allclose(left, right, atol=1e-4)


def test_invalid_events_of_another_target_name_both_fingerprints() -> None:
    target = tiny_llama(2)
    (received, *_) = placed(bare(served(target, random_prompts(1, count=1, length=12))))
    computer = RecomputedFeatures(target, max_cached_positions=100)
    other = replace_event(received, target_fingerprint="llama-3")
    with pytest.raises(ValueError, match="llama-3, expected llama-2"):
        computer.follow(other)
    assert computer.num_remembered_tokens == 0


def test_invalid_tokens_and_lengths_are_refused_before_the_target_runs() -> None:
    target = tiny_llama(2)
    (received, *_) = placed(bare(served(target, random_prompts(1, count=1, length=12))))
    content = received.event.content
    assert content is not None
    computer = RecomputedFeatures(target, max_cached_positions=100)
    beyond = np.full_like(content.prompt_token_ids, target.vocab_size)
    bad = replace_event(received, content=replace(content, prompt_token_ids=beyond))
    with pytest.raises(ValueError, match=f"token {target.vocab_size}, expected 0"):
        computer.follow(bad)
    short = RecomputedFeatures(tiny_llama(2, context_length=20), max_cached_positions=100)
    with pytest.raises(ValueError, match="28 positions, expected at most 20"):
        short.follow(received)
    assert computer.num_fed_tokens == short.num_fed_tokens == 0


@pytest.mark.parametrize("name", ["max_cached_positions", "max_tokens"])
def test_invalid_bounds_are_named(name: str) -> None:
    bounds = {"max_cached_positions": 1, "max_tokens": 1} | {name: -1}
    with pytest.raises(ValueError, match=f"{name}=-1"):
        RecomputedFeatures(tiny_llama(2), **bounds)


@pytest.mark.parametrize("crash_after", [2, 3, 5])
def test_a_trainer_that_is_killed_amid_a_request_goes_on_bit_for_bit(
    tmp_path: Path, crash_after: int
) -> None:
    target = tiny_llama(2)
    events = placed(bare(served(target, random_prompts(1, count=2, length=12))))
    places = [(tmp_path / name, Releases()) for name in ("through", "killed")]

    def online(folder: Path, board: Releases) -> OnlineTrainer:
        trainer = DrafterTrainer(
            head_of(target),
            TrainingSettings(batch_size=16, steps_per_event=1, memory_positions=40),
            target_fingerprint=target.fingerprint,
            tokenizer_hash=target.tokenizer_hash,
            store=DrafterRegistry(str(folder)),
            board=board,
            now=lambda: datetime(2026, 11, 29, tzinfo=UTC),
        )
        computer = RecomputedFeatures(target, max_cached_positions=10_000)
        fingerprint = target.fingerprint
        return OnlineTrainer([trainer], None, target_fingerprint=fingerprint, computer=computer)

    train(online(*places[0]), events)
    train(online(*places[1]), events[:crash_after])
    again = online(*places[1])
    assert again.start_offsets() == {0: 0}  # where the oldest request in memory began
    train(again, events)
    assert again.num_without_features == 0
    found = []
    for folder, board in places:
        newest = board.read_all()[0]
        assert newest.version == len(events)
        found.append(
            DrafterRegistry(str(folder)).read_training_state(
                newest.artifact_uri, manifest_sha256=newest.manifest_sha256
            )
        )
    assert same(*found)


def test_having_the_states_counts_as_training_time_shared_among_the_trainers(
    tmp_path: Path,
) -> None:
    target, releases = tiny_llama(2), Releases()
    events = placed(bare(served(target, random_prompts(1, count=1, length=12))))
    heads = [head_of(target), head_of(target)]
    heads[1].drafter_id = "other"
    trainers = [
        DrafterTrainer(
            head,
            TrainingSettings(steps_per_event=0, release_every_events=100),
            target_fingerprint=target.fingerprint,
            tokenizer_hash=target.tokenizer_hash,
            store=DrafterRegistry(str(tmp_path)),
            board=releases,
            now=lambda: datetime(2026, 11, 29, tzinfo=UTC),
        )
        for head in heads
    ]
    computer = RecomputedFeatures(target, max_cached_positions=100)
    fingerprint = target.fingerprint
    online = OnlineTrainer(trainers, None, target_fingerprint=fingerprint, computer=computer)
    train(online, events)
    assert trainers[0].update_seconds == pytest.approx(trainers[1].update_seconds, rel=0.1)
    assert sum(one.update_seconds for one in trainers) >= computer.seconds > 0.0
    assert computer.num_positions == NUM_TOKENS
