"""An exported head drafts in a real, unmodified vLLM as its folder says ('make test-vllm')."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from inference.drafters.eagle_reader import EagleFolder
from inference.drafters.eagle_training import TrainableEagle
from inference.drafters.frozen_rows import DraftVocabulary, FrozenRows
from inference.target import Target, load_target
from learner.examples import ExampleMemory, Segment
from learner.updates.losses import LossSettings
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from pipeline.commands.drafters import drafters
from pipeline.configuration.settings import Settings
from pipeline.releases.registry import DrafterRegistry
from tests.integration.test_vllm import MAX_TOKENS, PROMPTS, serve
from tests.integration.vllm_engines import needs_vllm

NUM_SPECULATIVE_TOKENS, NUM_CONTEXT, NUM_STEPS = 3, 12, 28
DISTINCT = sorted(set(PROMPTS))

pytestmark = needs_vllm


def texts_of(target: Target) -> dict[str, list[int]]:
    """Return prompt and greedy answer per prompt, a draft longer than what will be served."""
    found = {}
    for prompt in DISTINCT:
        text = target.encode(prompt)
        session = target.start()
        output = session.forward(text, num_rows=1)
        for _ in range(MAX_TOKENS + NUM_SPECULATIVE_TOKENS):
            text.append(int(output.logits[-1].argmax()))
            output = session.forward(text[-1:])
        found[prompt] = text
    return found


def trained(
    target: Target, texts: dict[str, list[int]]
) -> tuple[TrainableEagle, dict[str, torch.Tensor]]:
    """Teach a head some of the texts, so that it is often right and often wrong."""
    used = {token for text in texts.values() for token in text}
    vocabulary = DraftVocabulary.of(sorted(used | set(range(0, 2000, 3))))
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    head = TrainableEagle(
        "eagle",
        rows,
        inner_size=64,
        num_heads=None,
        num_context=NUM_CONTEXT,
        loss_settings=LossSettings(emitted_weight=1.0, soft_weight=0.0),
    )
    memory = ExampleMemory(10**6)
    for offset, text in enumerate(texts.values()):
        states = target.start().forward(text[:-1]).hidden
        memory.add(
            Segment(
                partition=0,
                offset=offset,
                hidden=states.float().numpy(),
                token_ids=np.asarray(text[1:], dtype=np.int64),
                top_token_ids=np.zeros((len(text) - 1, 0), dtype=np.int64),
                top_probabilities=np.zeros((len(text) - 1, 0), dtype=np.float32),
            )
        )
    update = OnlineGradient(head.initial_weights(), OnlineGradientSettings(learning_rate=2e-3))
    rng = np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        batch = memory.draw(48, NUM_SPECULATIVE_TOKENS, rng, num_context=NUM_CONTEXT)
        assert batch is not None
        update.step(partial(head.loss, batch=batch))
    return head, dict(update.served_weights)


def exported(folder: Path, model: Path, target: Target, texts: dict[str, list[int]]) -> Path:
    """Store a trained head and export it by the command line."""
    head, weights = trained(target, texts)
    config = {
        "architecture": head.architecture,
        "target_fingerprint": target.fingerprint,
        "tokenizer_hash": target.tokenizer_hash,
        "draft_vocabulary_hash": head.draft_vocabulary_hash,
    }
    DrafterRegistry(str(folder / "data")).write("eagle", 1, head.artifact(weights), config)
    settings = folder / "draftloop.toml"
    settings.write_text(
        f'data = "{folder / "data"}"\n[model]\npath = "{model}"\ndtype = "float32"\n'
    )
    command = ["export", "eagle", "1", str(folder / "out"), "--format", "eagle3"]
    result = CliRunner().invoke(drafters, [*command, "--config", str(settings)])
    assert result.exception is None
    assert "read back" in result.output
    return folder / "out"


def rounds_of(
    read: EagleFolder, target: Target, text: list[int], first: int, last: int
) -> list[int]:
    """Return the accepted tokens of every round that ends an answer at ``first`` .. ``last`` - 1.

    An engine feeds the head every pair from the beginning of the prompt on.
    """
    states = target.start().forward(text).hidden.float()
    embeddings = target.embedding_rows.float()
    accepted, position = list[int](), first + 1
    while position < last:
        told = text[1:position]
        for level in range(NUM_SPECULATIVE_TOKENS):
            logits = read.logits(embeddings[told], states[: position - 1], level + 1)
            told.append(int(read.draft_token_ids[logits[-1].argmax()]))
        matches = np.equal(told[position - 1 :], text[position : position + len(told)][:3])
        accepted.append(int(np.cumprod(matches).sum()))
        position += accepted[-1] + 1
    return accepted


def test_vllm_drafts_with_an_exported_head_what_its_folder_says(
    tmp_path: Path, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is read above, and to the settings of the command line it is no setting.
    monkeypatch.delenv("DRAFTLOOP_VLLM_PYTHON", raising=False)
    torch.set_num_threads(1)
    target = load_target(smollm2, dtype=torch.float32)
    texts = texts_of(target)
    folder = exported(tmp_path, smollm2, target, texts)
    speculation = {
        "method": "eagle3",
        "model": str(folder),
        "num_speculative_tokens": NUM_SPECULATIVE_TOKENS,
    }
    settings = Settings(data=tmp_path / "data")
    (one,) = serve(settings, tmp_path / "served", smollm2, speculation)["passes"]
    read, rounds = EagleFolder(folder), list[int]()
    for request in one["requests"]:
        prompt = PROMPTS[request["index"]]
        text, first = texts[prompt], len(target.encode(prompt))
        served = request["token_ids"]
        assert served == text[first : first + len(served)]
        assert len(served) == MAX_TOKENS or served[-1] in target.eos_token_ids
        rounds += rounds_of(read, target, text, first, first + len(served))
    counters = one["counters"]
    found = counters["vllm:spec_decode_num_accepted_tokens"]
    num_rounds = counters["vllm:spec_decode_num_drafts"]
    # It was right and wrong, or there would be nothing to compare.
    assert 0.2 < np.mean(rounds) / NUM_SPECULATIVE_TOKENS < 0.98
    assert num_rounds == pytest.approx(len(rounds), abs=2)
    assert 1 + found / num_rounds == pytest.approx(1 + np.mean(rounds), rel=0.03)
