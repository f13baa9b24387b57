"""The learning benchmark in miniature: a random target, three domains of letters, few requests."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from rich.console import Console

from inference.target import Target
from pipeline.bench.domains import Domain
from pipeline.bench.learning.benchmark import LearningBench
from pipeline.bench.learning.convex import ConvexGame
from pipeline.bench.learning.ground import Ground, GroundSize, learning_ground
from pipeline.bench.learning.streams import AWAY, ELSEWHERE, HOME
from tests.inference.tiny import tiny_llama

CONSOLE = Console(file=io.StringIO())

SIZE = GroundSize(
    max_tokens=12,
    num_training=24,
    num_validation=8,
    num_tuning=8,
    num_vocabulary=4,
    num_home=48,
    num_away=20,
    num_elsewhere=12,
    draft_vocabulary_size=30,
    inner_size=12,
    batch_size=32,
    num_steps=30,
    num_snapshots=3,
)

BENCH = LearningBench(
    size=SIZE,
    num_requests=40,
    seeds=(1, 2),
    game=ConvexGame(num_rounds=8, num_positions=8, draft_vocabulary_size=30, rank=4, max_steps=60),
    num_compared=4,
    compared_tokens=12,
    num_processes=1,
)


def tiny_target() -> Target:
    """Return the target; without an end-of-text token all answers have the same length."""
    return tiny_llama(1, context_length=256)


def tiny_domains() -> list[Domain]:
    """Return prompts of letters, other letters in every domain."""
    rng = np.random.default_rng(0)

    def prompts(first: int, count: int) -> tuple[str, ...]:
        letters = rng.integers(97 + first, 105 + first, (count, 8))
        return tuple("".join(map(chr, row)) for row in letters)

    return [
        Domain(name=name, train=prompts(first, 40), test=prompts(first, 60))
        for name, first in ((HOME, 0), (AWAY, 8), (ELSEWHERE, 16))
    ]


def tiny_ground(target: Target, cache: Path, size: GroundSize = SIZE) -> Ground:
    """Return what runs stand on."""
    return learning_ground(target, tiny_domains(), size, cache=cache, console=CONSOLE)
