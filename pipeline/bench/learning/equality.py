"""The proof that a replayed round is a played one: the same requests through the real engine.

Some requests are served by the engine on the float32 target, with the head's weights swapped in the
middle of each. Outputs must be the recorded ones, which the target wrote alone, and every round
must accept what the replay says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from inference.drafters.hydra import HydraDrafter
from inference.engine import EngineOptions, RequestRun
from inference.pool import DrafterPool
from inference.sampling import SamplingParams
from inference.target import Target
from learner.request_selector import RequestSelector
from pipeline.bench.learning.traces import RequestTrace
from pipeline.bench.learning.worker import NUM_SPECULATIVE_TOKENS, scores
from schemas.events import FinishReason

SWAP_EVERY = 4
"""Rounds between two swaps of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Equality:
    """What the comparison found.

    Attributes:
        num_requests: Compared.
        num_outputs_equal: Whose output is the recorded one.
        num_rounds: Of the engine.
        num_rounds_equal: Which began where the replay's did and accepted as much.
        num_swaps: Of weights, within requests.
    """

    num_requests: int
    num_outputs_equal: int
    num_rounds: int
    num_rounds_equal: int
    num_swaps: int

    def row(self) -> Mapping[str, int]:
        """Return it as plain numbers."""
        return asdict(self)


def compared(
    target: Target, traces: Sequence[RequestTrace], heads: Sequence[HydraDrafter]
) -> Equality:
    """Serve requests with the engine and compare.

    Args:
        target: In the type in which the traces were recorded.
        traces: Recorded with it.
        heads: Versions of one head, which take turns.
    """
    counts = np.zeros(4, dtype=np.int64)
    for trace in traces:
        output, played, swaps = _played(target, trace, heads)
        replayed = _replayed(trace, heads)
        same = sum(one == other for one, other in zip(played, replayed, strict=False))
        if len(played) != len(replayed):
            same = min(same, len(played) - 1)
        counts += [output == trace.token_ids.tolist(), len(played), same, swaps]
    return Equality(
        num_requests=len(traces),
        num_outputs_equal=int(counts[0]),
        num_rounds=int(counts[1]),
        num_rounds_equal=int(counts[2]),
        num_swaps=int(counts[3]),
    )


def _played(
    target: Target, trace: RequestTrace, heads: Sequence[HydraDrafter]
) -> tuple[list[int], list[tuple[int, int]], int]:
    """Return the engine's output, its rounds after the prompt's as (index, emitted), and swaps."""
    pool = DrafterPool([heads[0]])
    run = RequestRun(
        target,
        pool,
        trace.prompt_token_ids.tolist(),
        SamplingParams(max_tokens=len(trace.token_ids)),
        EngineOptions(num_speculative_tokens=NUM_SPECULATIVE_TOKENS, score_block=0),
        RequestSelector.fresh("fixed:0", 1, NUM_SPECULATIVE_TOKENS),
        stream="bench",
        seed=np.random.SeedSequence(0),
    )
    run.step()
    rounds: list[tuple[int, int]] = []
    swaps = 0
    while run.finish_reason is FinishReason.UNFINISHED:
        if rounds and len(rounds) % SWAP_EVERY == 0:
            pool.replace(heads[len(rounds) // SWAP_EVERY % len(heads)])
            swaps += run.drafters.renew()
        done = run.step()
        position = done.first_position - len(trace.prompt_token_ids)
        rounds.append((position, done.num_emitted_tokens))
    return run.output_token_ids, rounds, swaps


def _replayed(trace: RequestTrace, heads: Sequence[HydraDrafter]) -> list[tuple[int, int]]:
    accepted: list[NDArray[np.int64]] = [
        scores(DrafterPool([head]), "request", trace, head.rows).accepted[:, 0] for head in heads
    ]
    rounds: list[tuple[int, int]] = []
    place = 0
    while place < len(trace.token_ids) - 1:
        head = len(rounds) // SWAP_EVERY % len(heads)
        emitted = int(accepted[head][place]) + 1
        rounds.append((place + 1, emitted))
        place += emitted
    return rounds
