"""The theory beside the measurement: dynamic regret of the convex drafter on an abrupt stream.

The head that is linear in its parameters has a convex loss, so what the theorems speak of can be
computed for it on real requests: the minimiser of every round, the length of their path, how far
hints miss, the regret, and the bound that each theorem puts on it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from inference.drafters.convex_training import TrainableConvex
from inference.drafters.frozen_rows import FrozenRows, frequent_tokens
from learner.examples import ExampleMemory, TrainingBatch
from learner.updates.ensemble import Ensemble, EnsembleSettings
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.optimistic import OptimisticGradient, OptimisticSettings
from learner.updates.regret_report import regret_report, stream_minimisers
from learner.updates.rule import Loss, UpdateRule, Weights, euclidean_norm, guarded_gradient
from pipeline.bench.learning.ground import Ground, segment
from pipeline.bench.learning.streams import AWAY, HOME
from pipeline.bench.learning.traces import RequestTrace

DELAY = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvexGame:
    """Size of the game.

    Attributes:
        num_rounds: T, half of them in A, half in B; a round is a request.
        num_positions: Examples of a round.
        draft_vocabulary_size: Tokens that the head can propose.
        rank: Features that its projection keeps.
        radius: Of the ball that rules and minimisers stay in.
        tolerance: Gap at which a minimiser is good enough.
        max_steps: Steps after which its search stops; the gap then says how good it is.
    """

    num_rounds: int = 40
    num_positions: int = 32
    draft_vocabulary_size: int = 256
    rank: int = 32
    radius: float = 1.0
    tolerance: float = 2e-3
    max_steps: int = 400


def convex_rows(ground: Ground, game: ConvexGame) -> list[dict[str, Any]]:
    """Play every rule on a stream that switches in its middle; one row per rule and delay."""
    rows = _rows(ground, game)
    head = TrainableConvex("convex", rows, num_levels=1, rank=game.rank)
    batches = _batches(ground, game)
    losses: list[Loss] = [partial(head.loss, batch=batch) for batch in batches]
    start = head.initial_weights()
    minimisers = stream_minimisers(
        losses,
        start,
        radius=game.radius,
        smoothness=[head.smoothness(batch) for batch in batches],
        tolerance=game.tolerance,
        max_steps=game.max_steps,
    )
    norms = [_gradient_norm(loss, start) for loss in losses]
    settings = _settings(game, max(norms))
    steepness = math.sqrt(2.0) * float(torch.linalg.matrix_norm(rows.head, 2))
    # |q - p| is at most sqrt(2), so no gradient is longer than this.
    most = steepness * max(_feature_norm(head, batch) for batch in batches)
    found: list[dict[str, Any]] = []
    for rule, late in _rules(start, settings, most, game):
        report = regret_report(
            rule,
            losses,
            minimisers,
            radius=game.radius,
            delays=[late] * game.num_rounds if late else None,
            gradient_norm=most,
        )
        found.append(asdict(report) | {"delay": late, "keeps_bound": report.keeps_bound})
    return found


def _rules(
    start: Weights, settings: OnlineGradientSettings, most: float, game: ConvexGame
) -> list[tuple[UpdateRule, int]]:
    ensemble = EnsembleSettings(
        gradient=settings, loss_scale=2.0 * game.radius * most, restarts=False
    )
    return [
        (OnlineGradient(start, settings), 0),
        (OnlineGradient(start, settings), DELAY),
        (OptimisticGradient(start, OptimisticSettings(gradient=settings)), 0),
        (Ensemble(start, ensemble), 0),
    ]


def _settings(game: ConvexGame, gradient_norm: float) -> OnlineGradientSettings:
    """Return the step of theory for a known horizon: D / (G sqrt(T))."""
    return OnlineGradientSettings(
        form="projected",
        learning_rate=2.0 * game.radius / (gradient_norm * math.sqrt(game.num_rounds)),
        radius=game.radius,
        max_gradient_norm=math.inf,
        max_step_norm=math.inf,
    )


def _rows(ground: Ground, game: ConvexGame) -> FrozenRows:
    counts = Counter[int]()
    for domain in (HOME, AWAY):
        for trace in ground.tuning[domain]:
            counts.update(trace.token_ids.tolist())
    embeddings, full = ground.rows.embeddings, ground.rows.full_head
    size = min(game.draft_vocabulary_size, len(full))
    vocabulary = frequent_tokens(counts, size=size, vocab_size=len(full))
    wide = embeddings.float()
    # Bounds are compared in float32: bfloat16 would round gradients away.
    head_rows = wide if full.data_ptr() == embeddings.data_ptr() else full.float()
    return FrozenRows.of(wide, head_rows, vocabulary)


def _batches(ground: Ground, game: ConvexGame) -> list[TrainingBatch]:
    half = game.num_rounds // 2
    traces: Sequence[RequestTrace] = [
        *ground.test[HOME][:half],
        *ground.test[AWAY][: game.num_rounds - half],
    ]
    rng, found = np.random.default_rng(0), list[TrainingBatch]()
    for index, trace in enumerate(traces):
        memory = ExampleMemory(max_positions=10**9)
        memory.add(segment(index, trace))
        batch = memory.draw(game.num_positions, 1, rng)
        if batch is None:
            raise ValueError(f"request {index} has no example: its answer is one token long")
        found.append(batch)
    return found


def _gradient_norm(loss: Loss, weights: Weights) -> float:
    return euclidean_norm(guarded_gradient(loss, weights, max_norm=math.inf).tensors)


def _feature_norm(head: TrainableConvex, batch: TrainingBatch) -> float:
    return float(torch.linalg.vector_norm(head.features(batch, 0), dim=-1).mean())


def worst_share(rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the largest share of its bound that a rule's regret came to; below 1 all keep it."""
    shares = [
        (row["regret"] + row["regret_uncertainty"]) / row["bound"]
        for row in rows
        if row["bound"] is not None
    ]
    return float(max(shares))
