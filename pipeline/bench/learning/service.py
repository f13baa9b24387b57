"""Worker and learner of a learning run: the production trainer at recorded events, in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import torch

from inference.drafters.frozen_rows import VOCABULARY
from inference.drafters.hydra import HydraDrafter
from inference.drafters.hydra_training import TrainableHydra
from inference.drafters.nothing import NothingDrafter
from inference.pool import DrafterPool
from inference.scoring import ScoredBatch
from inference.shadows import beside, nothing_beside
from learner.online_trainer import OnlineTrainer
from learner.training import DrafterTrainer, TrainingSettings
from pipeline.bench.learning.board import MemoryBoard, MemoryStore
from pipeline.bench.learning.ground import HEAD, Ground
from pipeline.bench.learning.traces import RequestTrace
from pipeline.bench.learning.worker import (
    NUM_SPECULATIVE_TOKENS,
    ReplayedFeatures,
    Scores,
    Sender,
    Served,
    scores,
    verification_event,
)
from schemas.events import DrafterReleased, ReleaseState, VerificationEvent

_START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedEvent:
    """One event with its place (``learner.ports.ReceivedEvent``)."""

    partition: int
    offset: int
    event: VerificationEvent


class StartingHead(TrainableHydra):
    """The head that learns, whose training begins where the static head's ended."""

    def __init__(self, ground: Ground) -> None:
        super().__init__(HEAD, ground.rows, inner_size=ground.inner_size)
        self._static = dict(ground.static)

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return the static head's."""
        return dict(self._static)


class ReplayedService:
    """The loop of production without its outside: events go in, the pool changes.

    The trainer resumes from a release of the static head whose training events it has contained,
    as after a restart: its memory is full of them, and its optimizer begins anew.

    Args:
        ground: What it stands on.
        settings: How the head is trained.

    Attributes:
        pool: Head, and perhaps experts and a version on trial, as they serve now.
        trainer: Of the head.
        board: What it has published.
        num_past_releases: Releases before the first event of the run.
    """

    def __init__(self, ground: Ground, settings: TrainingSettings) -> None:
        self.ground = ground
        self.board = MemoryBoard()
        self.pool = DrafterPool([ground.drafter(ground.static)])
        self._store, self._features = MemoryStore(), ReplayedFeatures()
        self._canary_share = settings.gate.canary_share if settings.gate else 0.0
        past = self._past_events()
        self._release_static(settings, past)
        self.trainer = self._trainer(settings)
        self._online = self._online_trainer(self.trainer)
        for received in past:
            self._online.train(received)  # contained already: it only fills the memory
        self._num_events = len(past)
        self._take_up(self.board.take())
        self.num_past_releases = len(self.board.history)

    def score(self, request_id: str, trace: RequestTrace) -> Scores:
        """Score the pool on a request, as it stands now."""
        self._features.id_to_trace[request_id] = trace
        return scores(self.pool, request_id, trace, self.ground.rows)

    def deliver(self, event: VerificationEvent) -> float:
        """Hand an event to the learner and take up what it publishes; return its CPU seconds."""
        received = PlacedEvent(partition=0, offset=self._num_events, event=event)
        self._num_events += 1
        began = time.thread_time()
        self._online.train(received)
        seconds = time.thread_time() - began
        self._take_up(self.board.take())
        return seconds

    def _past_events(self) -> list[PlacedEvent]:
        """Return the events that trained the static head; nothing was scored in them."""
        found = []
        for index, trace in enumerate(self.ground.training):
            request_id = f"past-{index}"
            self._features.id_to_trace[request_id] = trace
            unscored = _unscored(self.pool, trace)
            served = Served.by_one(unscored.accepted[:, 0])
            sender = Sender(worker_id="past", sequence=index)
            event = verification_event(
                request_id, trace, unscored, served, sender, self.ground.facts
            )
            found.append(PlacedEvent(partition=0, offset=index, event=event))
        return found

    def _release_static(self, settings: TrainingSettings, past: Sequence[PlacedEvent]) -> None:
        """Release the static head as one that has these events contained."""
        idle = replace(settings, steps_per_event=0, release_every_events=len(past) + 1, gate=None)
        trainer = self._trainer(idle)
        online = self._online_trainer(trainer)
        for received in past:
            online.train(received)
        release = trainer.release("trained before the stream")
        self._store.add_to_training_state(release.artifact_uri, self.ground.moments)

    def _trainer(self, settings: TrainingSettings) -> DrafterTrainer:
        ground = self.ground
        return DrafterTrainer(
            StartingHead(ground),
            settings,
            target_fingerprint=ground.facts.fingerprint,
            tokenizer_hash=ground.facts.tokenizer_hash,
            store=self._store,
            board=self.board,
            now=lambda: _START,
        )

    def _online_trainer(self, trainer: DrafterTrainer) -> OnlineTrainer:
        return OnlineTrainer(
            [trainer], self._features, target_fingerprint=self.ground.facts.fingerprint
        )

    def _take_up(self, releases: Sequence[DrafterReleased]) -> None:
        """Change the pool as a worker does (``pipeline.messaging.inbox``)."""
        for drafter_id in {release.drafter_id for release in releases}:
            own, other = self.board.id_to_live[drafter_id], self.board.id_to_beside.get(drafter_id)
            if own.state is ReleaseState.LIVE and own in releases:
                self.pool.replace(self._loaded(own))
            elif own.state is ReleaseState.RETIRED:
                self.pool.replace(NothingDrafter(drafter_id))
            if other is not None and other in releases:
                self._take_up_beside(other)

    def _take_up_beside(self, release: DrafterReleased) -> None:
        match release.state:
            case ReleaseState.SHADOW:
                self.pool.replace(beside(self._loaded(release)))
            case ReleaseState.CANARY:
                drafter = self._loaded(release)
                self.pool.replace(beside(drafter, canary_share=self._canary_share))
            case ReleaseState.CANDIDATE:
                return
            case _:
                self.pool.replace(nothing_beside(release.drafter_id))

    def _loaded(self, release: DrafterReleased) -> HydraDrafter:
        tensors = dict(self._store.uri_to_version[release.artifact_uri].tensors)
        del tensors[VOCABULARY]
        return HydraDrafter(release.drafter_id, release.version, tensors, self.ground.rows)


def _unscored(pool: DrafterPool, trace: RequestTrace) -> Scores:
    shape = (0, NUM_SPECULATIVE_TOKENS, len(pool))
    return Scores(
        versions=pool.versions,
        batch=ScoredBatch(
            starts=np.empty(0, np.int32),
            num_levels=np.empty(0, np.int16),
            acceptance_probability=np.empty(shape, np.float16),
            realised_acceptance=np.empty(shape, np.float16),
        ),
        accepted=np.zeros((max(len(trace.token_ids) - 1, 0), len(pool)), dtype=np.int64),
    )
