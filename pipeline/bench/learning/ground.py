"""What all learning runs stand on: recorded answers, a well-trained static head, its vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track

from inference.drafters.frozen_rows import DraftVocabulary, FrozenRows, frequent_tokens
from inference.drafters.hydra import HydraDrafter
from inference.drafters.hydra_training import TrainableHydra
from inference.pool import DrafterPool
from inference.target import Target
from learner.examples import ExampleMemory, Segment
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.rule import WEIGHT, Weights, without_prefix
from pipeline.bench.domains import Domain
from pipeline.bench.heads import cached_tensors
from pipeline.bench.learning.streams import AWAY, ELSEWHERE, HOME
from pipeline.bench.learning.traces import RequestTrace, recorded_traces
from pipeline.bench.learning.worker import (
    NUM_SPECULATIVE_TOKENS,
    TargetFacts,
    acceptances,
)

RECIPE = 2
"""Counts the versions of the static head's recipe; a new one trains afresh."""

HEAD = "head"
"""Id of the head that learns."""

LATE_RATE_SHARE = 0.3
"""Step size in the last third of the static head's training, relative to before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroundSize:
    """How much is recorded and trained.

    Attributes:
        max_tokens: Tokens per answer.
        num_training: Answers in A that train the static head.
        num_validation: Answers in A that choose its snapshot; they tune as well.
        num_tuning: Answers in B on which hyper-parameters were chosen.
        num_vocabulary: Answers in C that are counted for the draft vocabulary, and no more.
        num_home, num_away, num_elsewhere: Test answers in A, B and C.
        draft_vocabulary_size: Tokens that the head can propose.
        inner_size: Width of its mixing layer.
        batch_size: Examples of a step of its training.
        num_steps: Steps of its training.
        num_snapshots: Snapshots that the validation chooses from.
    """

    max_tokens: int = 48
    num_training: int = 352
    num_validation: int = 32
    num_tuning: int = 64
    num_vocabulary: int = 32
    num_home: int = 416
    num_away: int = 192
    num_elsewhere: int = 96
    draft_vocabulary_size: int = 4096
    inner_size: int = 576
    batch_size: int = 192
    num_steps: int = 420
    num_snapshots: int = 7


@dataclass(frozen=True, kw_only=True, slots=True)
class Ground:
    """What a run needs; no target any more.

    Attributes:
        rows: What the target lends to heads.
        facts: Of the target.
        inner_size: Width of the heads' mixing layer.
        static: Weights of the static head, float32.
        moments: Its optimizer's, as an online gradient's state names them.
        validation_lengths: Mean acceptance length of its snapshots by steps, on A.
        training: Answers that it was trained on.
        tuning: Answers of A and B for choosing hyper-parameters.
        test: Answers of every domain that no choice was made on.
    """

    rows: FrozenRows
    facts: TargetFacts
    inner_size: int
    static: Weights
    moments: Mapping[str, torch.Tensor]
    validation_lengths: Mapping[int, float]
    training: Sequence[RequestTrace]
    tuning: Mapping[str, Sequence[RequestTrace]]
    test: Mapping[str, Sequence[RequestTrace]]

    def drafter(self, weights: Weights, version: int = 0) -> HydraDrafter:
        """Return a head with weights, as it is served."""
        return HydraDrafter(HEAD, version, weights, self.rows)


def segment(index: int, trace: RequestTrace) -> Segment:
    """Return a request as training material."""
    return Segment(
        partition=0,
        offset=index,
        hidden=trace.hidden.astype(np.float32),
        token_ids=trace.token_ids,
        top_token_ids=trace.top_token_ids,
        top_probabilities=np.exp(trace.top_log_probs.astype(np.float32)),
    )


def asked_prompts(
    domains: Sequence[Domain], size: GroundSize
) -> dict[tuple[str, str], Sequence[str]]:
    """Return the prompts that the target answers, by domain and split."""
    by_name = {domain.name: domain for domain in domains}
    counts = {
        (HOME, "train"): size.num_training + size.num_validation,
        (AWAY, "train"): size.num_tuning,
        (ELSEWHERE, "train"): size.num_vocabulary,
        (HOME, "test"): size.num_home,
        (AWAY, "test"): size.num_away,
        (ELSEWHERE, "test"): size.num_elsewhere,
    }
    return {
        (name, split): getattr(by_name[name], split)[:count]
        for (name, split), count in counts.items()
    }


def learning_ground(
    target: Target,
    domains: Sequence[Domain],
    size: GroundSize,
    *,
    cache: Path | None,
    console: Console,
) -> Ground:
    """Record what is missing, train the static head if need be, and return all.

    Args:
        target: Answers, and lends its rows.
        domains: Of ``read_domains``.
        size: How much.
        cache: Folder of the cache; None for the user's own.
        console: Where progress goes.
    """
    traces = {
        (name, split): recorded_traces(
            target,
            prompts,
            max_tokens=size.max_tokens,
            cache=cache,
            what=f"{split} prompts of {name}",
            console=console,
        )
        for (name, split), prompts in asked_prompts(domains, size).items()
    }
    home, tuning = traces[HOME, "train"], traces[AWAY, "train"]
    training, validation = home[: size.num_training], home[size.num_training :]
    counted = [*training, *tuning, *traces[ELSEWHERE, "train"]]
    vocabulary = _vocabulary(counted, size, target.vocab_size)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    recipe = repr((RECIPE, target.fingerprint, str(target.dtype), size, vocabulary.sha256))
    tensors = cached_tensors(
        "learning-head", recipe, cache, lambda: _static(rows, training, validation, size, console)
    )
    steps = tensors.pop("steps").tolist()
    lengths = tensors.pop("lengths").tolist()
    return Ground(
        rows=rows,
        facts=TargetFacts(
            target_id=target.target_id,
            fingerprint=target.fingerprint,
            tokenizer_hash=target.tokenizer_hash,
        ),
        inner_size=size.inner_size,
        static=without_prefix(WEIGHT, tensors),
        moments={k: v for k, v in tensors.items() if not k.startswith(WEIGHT)},
        validation_lengths=dict(zip(steps, lengths, strict=True)),
        training=training,
        tuning={HOME: validation, AWAY: tuning},
        test={name: traces[name, "test"] for name in (HOME, AWAY, ELSEWHERE)},
    )


def mean_acceptance_length(
    drafter: HydraDrafter, traces: Sequence[RequestTrace], rows: FrozenRows
) -> float:
    """Return tokens per verification of one head on some answers."""
    served = acceptances(DrafterPool([drafter]), traces, rows)
    return sum(one.num_tokens for one in served) / sum(one.num_rounds for one in served)


def _vocabulary(counted: Sequence[RequestTrace], size: GroundSize, most: int) -> DraftVocabulary:
    counts = Counter[int]()
    for trace in counted:
        counts.update(trace.token_ids.tolist())
    return frequent_tokens(counts, size=min(size.draft_vocabulary_size, most), vocab_size=most)


def _static(
    rows: FrozenRows,
    training: Sequence[RequestTrace],
    validation: Sequence[RequestTrace],
    size: GroundSize,
    console: Console,
) -> dict[str, torch.Tensor]:
    """Train the static head until nothing more is to be gained; keep its best snapshot."""
    memory = ExampleMemory(max_positions=10**9)
    for index, trace in enumerate(training):
        memory.add(segment(index, trace))
    head = TrainableHydra(HEAD, rows, inner_size=size.inner_size)
    settings = OnlineGradientSettings()
    update = OnlineGradient(head.initial_weights(), settings)
    rng, found = np.random.default_rng(0), list[tuple[float, int, dict[str, torch.Tensor]]]()
    spacing = max(size.num_steps // size.num_snapshots, 1)
    shown = track(range(1, size.num_steps + 1), "training the static head", console=console)
    for step in shown:
        if step == 2 * size.num_steps // 3:
            late = replace(settings, learning_rate=LATE_RATE_SHARE * settings.learning_rate)
            update = OnlineGradient.from_state(update.state(), late)
        batch = memory.draw(size.batch_size, NUM_SPECULATIVE_TOKENS, rng)
        if batch is None:
            raise ValueError("the answers of the training prompts gave no example")
        update.step(partial(head.loss, batch=batch))
        if step % spacing == 0:
            drafter = HydraDrafter(HEAD, step, update.weights, rows)
            length = mean_acceptance_length(drafter, validation, rows)
            found.append((length, step, update.state()))
    best = max(found, key=lambda one: one[0])
    return best[2] | {
        "steps": torch.tensor([step for _, step, _ in found]),
        "lengths": torch.tensor([length for length, _, _ in found], dtype=torch.float64),
    }
