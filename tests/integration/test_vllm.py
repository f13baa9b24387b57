"""The proposer inside a real, unmodified vLLM on the real model ('make test-vllm')."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference.drafters.frozen_rows import VOCABULARY, frequent_tokens
from inference.drafters.hydra import initial_hydra_weights
from inference.target import load_target
from pipeline.bench.vllm.benchmark import HEAD, LOOKUPS, STREAM
from pipeline.bench.vllm.engines import RUNNER
from pipeline.bench.vllm.heads import release_head
from pipeline.configuration.settings import ContentSettings, FeatureSettings, Settings
from tests.integration.vllm_engines import SPECULATION, events_of, needs_vllm, run_engine

MAX_TOKENS = 24
PROMPTS = (
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
    "Write a Python function that adds two numbers.",
    "List the numbers from one to twenty in words.",
    "Repeat three times: the quick brown fox jumps over the lazy dog.",
)

pytestmark = needs_vllm


def serve(settings: Settings, folder: Path, model: Path, speculation: object) -> dict[str, Any]:
    """Serve the prompts in an engine of its own and return what the runner saw."""
    block = [
        {"set": "test", "index": index, "prompt": prompt} for index, prompt in enumerate(PROMPTS)
    ]
    job = {
        "model": str(model),
        "engine": {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "speculative_config": speculation,
        },
        "max_tokens": MAX_TOKENS,
        "stream": STREAM,
        "passes": [{"concurrency": 3, "blocks": [block]}],
    }
    found, _ = run_engine(RUNNER, job, folder, settings)
    return found


def answers(result: dict[str, Any]) -> dict[int, list[int]]:
    (one,) = result["passes"]
    return {request["index"]: request["token_ids"] for request in one["requests"]}


def release_untrained_head(settings: Settings, model: Path) -> None:
    """Release a head that knows nothing, so that its whole path is walked."""
    target = load_target(model)
    vocabulary = frequent_tokens({}, size=512, vocab_size=target.vocab_size)
    weights = initial_hydra_weights(target.hidden_size, 64, torch.Generator().manual_seed(0))
    release_head(settings, target, HEAD, weights | {VOCABULARY: vocabulary.token_ids})


def test_an_unmodified_vllm_answers_as_ever_and_every_token_is_in_the_log(
    tmp_path: Path, smollm2: Path
) -> None:
    settings = Settings(
        data=tmp_path / "data",
        drafters=LOOKUPS,
        content=ContentSettings(consenting_streams=(STREAM,)),
        features=FeatureSettings(enabled=True),
    )
    release_untrained_head(settings, smollm2)
    drafted = serve(settings, tmp_path / "drafted", smollm2, SPECULATION)
    plain = serve(settings, tmp_path / "plain", smollm2, None)
    assert answers(drafted) == answers(plain)

    (one,) = drafted["passes"]
    assert one["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0
    assert sum(v for k, v in one["counters"].items() if k.startswith("failures/")) == 0
    texts: dict[str, list[int]] = {}
    events = sorted(events_of(settings), key=lambda event: event.sequence)
    for event in events:
        assert event.content is not None
        assert event.content.features is not None
        texts.setdefault(event.request_id, []).extend(event.content.token_ids.tolist())
    told = sorted(texts.values())
    for text in answers(drafted).values():
        assert text in told
    assert np.isfinite([event.rounds.verify_seconds.sum() for event in events]).all()
