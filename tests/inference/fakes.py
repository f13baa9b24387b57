"""Drafters with a will of their own, for the tests of inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from inference.engine import EngineOptions, RequestRun
from inference.pool import DrafterPool
from inference.ports import NO_PROPOSAL, Draft, Drafter, DraftSession, Predictions, WindowBatch
from inference.recording import Round
from inference.sampling import SamplingParams, draw
from inference.target import Target
from inference.trajectory import Trajectory
from learner.request_selector import RequestSelector
from schemas.events import DrafterVersion, FinishReason

Behaviour = Callable[[Trajectory, int, np.random.Generator], Draft]
"""What a fake drafts: from the request, at most so many tokens, with these dice."""


@dataclass(kw_only=True)
class FakeDrafter:
    """Drafts by ``behaviour``; predicts nothing, or what ``prediction`` says.

    Attributes:
        finished: Tokens of every finished request.
        num_drafts: Calls to ``draft``.
    """

    behaviour: Behaviour
    drafter_id: str = "fake"
    weights_version: int = 0
    prediction: Callable[[Trajectory, WindowBatch], Predictions] | None = None
    on_start: Callable[[], None] = lambda: None
    finished: list[list[int]] = field(default_factory=list)
    num_drafts: int = 0

    @property
    def version(self) -> DrafterVersion:
        """Id and version."""
        return DrafterVersion(drafter_id=self.drafter_id, weights_version=self.weights_version)

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> DraftSession:
        """Begin a request."""
        self.on_start()
        return FakeSession(self, trajectory)


@dataclass
class FakeSession:
    """One request of a fake."""

    drafter: FakeDrafter
    trajectory: Trajectory

    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Behave."""
        self.drafter.num_drafts += 1
        return self.drafter.behaviour(self.trajectory, num_tokens, rng)

    def predict(self, windows: WindowBatch) -> Predictions:
        """Say what the test wants said."""
        if self.drafter.prediction is not None:
            return self.drafter.prediction(self.trajectory, windows)
        shape = (len(windows.starts), windows.num_speculative_tokens)
        return Predictions(proposals=np.full(shape, NO_PROPOSAL, dtype=np.int64))

    def finish(self) -> None:
        """Remember the request."""
        self.drafter.finished.append(list(self.trajectory.token_ids))


def scripted(token_ids: Sequence[int], *, drafter_id: str = "scripted") -> FakeDrafter:
    """Return a drafter that knows the whole sequence by position and proposes it."""

    def behaviour(trajectory: Trajectory, num_tokens: int, rng: np.random.Generator) -> Draft:
        first = len(trajectory)
        return Draft(token_ids=tuple(token_ids[first : first + num_tokens]))

    return FakeDrafter(behaviour=behaviour, drafter_id=drafter_id)


def random_tokens(vocab_size: int, *, drafter_id: str = "random") -> FakeDrafter:
    """Return a drafter that proposes 0..num_tokens uniform tokens, one-hot."""

    def behaviour(trajectory: Trajectory, num_tokens: int, rng: np.random.Generator) -> Draft:
        count = int(rng.integers(0, num_tokens + 1))
        return Draft(token_ids=tuple(int(t) for t in rng.integers(0, vocab_size, count)))

    return FakeDrafter(behaviour=behaviour, drafter_id=drafter_id)


def random_draws(probs: torch.Tensor, *, drafter_id: str = "draws") -> FakeDrafter:
    """Return a drafter that draws every token from ``probs`` (V,) and says so."""

    def behaviour(trajectory: Trajectory, num_tokens: int, rng: np.random.Generator) -> Draft:
        rows = probs.expand(num_tokens, -1)
        return Draft(token_ids=tuple(draw(rows, rng.random(num_tokens))), probs=rows)

    return FakeDrafter(behaviour=behaviour, drafter_id=drafter_id)


def not_finite(value: float, vocab_size: int, *, drafter_id: str = "not-finite") -> FakeDrafter:
    """Return a drafter whose draft probabilities are NaN or infinite."""

    def behaviour(trajectory: Trajectory, num_tokens: int, rng: np.random.Generator) -> Draft:
        return Draft(token_ids=(1,), probs=torch.full((1, vocab_size), value))

    return FakeDrafter(behaviour=behaviour, drafter_id=drafter_id)


def proposing(draft: Draft, *, drafter_id: str = "proposing") -> FakeDrafter:
    """Return a drafter that always proposes the same draft, wanted or not."""
    return FakeDrafter(behaviour=lambda *_: draft, drafter_id=drafter_id)


def raising(error: Exception, *, after: int = 0, drafter_id: str = "raising") -> FakeDrafter:
    """Return a drafter that proposes nothing ``after`` times and then raises."""

    def behaviour(trajectory: Trajectory, num_tokens: int, rng: np.random.Generator) -> Draft:
        if drafter.num_drafts > after:
            raise error
        return Draft()

    drafter = FakeDrafter(behaviour=behaviour, drafter_id=drafter_id)
    return drafter


def start_run(
    target: Target,
    drafters: Sequence[Drafter] | DrafterPool,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    options: EngineOptions | None = None,
    policy: str = "hedge",
    stream: str = "stream",
    seed: int = 0,
) -> RequestRun:
    """Return a request that has not begun."""
    pool = drafters if isinstance(drafters, DrafterPool) else DrafterPool(drafters)
    options = options or EngineOptions()
    return RequestRun(
        target,
        pool,
        prompt,
        params,
        options,
        RequestSelector.fresh(policy, len(pool), options.num_speculative_tokens),
        stream=stream,
        seed=np.random.SeedSequence(seed),
    )


def finish(run: RequestRun) -> list[Round]:
    """Play the request to its end and return its rounds."""
    rounds: list[Round] = []
    while run.finish_reason is FinishReason.UNFINISHED:
        rounds.append(run.step())
    return rounds
