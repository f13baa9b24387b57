"""What a round costs on this machine: a verification of 1 + K tokens, and the drafting of K."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from inference.drafters.hydra import HydraDrafter
from inference.ports import DraftSession
from inference.sampling import SamplingParams
from inference.target import Target
from inference.trajectory import Trajectory
from pipeline.bench.learning.traces import RequestTrace
from pipeline.bench.learning.worker import NUM_SPECULATIVE_TOKENS

NUM_REPEATS = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSeconds:
    """Thread CPU seconds, medians over repeats.

    Attributes:
        plain_seconds: A pass over one token, T(1).
        verify_seconds: A pass over 1 + K tokens, T(1 + K).
        draft_seconds: Drafting K tokens.
    """

    plain_seconds: float
    verify_seconds: float
    draft_seconds: float

    @property
    def round_seconds(self) -> float:
        """A round with K drafted tokens."""
        return self.verify_seconds + self.draft_seconds

    @property
    def break_even_length(self) -> float:
        """Acceptance length from which speculation is faster than decoding plainly."""
        return self.round_seconds / self.plain_seconds


def measured_costs(
    target: Target, drafter: HydraDrafter, trace: RequestTrace, *, num_repeats: int = NUM_REPEATS
) -> RoundSeconds:
    """Measure a round in the middle of a recorded request.

    Args:
        target: As it serves.
        drafter: The head.
        trace: A request.
        num_repeats: Of each measurement.
    """
    prompt, tokens = trace.prompt_token_ids.tolist(), trace.token_ids.tolist()
    half = max(len(tokens) // 2, 1)
    session = target.start()
    session.forward([*prompt, *tokens[:half]], num_rows=1)
    kept = session.length
    wide = (tokens[half:] + tokens)[: NUM_SPECULATIVE_TOKENS + 1]

    def verify(token_ids: list[int]) -> None:
        session.forward(token_ids, num_rows=len(token_ids))
        session.keep(kept)

    drafting = _drafting(target, drafter, trace, half)
    rng = np.random.default_rng(0)
    return RoundSeconds(
        plain_seconds=_median(lambda: verify(wide[:1]), num_repeats),
        verify_seconds=_median(lambda: verify(wide), num_repeats),
        draft_seconds=_median(lambda: drafting.draft(NUM_SPECULATIVE_TOKENS, rng), num_repeats),
    )


def _drafting(
    target: Target, drafter: HydraDrafter, trace: RequestTrace, half: int
) -> DraftSession:
    trajectory = Trajectory(
        trace.prompt_token_ids.tolist(),
        SamplingParams(max_tokens=half),
        max_output_tokens=half,
        hidden_size=target.hidden_size,
        dtype=target.dtype,
        device=target.device,
    )
    states = torch.from_numpy(trace.hidden[:half]).to(target.dtype)
    trajectory.extend(trace.token_ids[:half].tolist(), states, None)
    return drafter.start(trajectory, stream="bench", draws_drafts=False)


def _median(act: Callable[[], object], num_repeats: int) -> float:
    act()
    seconds = []
    for _ in range(num_repeats):
        began = time.thread_time()
        act()
        seconds.append(time.thread_time() - began)
    return float(np.median(seconds))
