"""A real vLLM under stress: preempted, aborted and reused rows, and every token where it belongs.

``DRAFTLOOP_TEST_FULL=1`` sends 2,000 requests to a small random target with the real tokenizer; the
short form sends fewer to the real one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from inference.target import load_target
from pipeline.configuration.settings import ContentSettings, Settings
from tests.integration.vllm_attribution import check_attribution, num_counted
from tests.integration.vllm_engines import (
    IS_FULL,
    SPECULATION,
    events_of,
    needs_vllm,
    run_engine,
)
from tests.integration.vllm_requests import (
    ADAPTER,
    MAX_POSITIONS,
    StressRequest,
    save_adapter,
    save_tiny_target,
    stress_requests,
)

PROGRAM = "tests.integration.vllm_stress"
NUM_REQUESTS = 2000 if IS_FULL else 100
STREAMS = ("vllm", ADAPTER, "tenant-0", "tenant-1", "tenant-2")
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_POSITIONS,
    "max_num_seqs": 16,
    # Prompts are read in pieces, and three requests of full length are all that fits in memory.
    "max_num_batched_tokens": 96,
    "block_size": 32,
    "num_gpu_blocks_override": 24,
    "enable_prefix_caching": True,
}
LARGEST_GROWTH, SLOW = 1.05, 3.0
TIE = 1e-3
"""Logits so close may be ordered either way, as sums depend on what shares their batch."""

pytestmark = needs_vllm

logger = logging.getLogger(__name__)


def settings_in(folder: Path) -> Settings:
    return Settings(data=folder, content=ContentSettings(consenting_streams=STREAMS))


def job(target: Path, requests: Sequence[StressRequest], **engine: Any) -> dict[str, Any]:
    return {
        "model": str(target),
        "engine": ENGINE | engine,
        "num_running": 24,
        "requests": [one.as_json() for one in requests],
    }


def test_under_stress_every_token_is_in_the_events_of_its_request_and_none_is_another(
    tmp_path: Path, smollm2: Path
) -> None:
    target = smollm2
    if IS_FULL:
        target = tmp_path / "target"
        save_tiny_target(target, smollm2)
    requests = stress_requests(NUM_REQUESTS, seed=5)
    settings = settings_in(tmp_path / "data")
    drafted, log = run_engine(
        PROGRAM,
        job(target, requests, speculative_config=SPECULATION),
        tmp_path / "drafted",
        settings,
    )
    plain, _ = run_engine(PROGRAM, job(target, requests), tmp_path / "plain", None)

    counters = drafted["counters"]
    assert counters["vllm:num_preemptions"] > 0
    assert counters["vllm:prefix_cache_hits"] > 0
    assert "failed, this step goes on without it" not in log
    events = events_of(settings)
    num_tokens = check_attribution(requests, drafted["outputs"], events)
    num_accepted = num_counted(events, "num_accepted_tokens")
    assert 0 < num_accepted <= counters["vllm:spec_decode_num_accepted_tokens"]
    assert plain["own_modules"] == []
    different = [one for one in requests if differs(one, drafted, plain)]
    assert all(is_tie(target, one, drafted, plain) for one in different)
    check_cost(drafted)
    logger.info(report(drafted, plain, num_tokens, num_accepted, len(different)))


def test_the_name_of_an_adapter_is_the_stream(tmp_path: Path, smollm2: Path) -> None:
    # vLLM's CPU build computes rows without an adapter wrongly next to rows with one, also when it
    # does not speculate: what is written is not compared here.
    target, adapter = tmp_path / "target", tmp_path / ADAPTER
    save_tiny_target(target, smollm2)
    save_adapter(adapter, target)
    requests = stress_requests(NUM_REQUESTS // 2, seed=6, has_adapter=True)
    settings = settings_in(tmp_path / "data")
    drafted, _ = run_engine(
        PROGRAM,
        job(
            target,
            requests,
            speculative_config=SPECULATION,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=8,
        )
        | {"adapter": str(adapter)},
        tmp_path / "drafted",
        settings,
    )
    events = events_of(settings)
    check_attribution(requests, drafted["outputs"], events)
    assert any(event.stream == ADAPTER for event in events)


def answer(request: StressRequest, result: Mapping[str, Any]) -> list[int]:
    found: list[int] = result["outputs"][request.id]["tokens"].get("0", [])
    return found


def differs(request: StressRequest, *results: Mapping[str, Any]) -> bool:
    """Tell whether a request that decodes greedily got other tokens from two engines."""
    if request.temperature > 0.0:
        return False
    first, second = (answer(request, one) for one in results)
    size = min(len(first), len(second)) if request.is_aborted else None
    return first[:size] != second[:size]


def is_tie(target: Path, request: StressRequest, *results: Mapping[str, Any]) -> bool:
    """Tell whether two answers part where two tokens are all but equally probable."""
    first, second = (answer(request, one) for one in results)
    place = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(second)
    )
    if place >= min(len(first), len(second)) or request.grammar:
        return False
    model = load_target(target, dtype=torch.float32).model
    tokens = torch.tensor([[*request.prompt, *first[:place]]])
    with torch.inference_mode():
        logits = model(tokens).logits[0, -1]
    return abs(float(logits[first[place]] - logits[second[place]])) < TIE


def check_cost(result: Mapping[str, Any]) -> None:
    """Check that memory stays flat after the first quarter, and that no step is slow by us."""
    resident = result["resident"]
    assert max(resident[-3:]) <= LARGEST_GROWTH * resident[len(resident) // 4], resident
    seconds, _, own = np.array(result["steps"]).T
    limit = SLOW * np.median(seconds)
    is_ours = (seconds > limit) & (seconds - own <= limit)
    assert not is_ours.any(), np.array(result["steps"])[is_ours].tolist()


def report(
    drafted: Mapping[str, Any],
    plain: Mapping[str, Any],
    num_tokens: int,
    num_accepted: int,
    num_different: int,
) -> str:
    """Return the figures of a run, for whoever reads its output."""
    seconds, own_wall, own = np.array(drafted["steps"]).T * 1e3
    without = np.median(np.array(plain["steps"])[:, 0]) * 1e3
    resident = [one / 1e6 for one in drafted["resident"]]
    counters = drafted["counters"]
    parts = ", ".join(
        f"{name} {np.median(values):.1f} / {np.quantile(values, 0.99):.1f} / {values.max():.1f}"
        for name, values in (("step", seconds), ("ours", own_wall), ("ours on the core", own))
    )
    return (
        f"{NUM_REQUESTS} requests, {num_tokens} tokens, {len(seconds)} steps, "
        f"{counters['vllm:num_preemptions']:.0f} preemptions, "
        f"{counters['vllm:spec_decode_num_draft_tokens']:.0f} drafted and "
        f"{counters['vllm:spec_decode_num_accepted_tokens']:.0f} accepted by vLLM's count, "
        f"{num_accepted} in events, {num_different} answers differ at a tie; "
        f"ms (median / 99 % / most): {parts}; without us {without:.1f}; "
        f"MB: {resident[len(resident) // 4]:.0f} after a quarter, {resident[-1]:.0f} at the end"
    )
