"""Training drafters from events: one trainer per drafter, each event taken once.

Every event with content and recorded features is taken once, in the order of arrival. A trainer's
state lives in the artifact of its latest release: master weights, optimizer moments, and up to
which offset events are contained in them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from learner.examples import ExampleMemory, Segment, TrainingBatch, spread_examples
from learner.expert_keeper import ExpertKeeper
from learner.feedback import Contained, Standing
from learner.gate import GateSettings
from learner.ports import ArtifactStore, ReceivedEvent, ReleaseBoard, StoreError
from learner.release_desk import DrafterIdentity, ReleaseDesk, TrainedWeights
from learner.reservoir import StreamReservoirs
from learner.spawning import SpawnSettings
from learner.updates import DEFAULT_RULE
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.registry import parse_rule
from learner.updates.rule import (
    StepReport,
    UpdateRefusedError,
    WeighingRule,
    Weights,
    on_device,
)
from schemas.events import DrafterReleased, Watermark

logger = logging.getLogger(__name__)

__all__ = [
    "DrafterTrainer",
    "TrainableDrafter",
    "TrainingSettings",
]

_MAX_REMEMBERED_VERSIONS = 256


class TrainableDrafter(Protocol):
    """A drafter with parameters, as the learner sees it.

    ``num_context`` is how many tokens before the first fed one its examples must come with;
    ``device`` is where its loss wants weights and examples.
    """

    drafter_id: str
    architecture: str
    draft_vocabulary_hash: str
    hidden_size: int
    vocab_size: int
    num_context: int
    device: torch.device

    def initial_weights(self) -> Weights:
        """Return untrained float32 parameters on ``device`` by name, the same at every call."""

    def loss(self, weights: Weights, batch: TrainingBatch) -> torch.Tensor:
        """Return the scalar loss of ``weights`` on ``batch``, differentiable in the weights."""

    def artifact(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Return the tensors that serving needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSettings:
    """How one drafter is trained.

    Attributes:
        num_levels: K of the examples, >= 1.
        batch_size: Examples per step, >= 1.
        steps_per_event: Steps after each event, >= 0.
        memory_positions: Positions of past events that steps may draw from, >= 1; a short memory
            follows the traffic, a long one keeps what it knew.
        replay_bytes: Bytes of a sample of every stream's past that half of a batch comes from; 0 =
            none.
        release_every_events: Events between two released versions, >= 1.
        keep_versions: Versions kept in the store, >= 1.
        seed: Seeds the choice of examples.
        rule: Update rule, as ``learner.updates.registry.parse_rule`` reads it.
        gradient: Step size and guards of the rule's steps.
        gate: When a version is good enough to go live; None = always.
        experts: When the head as it was is kept beside the one that learns; None = never.
    """

    num_levels: int = 4
    batch_size: int = 256
    steps_per_event: int = 3
    memory_positions: int = 1_000_000
    replay_bytes: int = 0
    release_every_events: int = 1
    keep_versions: int = 4
    seed: int = 0
    rule: str = DEFAULT_RULE
    gradient: OnlineGradientSettings = field(default_factory=OnlineGradientSettings)
    gate: GateSettings | None = None
    experts: SpawnSettings | None = None


class DrafterTrainer:
    """Trains one drafter and releases its versions.

    Args:
        drafter: What to train.
        settings: How.
        target_fingerprint, tokenizer_hash: Of the target whose events may train it.
        store: Artifacts.
        board: Releases.
        now: Returns the time in UTC, for releases.
    """

    def __init__(
        self,
        drafter: TrainableDrafter,
        settings: TrainingSettings,
        *,
        target_fingerprint: str,
        tokenizer_hash: str,
        store: ArtifactStore,
        board: ReleaseBoard,
        now: Callable[[], datetime],
    ) -> None:
        self.drafter = drafter
        self._settings = settings
        self._target_fingerprint = target_fingerprint
        self._tokenizer_hash = tokenizer_hash
        self._store = store
        identity = DrafterIdentity(
            drafter_id=drafter.drafter_id,
            architecture=drafter.architecture,
            target_fingerprint=target_fingerprint,
            tokenizer_hash=tokenizer_hash,
            draft_vocabulary_hash=drafter.draft_vocabulary_hash,
        )
        self._desk = ReleaseDesk(
            identity,
            store=store,
            board=board,
            now=now,
            gate=settings.gate,
            keep_versions=settings.keep_versions,
        )
        self._keeper: ExpertKeeper | None = None
        if settings.experts is not None:
            self._keeper = ExpertKeeper(
                identity,
                settings.experts,
                store=store,
                board=board,
                now=now,
                refuse_if_fenced=self._desk.refuse_if_fenced,
            )
            self._desk.wanted_besides = lambda: self._keeper.kept_versions if self._keeper else ()
        size = settings.replay_bytes
        self._past = StreamReservoirs(size, seed=settings.seed) if size else None
        self._memory = ExampleMemory(settings.memory_positions, past=self._past)
        self._partition_to_contained: dict[int, Contained] = {}
        self._partition_to_next: dict[int, int] = {}
        self._partition_to_copies: dict[int, set[int]] = {}
        self._resume_from: dict[int, int] = {}
        self._num_unreleased = 0
        self._update_seconds = 0.0
        self.num_refused_steps = 0
        self.num_failed_releases = 0
        self.last_report: StepReport | None = None
        self._rule = parse_rule(settings.rule)
        self._update = self._rule.build(drafter.initial_weights(), settings.gradient)
        self._num_updates = 0
        self._version_to_num_updates: dict[int, int] = {}
        self._resume()

    @property
    def version(self) -> int:
        """Version that training goes on from; -1 before the first."""
        return self._desk.continued

    @property
    def num_updates(self) -> int:
        """Steps taken since the weights were untrained."""
        return self._num_updates

    @property
    def update_seconds(self) -> float:
        """What training has taken since the live version, its share of having states included."""
        return self._update_seconds

    @property
    def expert_ids(self) -> tuple[str, ...]:
        """Ids under which the drafter as it was is kept."""
        return self._keeper.expert_ids if self._keeper else ()

    def start_offsets(self) -> Mapping[int, int]:
        """Return per partition where reading must begin to rebuild the memory."""
        return self._resume_from

    def needs(self, received: ReceivedEvent) -> bool:
        """Tell whether ``take`` would do something with the event's segment."""
        partition, offset = received.partition, received.offset
        if offset < self._partition_to_next.get(partition, 0):
            return False
        standing = self._partition_to_contained.get(partition, Contained()).standing(received)
        is_copy = offset in self._partition_to_copies.get(partition, ())
        return standing is not Standing.LATE and not is_copy

    def take(self, received: ReceivedEvent, segment: Segment | None) -> None:
        """Remember the event's segment; train on it if it is new, and release when it is time.

        An event without a segment has nothing to train on and only counts as contained.
        """
        partition = received.partition
        if received.offset < self._partition_to_next.get(partition, 0):
            return  # delivered again
        self._partition_to_next[partition] = received.offset + 1
        contained = self._partition_to_contained.get(partition, Contained())
        standing = contained.standing(received)
        copies = self._partition_to_copies.setdefault(partition, set())
        if standing is Standing.LATE:
            copies.add(received.offset)
        if segment is not None and received.offset not in copies:
            self._memory.add(segment, is_new=standing is Standing.NEW)
        if standing is not Standing.NEW:
            return
        self._partition_to_contained[partition] = contained.with_event(received)
        live = self._desk.live
        if self._desk.observe(received.event, self._training_window):
            self._go_back()
        if self._desk.live is not live:
            self._update_seconds = 0.0
        if self._keeper is not None and self._desk.live is not None:
            self._keeper.observe(received.event, self._desk.live.version, self._training_window)
        if segment is not None:
            self._update_seconds += segment.state_seconds
            self._train(segment, self._updates_when_served(received))
            self._num_unreleased += 1
        is_due = self._num_unreleased >= self._settings.release_every_events
        if is_due and self._desk.is_open:
            self._try_to_release()

    def _try_to_release(self) -> None:
        """Release, or go on training and try again after the next event."""
        try:
            self.release(f"{self._settings.steps_per_event} steps after each event")
        except StoreError as error:
            self.num_failed_releases += 1
            logger.error("drafter %s is not released: %s", self.drafter.drafter_id, error)

    def release(self, reason: str) -> DrafterReleased:
        """Write the weights as the next version and announce it, live or on trial.

        Raises:
            FencedError: If another trainer has released a version since: it is the active one.
            StoreError: If it could not be stored; training can go on, and release later.
        """
        version = self._desk.next_version()
        self._version_to_num_updates[version] = self._num_updates
        weights = TrainedWeights(
            tensors=self.drafter.artifact(self._update.served_weights),
            config=self._config(),
            training_state=self._update.state(),
        )
        release = self._desk.release(
            version,
            weights,
            self._training_window(),
            reason,
            update_seconds=self._update_seconds,
        )
        self._num_unreleased = 0
        return release

    def _updates_when_served(self, received: ReceivedEvent) -> int:
        """Return the updates that were in the weights this event was drafted with.

        Weights older than all that are remembered count as the oldest of them, and an event
        without this drafter as drafted with the newest.
        """
        versions = {one.drafter_id: one.weights_version for one in received.event.drafters}
        version = versions.get(self.drafter.drafter_id)
        known = self._version_to_num_updates
        if version is None or not known:
            return self._num_updates
        counts = [count for one, count in known.items() if one <= version]
        return max(counts, default=min(known.values()))

    def _train(self, segment: Segment, updates_when_served: int) -> None:
        settings = self._settings
        rng = np.random.default_rng([settings.seed, segment.partition, segment.offset])
        began = time.perf_counter()
        self._weigh(segment)
        for _ in range(settings.steps_per_event):
            batch = self._memory.draw(
                settings.batch_size,
                settings.num_levels,
                rng,
                num_context=self.drafter.num_context,
            )
            if batch is None:
                return
            try:
                self.last_report = self._update.step(
                    partial(self.drafter.loss, batch=batch.to(self.drafter.device)),
                    delay_updates=self._num_updates - updates_when_served,
                )
                self._num_updates += 1
            except UpdateRefusedError as error:
                self.num_refused_steps += 1
                logger.warning("%s: %s", self.drafter.drafter_id, error)
        self._update_seconds += time.perf_counter() - began

    def _weigh(self, segment: Segment) -> None:
        """Let a rule of several experts see how they do on what none has learned from."""
        if not isinstance(self._update, WeighingRule):
            return
        fresh = spread_examples(
            segment, self._settings.num_levels, num_context=self.drafter.num_context
        )
        if fresh is not None:
            self._update.weigh(partial(self.drafter.loss, batch=fresh.to(self.drafter.device)))

    def _training_window(self) -> Watermark:
        offsets: dict[int, int] = {}
        sequences: dict[str, int] = {}
        for contained in self._partition_to_contained.values():
            mark = contained.watermark()
            offsets |= mark.partition_to_offset
            for worker, sequence in mark.worker_to_sequence.items():
                sequences[worker] = max(sequence, sequences.get(worker, sequence))
        return Watermark(partition_to_offset=offsets, worker_to_sequence=sequences)

    def _config(self) -> dict[str, object]:
        memory_from = self._memory.first_offsets()
        # Read again from there, a copy could no longer be told from its original.
        copies = {
            str(partition): sorted(o for o in offsets if o >= memory_from.get(partition, o + 1))
            for partition, offsets in self._partition_to_copies.items()
        }
        contained = {
            str(partition): {
                "offset": known.partition_to_offset[partition],
                "workers": {w: list(latest) for w, latest in known.worker_to_latest.items()},
            }
            for partition, known in self._partition_to_contained.items()
        }
        return {
            "architecture": self.drafter.architecture,
            "target_fingerprint": self._target_fingerprint,
            "tokenizer_hash": self._tokenizer_hash,
            "draft_vocabulary_hash": self.drafter.draft_vocabulary_hash,
            "contained": contained,
            "memory_from_offset": {str(p): o for p, o in memory_from.items()},
            "memory_copies": copies,
            "reservoirs": {} if self._past is None else self._past.state(),
            "experts": None if self._keeper is None else self._keeper.state(),
            "rule": {"name": self._update.name, "version": self._update.version},
            "num_updates": self._num_updates,
            "version_to_num_updates": self._remembered_versions(),
        }

    def _remembered_versions(self) -> dict[str, int]:
        """Return the updates in each of the newest versions; older ones are forgotten."""
        newest = sorted(self._version_to_num_updates)[-_MAX_REMEMBERED_VERSIONS:]
        self._version_to_num_updates = {v: self._version_to_num_updates[v] for v in newest}
        return {str(v): count for v, count in self._version_to_num_updates.items()}

    def _resume(self) -> None:
        """Continue from the latest release, or make the untrained drafter the first one."""
        latest = self._desk.resume()
        if latest is None:
            self.release("untrained")
            return
        config = self._load(latest)
        contained = {
            # A version that came back carries how far its successor had read.
            str(partition): {"offset": offset, "workers": {}}
            for partition, offset in latest.training_window.partition_to_offset.items()
        } | config["contained"]
        for partition, known in contained.items():
            workers = {w: (int(e), int(q)) for w, (e, q) in known["workers"].items()}
            given_up = latest.training_window.partition_to_offset.get(int(partition), 0)
            offset = max(int(known["offset"]), given_up)
            place = {int(partition): offset}
            self._partition_to_contained[int(partition)] = Contained(place, workers)
            self._resume_from[int(partition)] = offset
        for partition, offset in config["memory_from_offset"].items():
            self._resume_from[int(partition)] = int(offset)
        for partition, offsets in config.get("memory_copies", {}).items():
            self._partition_to_copies[int(partition)] = set(offsets)
        if self._past is not None:
            self._past.resume(config.get("reservoirs", {}))
        if self._keeper is not None:
            self._keeper.resume(config.get("experts"))

    def _load(self, release: DrafterReleased) -> Mapping[str, Any]:
        """Take over weights, optimizer and meta state of a release; return its config."""
        config = self._store.read_config(
            release.artifact_uri, manifest_sha256=release.manifest_sha256
        )
        self._refuse_other(config)
        read = self._store.read_training_state(
            release.artifact_uri, manifest_sha256=release.manifest_sha256
        )
        state = on_device(read, self.drafter.device)
        # Releases from before there were several rules do not name theirs.
        rule = config.get("rule", {"name": OnlineGradient.name, "version": OnlineGradient.version})
        self._update = self._rule.resume(
            state, self._settings.gradient, name=rule["name"], version=rule["version"]
        )
        self._num_updates = int(config.get("num_updates", 0))
        counts = config.get("version_to_num_updates", {release.version: self._num_updates})
        self._version_to_num_updates = {int(v): int(count) for v, count in counts.items()}
        return config

    def _go_back(self) -> None:
        """Restore the live version, and forget what the refused one was trained on since.

        Events stay contained: what led astray is not read again.
        """
        live = self._desk.live
        assert live is not None  # nothing is refused before there is a live version
        config = self._load(live)
        offsets = {int(p): int(known["offset"]) for p, known in config["contained"].items()}
        self._memory.forget_from(offsets)
        self._num_unreleased = 0

    def _refuse_other(self, config: Mapping[str, Any]) -> None:
        wanted = {
            "architecture": self.drafter.architecture,
            "target_fingerprint": self._target_fingerprint,
            "draft_vocabulary_hash": self.drafter.draft_vocabulary_hash,
        }
        for key, expected in wanted.items():
            if config.get(key) != expected:
                raise ValueError(
                    f"released drafter {self.drafter.drafter_id}: {key} is {config.get(key)}, "
                    f"expected {expected}: retire it, or train under another id"
                )
