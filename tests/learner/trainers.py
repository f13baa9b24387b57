"""Small parts for the tests of training: a trainable, features, releases, events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from learner.examples import TrainingBatch
from learner.online_trainer import OnlineTrainer
from learner.ports import ReceivedEvent, ReleaseBoard
from learner.training import DrafterTrainer, TrainingSettings
from learner.updates.online_gradient import OnlineGradientSettings
from learner.updates.rule import Weights
from pipeline.releases.registry import DrafterRegistry
from schemas.codec import decode_drafter_released, encode
from schemas.events import DrafterReleased, FeatureReference, VerificationEvent
from tests.learner.fakes import PlacedEvent
from tests.schemas.builders import make_event

HIDDEN, VOCAB = 5, 30
SETTINGS = TrainingSettings(
    num_levels=2,
    batch_size=8,
    steps_per_event=2,
    gradient=OnlineGradientSettings(learning_rate=0.05),
)


class Softmax:
    """One matrix from the state to the next token (``learner.training.TrainableDrafter``)."""

    architecture = "softmax"
    draft_vocabulary_hash = ""
    hidden_size = HIDDEN
    num_context = 0
    device = torch.device("cpu")
    vocab_size = VOCAB

    def __init__(self, drafter_id: str = "softmax") -> None:
        self.drafter_id = drafter_id
        self.num_losses = 0

    def initial_weights(self) -> dict[str, torch.Tensor]:
        """Return zeros."""
        return {"matrix": torch.zeros((VOCAB, HIDDEN))}

    def loss(self, weights: Weights, batch: TrainingBatch) -> torch.Tensor:
        """Return the cross-entropy of the first level."""
        self.num_losses += 1
        logits = batch.hidden @ weights["matrix"].T
        return torch.nn.functional.cross_entropy(logits, batch.label_token_ids[:, 0])

    def artifact(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Return the matrix."""
        return {"matrix": weights["matrix"].clone()}


@dataclass
class Releases:
    """The board of releases as the bytes that travel."""

    history: list[bytes] = field(default_factory=list)
    beside: list[bytes] = field(default_factory=list)

    def read_beside(self) -> Sequence[DrafterReleased]:
        """Return the newest of what was beside every drafter."""
        return list({release.drafter_id: release for release in self.all_beside()}.values())

    def all_beside(self) -> list[DrafterReleased]:
        """Return all of what was beside the drafters, in order."""
        return [decode_drafter_released(data) for data in self.beside]

    def publish_beside(self, release: DrafterReleased) -> None:
        """Keep one of the version beside."""
        self.beside.append(encode(release))

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter."""
        return list({release.drafter_id: release for release in self.all_releases()}.values())

    def all_releases(self) -> list[DrafterReleased]:
        """Return every release, in order."""
        return [decode_drafter_released(data) for data in self.history]

    def publish(self, release: DrafterReleased) -> None:
        """Keep one."""
        self.history.append(encode(release))


class Features:
    """Hidden states made from the uri, or what the test put in its place."""

    def __init__(self) -> None:
        self.uri_to_rows: dict[str, NDArray[np.float32] | None] = {}

    def read(self, reference: FeatureReference) -> NDArray[np.float32]:
        """Return rows that depend on the event; ``LookupError`` if they are gone."""
        if reference.uri in self.uri_to_rows:
            rows = self.uri_to_rows[reference.uri]
            if rows is None:
                raise LookupError(f"{reference.uri} is gone")
            return rows
        rng = np.random.default_rng(int(reference.uri.removeprefix("memory://")))
        return rng.standard_normal((reference.num_rows, HIDDEN), dtype=np.float32)


@dataclass
class Place:
    """Everything that outlives a trainer's process."""

    folder: Path
    releases: Releases = field(default_factory=Releases)
    features: Features = field(default_factory=Features)

    @property
    def registry(self) -> DrafterRegistry:
        """The real registry."""
        return DrafterRegistry(str(self.folder))

    def trainer(
        self,
        settings: TrainingSettings = SETTINGS,
        *,
        drafter: Softmax | None = None,
        target_fingerprint: str = "fingerprint-0",
        board: ReleaseBoard | None = None,
    ) -> DrafterTrainer:
        """Start a process."""
        return DrafterTrainer(
            drafter or Softmax(),
            settings,
            target_fingerprint=target_fingerprint,
            tokenizer_hash="tokenizer-0",
            store=self.registry,
            board=board or self.releases,
            now=lambda: datetime(2026, 11, 29, tzinfo=UTC),
        )

    def online(self, *trainers: DrafterTrainer) -> OnlineTrainer:
        """Return what the learner sees."""
        return OnlineTrainer(trainers, self.features, target_fingerprint="fingerprint-0")

    def states(self, drafter_id: str = "softmax") -> list[Mapping[str, torch.Tensor]]:
        """Return the training state of every release, in order."""
        releases = [decode_drafter_released(data) for data in self.releases.history]
        return [
            self.registry.read_training_state(one.artifact_uri, manifest_sha256=one.manifest_sha256)
            for one in releases
            if one.drafter_id == drafter_id
        ]


def event_of(
    sequence: int, *, num_windows: int = 6, worker_epoch: int = 1, num_drafters: int = 3
) -> VerificationEvent:
    """Return an event with content and features of its own."""
    event = make_event(
        sequence=sequence,
        num_windows=num_windows,
        with_content=True,
        worker_epoch=worker_epoch,
        num_drafters=num_drafters,
    )
    assert event.content is not None
    rng = np.random.default_rng(sequence)
    content = replace(
        event.content,
        token_ids=rng.integers(0, VOCAB, event.num_positions, dtype=np.int32),
        target_top_token_ids=event.content.target_top_token_ids % VOCAB,
        features=FeatureReference(
            uri=f"memory://{sequence}", first_row=0, num_rows=event.num_positions, sha256="0" * 64
        ),
    )
    return replace(event, content=content)


def placed(events: Sequence[VerificationEvent]) -> list[PlacedEvent]:
    """Place events at offsets 0, 1, ... of partition 0."""
    return [PlacedEvent(partition=0, offset=i, event=e) for i, e in enumerate(events)]


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two states are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def train(online: OnlineTrainer, events: Sequence[ReceivedEvent]) -> None:
    """Hand over events from where the trainer asks for them."""
    first = online.start_offsets().get(0, 0)
    for received in events:
        if received.offset >= first:
            online.train(received)
