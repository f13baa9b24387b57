"""A head learns from what vLLM's rows reported, is released, and drafts there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from inference.drafters.frozen_rows import FrozenRows, frequent_tokens
from inference.drafters.hydra_training import TrainableHydra
from inference.target import Target
from inference.vllm_plugin.batch import BatchDrafter
from learner.online_trainer import OnlineTrainer
from learner.training import DrafterTrainer, TrainingSettings
from learner.updates.online_gradient import OnlineGradientSettings
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import DrafterRegistry
from tests.inference.serving import HiddenStates
from tests.inference.tiny import VOCAB_SIZE, random_prompts, tiny_llama
from tests.inference.vllm_fakes import FakeEngine, Kept, connection, member
from tests.learner.trainers import Releases, placed

K = 4
NUM_TOKENS = 26


class Loop:
    """vLLM's rows on one side of the real registry, a trainer on the other."""

    def __init__(self, folder: Path) -> None:
        self.target = tiny_llama(2)
        self.states = HiddenStates()
        self.kept = Kept()
        self._releases = Releases()
        self._store = DrafterRegistry(str(folder))
        vocabulary = frequent_tokens({}, size=VOCAB_SIZE, vocab_size=VOCAB_SIZE)
        rows = FrozenRows.of(self.target.embedding_rows, self.target.head_rows, vocabulary)
        trainer = DrafterTrainer(
            TrainableHydra("head", rows, inner_size=64),
            TrainingSettings(
                num_levels=K,
                batch_size=64,
                steps_per_event=250,
                gradient=OnlineGradientSettings(learning_rate=1e-2, betas=(0.9, 0.99)),
            ),
            target_fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
            store=self._store,
            board=self._releases,
            now=lambda: datetime(2026, 11, 29, tzinfo=UTC),
        )
        self.trainer = OnlineTrainer(
            [trainer], self.states, target_fingerprint=self.target.fingerprint
        )
        made = connection(
            self.kept,
            (member("none", "none"), member("head", "hydra")),
            consenting_streams=frozenset({"vllm"}),
        )
        facts = replace(
            made.target,
            fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
        )
        made = replace(made, target=facts, recorder=self.states)
        self.batch = BatchDrafter(made, num_levels=K, max_positions=256)

    def serve(self, prompt: Sequence[int], request_id: str) -> float:
        """Serve a request with the newest head; return the share of its tokens drafted right."""
        loader = HeadLoader(self.target, self._store)
        self.kept.waiting = [loader(self._releases.read_all()[0])]
        engine = FakeEngine(
            self.batch.step,
            lambda tokens: int(read(self.target, tokens)[1]),
            state_of=lambda tokens: read(self.target, tokens)[0],
        )
        engine.add(request_id, prompt, NUM_TOKENS)
        engine.run()
        self.batch.close_idle()
        return engine.num_accepted / NUM_TOKENS


def read(target: Target, tokens: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Return the state behind some tokens, and the most probable next token."""
    output = target.start().forward(tokens, num_rows=1)
    return output.hidden[0], int(output.logits[0].argmax())


def test_a_head_that_learned_from_reported_rows_is_accepted_in_them(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    prompt = random_prompts(6, count=1, length=12)[0]
    untrained = loop.serve(prompt, "before")
    for received in placed(loop.kept.events):
        loop.trainer.train(received)
    trained = loop.serve(prompt, "after")
    versions = [event.drafters[1].weights_version for event in loop.kept.events]
    assert versions[-1] > versions[0]
    assert untrained < 0.3
    assert trained > 0.6
