"""Target, cache, drafters, scoring, recording and training compute where ``model.device`` says."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.frozen_rows import FrozenRows, frequent_tokens
from inference.drafters.nothing import NothingDrafter
from inference.packing import pack_linear_layers
from inference.sampling import SamplingParams
from inference.target import Target
from learner.online_trainer import OnlineTrainer
from learner.training import DrafterTrainer, TrainableDrafter, TrainingSettings
from pipeline import wiring
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.configuration.settings import ModelSettings, Settings, SettingsError
from pipeline.releases.drafters import trainable
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import DrafterRegistry
from schemas.events import VerificationEvent
from tests.inference.elsewhere import ELSEWHERE, elsewhere
from tests.inference.serving import HiddenStates, Outbox, new_worker, request_of
from tests.inference.tiny import VOCAB_SIZE, random_prompts, tiny_gemma3, tiny_llama
from tests.learner.trainers import Releases, placed

KINDS = ("hydra", "convex", "eagle", "token_lm")
PROMPT = random_prompts(3, count=1, length=12)[0]
GREEDY = SamplingParams(max_tokens=24, min_tokens=3)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_k=30, top_p=0.95, seed=5)


def moved(target: Target, device: torch.device) -> Target:
    """Return a copy of a target on a device."""
    return Target(
        copy.deepcopy(target.model).to(device),
        target.tokenizer,
        target_id=target.target_id,
        target_fingerprint=target.fingerprint,
    )


def head_of(kind: Any, target: Target) -> TrainableDrafter:
    vocabulary = frequent_tokens({}, size=30, vocab_size=VOCAB_SIZE)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    one = DrafterSettings(
        drafter_id="head", kind=kind, inner_size=16, rank=8, num_heads=2, num_context=4, seed=1
    )
    return trainable(one, rows)


@dataclass
class Life:
    """What a head and its target did: tokens, events, and the weights that were learned."""

    folder: Path
    target: Target
    kind: str
    draws_drafts: bool
    states: HiddenStates = field(default_factory=HiddenStates)
    board: Releases = field(default_factory=Releases)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    events: list[VerificationEvent] = field(default_factory=list)

    def trainer(self) -> DrafterTrainer:
        """Return a trainer that goes on from the newest release, if there is one."""
        return DrafterTrainer(
            head_of(self.kind, self.target),
            TrainingSettings(num_levels=4, batch_size=16, steps_per_event=2),
            target_fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
            store=DrafterRegistry(str(self.folder)),
            board=self.board,
            now=lambda: datetime(2026, 11, 29, tzinfo=UTC),
        )

    def serve(self, params: SamplingParams) -> None:
        """Serve a request with the newest version, another model beside it."""
        head = HeadLoader(self.target, DrafterRegistry(str(self.folder)))(self.board.read_all()[0])
        other = CausalLmDrafter(
            moved(tiny_llama(50), self.target.device), self.target, drafter_id="other"
        )
        outbox = Outbox()
        worker = new_worker(
            self.target,
            [NothingDrafter(), other, head],
            outbox,
            states=self.states,
            policy="hedge",
            draws_drafts=self.draws_drafts,
        )
        self.token_ids.append(worker.serve(request_of(PROMPT, params)).token_ids)
        self.events += outbox.events

    def learn(self) -> dict[str, torch.Tensor]:
        """Train on all events, resume from the release, and return its weights."""
        online = OnlineTrainer(
            [self.trainer()], self.states, target_fingerprint=self.target.fingerprint
        )
        for received in placed(self.events):
            online.train(received)
        return {name: tensor.cpu() for name, tensor in self.trainer()._update.weights.items()}


def lived(folder: Path, target: Target, kind: str, *, draws_drafts: bool) -> tuple[Life, Any]:
    """Release an untrained head, serve, learn, and serve what was learned."""
    life = Life(folder, target, kind, draws_drafts)
    life.trainer()
    life.serve(GREEDY)
    weights = life.learn()
    life.serve(SAMPLED)
    return life, weights


@pytest.mark.parametrize("draws_drafts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_lives_on_another_device_as_on_the_cpu(
    kind: str, draws_drafts: bool, tmp_path: Path
) -> None:
    here, weights = lived(tmp_path / "here", tiny_llama(2), kind, draws_drafts=draws_drafts)
    with elsewhere() as device:
        target = moved(tiny_llama(2), device)
        assert {one.device.type for one in target.model.parameters()} == {ELSEWHERE.type}
        there, learned = lived(tmp_path / "there", target, kind, draws_drafts=draws_drafts)
    assert there.token_ids == here.token_ids
    for ours, theirs in zip(there.events, here.events, strict=True):
        assert [one.weights_version for one in ours.drafters] == [
            one.weights_version for one in theirs.drafters
        ]
        for name in ("acceptance_probability", "realised_acceptance"):
            found, expected = getattr(ours.windows, name), getattr(theirs.windows, name)
            np.testing.assert_allclose(found, expected, atol=2e-3)
    assert not np.isnan(there.events[-1].windows.acceptance_probability[:, 0]).any()
    assert learned.keys() == weights.keys()
    for name, tensor in learned.items():
        torch.testing.assert_close(torch.as_tensor(tensor), weights[name])


def test_a_sliding_window_is_rolled_back_on_another_device() -> None:
    def text(target: Target) -> tuple[int, ...]:
        other = CausalLmDrafter(moved(target, target.device), target, drafter_id="other")
        worker = new_worker(target, [other], Outbox())
        return worker.serve(request_of(PROMPT, GREEDY)).token_ids

    expected = text(tiny_gemma3(1))
    with elsewhere() as device:
        assert text(moved(tiny_gemma3(1), device)) == expected


def test_weights_are_packed_for_the_processor_on_the_cpu_only() -> None:
    with elsewhere() as device:
        model = moved(tiny_llama(1, dtype=torch.bfloat16), device).model
        sizes = [one.numel() for one in model.parameters()]
        pack_linear_layers(model)
        assert [one.numel() for one in model.parameters()] == sizes


@pytest.mark.parametrize(
    ("setting", "has_cuda", "expected"),
    [
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("auto", False, "cpu"),
        ("auto", True, "cuda"),
        ("cuda", True, "cuda"),
    ],
)
def test_the_target_is_loaded_to_the_device_of_the_settings(
    setting: Any, has_cuda: bool, expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(wiring, "resolve_target", lambda *_, **__: tmp_path)
    monkeypatch.setattr(wiring, "load_target", lambda *_, device, **__: asked.append(device))
    wiring.open_target(Settings(model=ModelSettings(device=setting)))
    assert asked == [expected]


def test_invalid_device_is_refused_before_the_model_is_read() -> None:
    settings = Settings(model=ModelSettings(path="nowhere", device="cuda"))
    with pytest.raises(SettingsError, match=r"model\.device = 'cuda': .* set model\.device to cpu"):
        wiring.open_target(settings)
