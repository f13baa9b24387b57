"""The law of what a real vLLM samples: the same with the proposer, and a test that would see it.

``DRAFTLOOP_TEST_FULL=1`` draws from the real target; the short form draws as often from a small
random one with the real tokenizer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import chi2_contingency
from transformers import AutoTokenizer

from pipeline.configuration.settings import Settings
from tests.integration.vllm_engines import IS_FULL, SPECULATION, needs_vllm, run_engine
from tests.integration.vllm_requests import draws, save_tiny_target

PROGRAM = "tests.integration.vllm_stress"
NUM_DRAWS = 3000
NUM_TOKENS = 3
TEMPERATURE, OTHER_TEMPERATURE = 0.8, 0.7
PROMPT = "red blue green red blue green red blue red blue green red blue green red blue"
RAREST_CELL = 10
"""Draws of a sequence, over both samples; what is rarer is counted together."""

SIGNIFICANCE = 1e-3
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
}

pytestmark = needs_vllm

logger = logging.getLogger(__name__)


def drawn(
    target: Path, folder: Path, settings: Settings | None, *, temperature: float, seed: int
) -> dict[str, Any]:
    """Draw from an engine of its own, with the proposer if there are settings for it."""
    prompt = AutoTokenizer.from_pretrained(target)(PROMPT)["input_ids"]
    speculation = None if settings is None else SPECULATION
    job = {
        "model": str(target),
        "engine": ENGINE | {"seed": seed, "speculative_config": speculation},
        "num_running": 32,
        "requests": [one.as_json() for one in draws(prompt, NUM_DRAWS, temperature=temperature)],
    }
    return run_engine(PROGRAM, job, folder, settings)[0]


def p_value(first: Mapping[str, Any], second: Mapping[str, Any]) -> float:
    """Return how probable two samples of sequences are to come from one law, by chi-square."""
    samples = [
        Counter(tuple(one["tokens"]["0"][:NUM_TOKENS]) for one in result["outputs"].values())
        for result in (first, second)
    ]
    total = samples[0] + samples[1]
    common = [cell for cell, count in total.items() if count >= RAREST_CELL]
    cells = np.array([[sample[cell] for cell in common] for sample in samples])
    rare = np.array([[sample.total()] for sample in samples]) - cells.sum(axis=1, keepdims=True)
    table = np.hstack([cells, rare]) if rare.sum() else cells
    assert table.shape[1] >= 5, "a law of few sequences tells nothing"
    return float(chi2_contingency(table).pvalue)


def test_sampled_answers_have_the_law_of_the_target(tmp_path: Path, smollm2: Path) -> None:
    target = smollm2
    if not IS_FULL:
        target = tmp_path / "target"
        save_tiny_target(target, smollm2)
    settings = Settings(data=tmp_path / "data")
    with_us = drawn(target, tmp_path / "with", settings, temperature=TEMPERATURE, seed=1)
    plain = drawn(target, tmp_path / "without", None, temperature=TEMPERATURE, seed=2)
    other = drawn(target, tmp_path / "other", None, temperature=OTHER_TEMPERATURE, seed=3)
    counters = with_us["counters"]
    num_drafts = counters["vllm:spec_decode_num_drafts"]
    num_accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    same, control = p_value(with_us, plain), p_value(other, plain)
    logger.info(
        f"{NUM_DRAWS} draws: p = {same:.3g} with us, {control:.3g} at {OTHER_TEMPERATURE}; "
        f"{num_drafts:.0f} drafts, {num_accepted:.0f} accepted tokens"
    )
    assert num_drafts > NUM_DRAWS / 2
    assert num_accepted > NUM_DRAWS / 10
    assert same > SIGNIFICANCE
    assert control < SIGNIFICANCE
