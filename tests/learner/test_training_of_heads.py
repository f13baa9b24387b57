"""Heads that are trained on what a real worker recorded, and served again."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.drafters.convex_training import TrainableConvex
from inference.drafters.eagle_training import TrainableEagle
from inference.drafters.frozen_rows import FrozenRows, frequent_tokens
from inference.drafters.hydra_training import TrainableHydra
from inference.drafters.nothing import NothingDrafter
from inference.drafters.token_lm_training import TrainableTokenLm
from inference.sampling import SamplingParams
from inference.target import Target
from learner.examples import TrainingBatch
from learner.online_trainer import OnlineTrainer
from learner.training import DrafterTrainer, TrainableDrafter, TrainingSettings
from learner.updates.online_gradient import OnlineGradientSettings
from pipeline.releases.heads import Head, HeadLoader
from pipeline.releases.registry import DrafterRegistry
from schemas.codec import decode_drafter_released
from schemas.events import VerificationEvent
from tests.inference.serving import HiddenStates, Outbox, new_worker, request_of
from tests.inference.tiny import VOCAB_SIZE, random_prompts, tiny_llama
from tests.learner.trainers import (
    Releases,
    placed,
)


def head_of(target: Target, *, size: int = VOCAB_SIZE) -> TrainableHydra:
    """Return a head with a draft vocabulary of the lowest ids."""
    vocabulary = frequent_tokens({}, size=size, vocab_size=VOCAB_SIZE)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    return TrainableHydra("head", rows, inner_size=64)


@dataclass
class Loop:
    """A worker and a trainer on either side of the real registry."""

    folder: Path
    target: Target
    drafter: TrainableDrafter
    settings: TrainingSettings
    releases: Releases = field(default_factory=Releases)
    states: HiddenStates = field(default_factory=HiddenStates)

    def start(self) -> OnlineTrainer:
        """Start the trainer."""
        self.trainer = DrafterTrainer(
            self.drafter,
            self.settings,
            target_fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
            store=DrafterRegistry(str(self.folder)),
            board=self.releases,
            now=lambda: datetime(2026, 11, 29, tzinfo=UTC),
        )
        return OnlineTrainer(
            [self.trainer], self.states, target_fingerprint=self.target.fingerprint
        )

    def served(self) -> Head:
        """Load the newest release as a worker does."""
        loader = HeadLoader(self.target, DrafterRegistry(str(self.folder)))
        return loader(self.releases.read_all()[0])

    def serve(self, prompt: list[int], num_tokens: int) -> tuple[list[VerificationEvent], float]:
        """Serve a request with the newest head; return events and mean accepted tokens."""
        outbox = Outbox()
        worker = new_worker(
            self.target,
            [NothingDrafter(), self.served()],
            outbox,
            states=self.states,
            policy="fixed:head",
            segment_tokens=64,
        )
        completion = worker.serve(request_of(prompt, SamplingParams(max_tokens=num_tokens)))
        full = [one for one in completion.rounds if one.num_draft_tokens == 4]
        return outbox.events, float(np.mean([one.num_accepted_tokens for one in full]))


def test_a_head_overfit_on_one_text_is_accepted_whole_when_served(tmp_path: Path) -> None:
    """B1: training accuracy proves nothing; acceptance does."""
    target = tiny_llama(2)
    settings = TrainingSettings(
        num_levels=4,
        batch_size=64,
        steps_per_event=250,
        gradient=OnlineGradientSettings(learning_rate=1e-2, betas=(0.9, 0.99)),
    )
    loop = Loop(tmp_path, target, head_of(target), settings)
    online = loop.start()
    prompt = random_prompts(6, count=1, length=12)[0]
    events, untrained = loop.serve(prompt, 26)
    for received in placed(events):
        online.train(received)
    _, trained = loop.serve(prompt, 26)
    assert untrained < 1.0
    assert trained == 4.0


def other_head_of(kind: str, target: Target) -> TrainableDrafter:
    """Return a head of another kind, with all tokens as its draft vocabulary."""
    vocabulary = frequent_tokens({}, size=VOCAB_SIZE, vocab_size=VOCAB_SIZE)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    if kind == "convex":
        return TrainableConvex("head", rows, num_levels=4, rank=None)
    if kind == "eagle":
        return TrainableEagle("head", rows, inner_size=32, num_heads=2, num_context=4)
    return TrainableTokenLm("head", rows, inner_size=64, rank=8, num_read=4)


@pytest.mark.parametrize("kind", ["convex", "eagle", "token_lm"])
@pytest.mark.parametrize("rule", ["online_gradient", "ensemble:num_experts=2"])
def test_every_kind_learns_from_what_a_worker_recorded_and_is_accepted_more(
    tmp_path: Path, kind: str, rule: str
) -> None:
    target = tiny_llama(2)
    settings = TrainingSettings(
        num_levels=4,
        batch_size=64,
        steps_per_event=100,
        rule=rule,
        gradient=OnlineGradientSettings(learning_rate=1e-2, betas=(0.9, 0.99)),
    )
    loop = Loop(tmp_path, target, other_head_of(kind, target), settings)
    online = loop.start()
    prompt = random_prompts(6, count=1, length=12)[0]
    events, untrained = loop.serve(prompt, 26)
    for received in placed(events):
        online.train(received)
    _, trained = loop.serve(prompt, 26)
    assert untrained < 1.0
    assert trained > 2.5
    assert loop.trainer.num_refused_steps == 0


def test_the_loss_is_the_cross_entropy_to_label_and_distribution() -> None:
    """OnlineSPEC's soft cross-entropy beside the emitted token's, level by level."""
    target = tiny_llama(2)
    drafter = head_of(target, size=12)
    weights = drafter.initial_weights()
    top = torch.tensor([[[3, 5], [4, 30]]])
    batch = TrainingBatch(
        hidden=torch.randn((1, 16), generator=torch.Generator().manual_seed(1)),
        fed_token_ids=torch.tensor([[1, 2]]),
        label_token_ids=torch.tensor([[3, 4]]),
        top_token_ids=top,
        top_probabilities=torch.tensor([[[0.6, 0.3], [0.5, 0.5]]]),
    )
    # An untrained head only reads its state: both levels say the same.
    head_rows = target.head_rows[:12].float()
    log_probs = (head_rows @ (batch.hidden[0] * weights["gain"])).log_softmax(-1)
    emitted = -(log_probs[3] + 0.8 * log_probs[4])
    soft = -(0.6 * log_probs[3] + 0.3 * log_probs[5] + 0.8 * 0.5 * log_probs[4])
    torch.testing.assert_close(drafter.loss(weights, batch), 0.5 * emitted + 0.5 * soft)


def test_labels_outside_the_draft_vocabulary_do_not_count() -> None:
    """B2: they are masked, not mapped to some other token."""
    target = tiny_llama(2)
    drafter = head_of(target, size=10)
    weights = {name: tensor.requires_grad_() for name, tensor in drafter.initial_weights().items()}

    def loss(labels: list[list[int]]) -> torch.Tensor:
        count = len(labels)
        batch = TrainingBatch(
            hidden=torch.randn((count, 16), generator=torch.Generator().manual_seed(1)),
            fed_token_ids=torch.ones((count, 2), dtype=torch.int64),
            label_token_ids=torch.tensor(labels),
            top_token_ids=torch.full((count, 2, 1), 30),
            top_probabilities=torch.ones((count, 2, 1)),
        )
        return drafter.loss(weights, batch)

    assert float(loss([[20, 39], [-1, -1]]).detach()) == 0.0
    reachable = loss([[3, 20], [15, 5]])
    assert float(reachable.detach()) > 0.0
    # Masking a label leaves what the others add, weight of the level included.
    alone = loss([[3, -1], [15, 5]])
    assert float(reachable.detach()) == pytest.approx(float(alone.detach()))
    loss([[20, 39], [-1, -1]]).backward()  # type: ignore[no-untyped-call]
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in weights.values())


def test_a_reduced_vocabulary_never_drafts_and_never_learns_what_it_has_not(
    tmp_path: Path,
) -> None:
    """B2: acceptance is measured on the target's own ids."""
    target = tiny_llama(2)
    settings = TrainingSettings(num_levels=4, batch_size=32, steps_per_event=20)
    loop = Loop(tmp_path, target, head_of(target, size=12), settings)
    online = loop.start()
    prompt = random_prompts(6, count=1, length=12)[0]
    events, _ = loop.serve(prompt, 26)
    for received in placed(events):
        online.train(received)
    events, _ = loop.serve(prompt, 26)
    assert loop.trainer.num_refused_steps == 0
    for event in events:
        assert event.content is not None
        output = event.content.token_ids.tolist()
        beyond = event.content.token_ids >= 12
        for start, accepted in zip(
            event.windows.start, event.windows.acceptance_probability[:, 0, 1], strict=True
        ):
            index = start - event.first_position
            is_seen = index >= 0 and output[index] in [*prompt, *output[:index]]
            if index >= 0 and beyond[index] and not is_seen:
                assert accepted == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_released_is_what_is_served(tmp_path: Path, dtype: torch.dtype) -> None:
    """B3: masters stay float32 and move; the artifact has the target's type and another hash."""
    target = tiny_llama(2, dtype=dtype)
    settings = TrainingSettings(num_levels=4, batch_size=32, steps_per_event=3)
    loop = Loop(tmp_path, target, head_of(target), settings)
    online = loop.start()
    before = loop.served()
    events, _ = loop.serve(random_prompts(6, count=1, length=12)[0], 40)
    for received in placed(events):
        online.train(received)
    after = loop.served()
    assert after.version.weights_version == loop.trainer.version == len(events)
    assert after.version.draft_vocabulary_hash == loop.drafter.draft_vocabulary_hash
    release = loop.releases.read_all()[0]
    state = DrafterRegistry(str(tmp_path)).read_training_state(
        release.artifact_uri, manifest_sha256=release.manifest_sha256
    )
    for name, tensor in after.weights.items():
        master = state[f"weight.{name}"]
        assert tensor.dtype == dtype
        assert master.dtype == torch.float32
        assert torch.equal(tensor, master.to(dtype))
        assert not torch.equal(tensor, before.weights[name])
    hashes = {decode_drafter_released(data).manifest_sha256 for data in loop.releases.history}
    assert len(hashes) == len(events) + 1
