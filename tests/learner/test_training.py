"""A trainer takes each event once, survives what is wrong with it, and goes on where it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference.drafters.hydra import FrozenRows, HydraDrafter, frequent_tokens
from inference.drafters.hydra_training import TrainableHydra
from inference.drafters.nothing import NothingDrafter
from inference.sampling import SamplingParams
from inference.target import Target
from learner.examples import TrainingBatch
from learner.ports import ReceivedEvent
from learner.training import DrafterTrainer, OnlineTrainer, TrainingSettings
from learner.updates.online_gradient import OnlineGradientSettings, Weights
from pipeline.drafters import HeadLoader
from pipeline.registry import DrafterRegistry
from schemas.codec import decode_drafter_released, encode
from schemas.events import DrafterReleased, FeatureReference, VerificationEvent
from tests.inference.serving import HiddenStates, Outbox, new_worker, request_of
from tests.inference.tiny import VOCAB_SIZE, random_prompts, tiny_llama
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

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter."""
        releases = [decode_drafter_released(data) for data in self.history]
        return list({release.drafter_id: release for release in releases}.values())

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
    ) -> DrafterTrainer:
        """Start a process."""
        return DrafterTrainer(
            drafter or Softmax(),
            settings,
            target_fingerprint=target_fingerprint,
            tokenizer_hash="tokenizer-0",
            store=self.registry,
            board=self.releases,
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


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return an empty place."""
    return Place(tmp_path / "here")


def event_of(sequence: int, *, num_windows: int = 6, worker_epoch: int = 1) -> VerificationEvent:
    """Return an event with content and features of its own."""
    event = make_event(
        sequence=sequence, num_windows=num_windows, with_content=True, worker_epoch=worker_epoch
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


def test_the_untrained_drafter_is_the_first_release(place: Place) -> None:
    trainer = place.trainer()
    release = place.releases.read_all()[0]
    assert (release.version, release.parent_version, release.reason) == (0, -1, "untrained")
    assert trainer.version == 0


def test_every_event_with_features_trains_and_is_released(place: Place) -> None:
    drafter = Softmax()
    trainer = place.trainer(drafter=drafter)
    train(place.online(trainer), placed([event_of(i) for i in range(3)]))
    releases = [decode_drafter_released(data) for data in place.releases.history]
    assert [one.version for one in releases] == [0, 1, 2, 3]
    assert [one.parent_version for one in releases] == [-1, 0, 1, 2]
    assert [one.training_window.partition_to_offset for one in releases] == [
        {},
        {0: 1},
        {0: 2},
        {0: 3},
    ]
    assert drafter.num_losses == 3 * SETTINGS.steps_per_event
    manifests = {one.manifest_sha256 for one in releases}
    assert len(manifests) == len(releases)


def test_the_loss_of_what_repeats_falls(place: Place) -> None:
    trainer = place.trainer(replace(SETTINGS, steps_per_event=200))
    losses: list[float] = []
    original = trainer.drafter.loss

    def loss(weights: Weights, batch: TrainingBatch) -> torch.Tensor:
        value = original(weights, batch)
        losses.append(float(value.detach()))
        return value

    trainer.drafter.loss = loss  # type: ignore[method-assign]
    train(place.online(trainer), placed([event_of(0)]))
    assert np.mean(losses[-20:]) < 0.3 < np.log(VOCAB) - 0.1 < losses[0]


@pytest.mark.parametrize("crash_after", [1, 4, 7, 9])
@pytest.mark.parametrize("release_every", [1, 3])
@pytest.mark.parametrize("memory_positions", [25, 1000])
def test_a_restart_goes_on_bit_for_bit(
    place: Place, tmp_path: Path, crash_after: int, release_every: int, memory_positions: int
) -> None:
    settings = replace(
        SETTINGS,
        release_every_events=release_every,
        memory_positions=memory_positions,
        keep_versions=50,
    )
    # Copies of events arrive late, of the one before and of one that the memory has forgotten.
    numbers = [0, 1, 2, 1, 3, 4, 0, 5, 6, 6, 7, 8]
    events = placed([event_of(number) for number in numbers])
    undisturbed = Place(tmp_path / "there")
    train(undisturbed.online(undisturbed.trainer(settings)), events)
    train(place.online(place.trainer(settings)), events[:crash_after])
    train(place.online(place.trainer(settings)), events)
    expected, found = undisturbed.states(), place.states()
    assert len(expected) == 1 + 9 // release_every
    assert len(found) == len(expected)
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_duplicates_and_second_reads_train_once(place: Place, tmp_path: Path) -> None:
    settings = replace(SETTINGS, keep_versions=50)
    once, twice = Place(tmp_path / "there"), place
    first = event_of(0)
    train(once.online(once.trainer(settings)), placed([first, event_of(1), event_of(2)]))
    online = twice.online(twice.trainer(settings))
    events = placed([first, event_of(1), first, event_of(2)])
    for received in (*events[:2], *events[:2], events[2], events[2], events[3], events[3]):
        online.train(received)
    assert len(once.states()) == len(twice.states()) == 4
    for name, tensor in once.states()[2].items():
        assert torch.equal(tensor, twice.states()[2][name])


def test_new_settings_apply_after_a_resume(place: Place) -> None:
    settings = replace(SETTINGS, steps_per_event=1)
    events = placed([event_of(i) for i in range(4)])
    train(place.online(place.trainer(settings)), events[:2])
    slow = place.states()[-1]["weight.matrix"]
    faster = replace(settings, gradient=OnlineGradientSettings(learning_rate=0.5))
    train(place.online(place.trainer(faster)), events[:3])
    moved = (place.states()[-1]["weight.matrix"] - slow).norm()
    before = place.states()
    slow_step = (before[-2]["weight.matrix"] - before[-3]["weight.matrix"]).norm()
    assert moved > 5.0 * slow_step


def test_an_event_without_content_or_features_only_counts_as_contained(place: Place) -> None:
    trainer = place.trainer()
    online = place.online(trainer)
    bare = make_event(sequence=1)
    no_features = make_event(sequence=2, with_content=True)
    place.features.uri_to_rows["memory://3"] = None
    train(online, placed([event_of(0), bare, no_features, event_of(3), event_of(4)]))
    assert online.num_without_features == 3
    assert trainer.version == 2
    release = place.releases.read_all()[0]
    assert release.training_window.partition_to_offset == {0: 5}


def spoiled(sequence: int, kind: str, features: Features) -> VerificationEvent:
    """Return an event that no target can have written."""
    event = event_of(sequence)
    assert event.content is not None
    shape = (event.num_positions, HIDDEN)
    rows = np.ones(shape, dtype=np.float32)
    if kind == "nan":
        rows[1, 2] = np.nan
    elif kind == "inf":
        rows[0, 0] = np.inf
    elif kind == "width":
        rows = np.ones((shape[0], HIDDEN + 1), dtype=np.float32)
    elif kind == "length":
        rows = rows[1:]
    else:
        tokens = event.content.token_ids.copy()
        tokens[2] = VOCAB
        event = replace(event, content=replace(event.content, token_ids=tokens))
    features.uri_to_rows[f"memory://{sequence}"] = rows
    return event


@pytest.mark.parametrize("kind", ["nan", "inf", "width", "length", "token"])
def test_invalid_material_is_refused_and_later_good_data_still_learns(
    place: Place, kind: str
) -> None:
    """B4: one bad event spoils neither the weights nor the memory."""
    trainer = place.trainer()
    online = place.online(trainer)
    events = placed([event_of(0), spoiled(1, kind, place.features), event_of(2)])
    online.train(events[0])
    with pytest.raises(ValueError, match=r"worker-0\.1\.1: "):
        online.train(events[1])
    online.train(events[2])
    assert trainer.num_refused_steps == 0
    assert trainer.version == 2
    states = place.states()
    assert not same(states[1], states[2])
    assert all(torch.isfinite(tensor).all() for tensor in states[2].values())
    assert place.releases.read_all()[0].training_window.partition_to_offset == {0: 3}


def test_invalid_event_of_another_target_is_refused(place: Place) -> None:
    online = place.online(place.trainer())
    other = replace(event_of(0), target_fingerprint="fingerprint-1")
    with pytest.raises(ValueError, match="fingerprint-1, expected fingerprint-0"):
        online.train(placed([other])[0])


@pytest.mark.parametrize("wrong", ["loss", "step"])
def test_refused_steps_are_counted_and_leave_the_weights(place: Place, wrong: str) -> None:
    """B4."""
    settings = SETTINGS
    drafter = Softmax()
    if wrong == "step":
        settings = replace(SETTINGS, gradient=OnlineGradientSettings(max_step_norm=1e-9))
    else:
        drafter.loss = lambda weights, batch: weights["matrix"].sum() * float("nan")  # type: ignore[method-assign]
    trainer = place.trainer(settings, drafter=drafter)
    train(place.online(trainer), placed([event_of(0), event_of(1)]))
    assert trainer.num_refused_steps == 2 * SETTINGS.steps_per_event
    assert all(same(state, place.states()[0]) for state in place.states())


def test_old_versions_are_pruned_but_never_the_newest(place: Place) -> None:
    """B11: by number, not by name."""
    trainer = place.trainer(replace(SETTINGS, keep_versions=2, steps_per_event=1))
    train(place.online(trainer), placed([event_of(i) for i in range(12)]))
    assert list(place.registry.versions("softmax")) == [11, 12]


def test_a_version_that_was_written_but_not_announced_is_passed_over(place: Place) -> None:
    """A crash between the store and the board: the number is never used again."""
    trainer = place.trainer()
    train(place.online(trainer), placed([event_of(0)]))
    lost = place.releases.history.pop()
    resumed = place.trainer()
    assert resumed.version == 0
    train(place.online(resumed), placed([event_of(0)]))
    again = decode_drafter_released(place.releases.history[-1])
    assert (again.version, again.parent_version) == (2, 0)
    assert decode_drafter_released(lost).version == 1
    first, second = place.states()
    assert not same(first, second)


@pytest.mark.parametrize("changed", ["architecture", "draft_vocabulary_hash", "target"])
def test_invalid_resume_on_another_kind_of_drafter_is_refused(place: Place, changed: str) -> None:
    place.trainer()
    drafter = Softmax()
    fingerprint = "fingerprint-1" if changed == "target" else "fingerprint-0"
    if changed != "target":
        setattr(drafter, changed, "another")
    with pytest.raises(ValueError, match=r"released drafter softmax: .* retire it"):
        place.trainer(drafter=drafter, target_fingerprint=fingerprint)


def test_several_drafters_learn_from_the_same_events(place: Place) -> None:
    settings = replace(SETTINGS, keep_versions=50)
    one = place.trainer(settings, drafter=Softmax("one"))
    train(place.online(one), placed([event_of(0), event_of(1)]))
    two = place.trainer(settings, drafter=Softmax("two"))
    one = place.trainer(settings, drafter=Softmax("one"))
    train(place.online(one, two), placed([event_of(i) for i in range(4)]))
    assert (one.version, two.version) == (4, 4)
    assert same(place.states("one")[-1], place.states("two")[-1])


# The real head, from serving to training and back.


def head_of(target: Target, *, size: int = VOCAB_SIZE) -> TrainableHydra:
    """Return a head with a draft vocabulary of the lowest ids."""
    vocabulary = frequent_tokens({}, size=size, vocab_size=VOCAB_SIZE)
    rows = FrozenRows.of(target.embedding_rows, target.head_rows, vocabulary)
    return TrainableHydra("head", rows, inner_size=64)


@dataclass
class Loop:
    """A worker and a trainer on either side of the real registry."""

    folder: Path
    target: Target
    drafter: TrainableHydra
    settings: TrainingSettings
    releases: Releases = field(default_factory=Releases)
    states: HiddenStates = field(default_factory=HiddenStates)

    def start(self) -> OnlineTrainer:
        """Start the trainer."""
        self.trainer = DrafterTrainer(
            self.drafter,
            self.settings,
            target_fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
            store=DrafterRegistry(str(self.folder)),
            board=self.releases,
            now=lambda: datetime(2026, 11, 29, tzinfo=UTC),
        )
        return OnlineTrainer(
            [self.trainer], self.states, target_fingerprint=self.target.fingerprint
        )

    def served(self) -> HydraDrafter:
        """Load the newest release as a worker does."""
        loader = HeadLoader(self.target, DrafterRegistry(str(self.folder)))
        return loader(self.releases.read_all()[0])

    def serve(self, prompt: list[int], num_tokens: int) -> tuple[list[VerificationEvent], float]:
        """Serve a request with the newest head; return events and mean accepted tokens."""
        outbox = Outbox()
        worker = new_worker(
            self.target,
            [NothingDrafter(), self.served()],
            outbox,
            states=self.states,
            policy="fixed:head",
            segment_tokens=64,
        )
        completion = worker.serve(request_of(prompt, SamplingParams(max_tokens=num_tokens)))
        full = [one for one in completion.rounds if one.num_draft_tokens == 4]
        return outbox.events, float(np.mean([one.num_accepted_tokens for one in full]))


def test_a_head_overfit_on_one_text_is_accepted_whole_when_served(tmp_path: Path) -> None:
    """B1: training accuracy proves nothing; acceptance does."""
    target = tiny_llama(2)
    settings = TrainingSettings(
        num_levels=4,
        batch_size=64,
        steps_per_event=250,
        gradient=OnlineGradientSettings(learning_rate=1e-2, betas=(0.9, 0.99)),
    )
    loop = Loop(tmp_path, target, head_of(target), settings)
    online = loop.start()
    prompt = random_prompts(6, count=1, length=12)[0]
    events, untrained = loop.serve(prompt, 26)
    for received in placed(events):
        online.train(received)
    _, trained = loop.serve(prompt, 26)
    assert untrained < 1.0
    assert trained == 4.0


def test_the_loss_is_the_cross_entropy_to_label_and_distribution() -> None:
    """OnlineSPEC's soft cross-entropy beside the emitted token's, level by level."""
    target = tiny_llama(2)
    drafter = head_of(target, size=12)
    weights = drafter.initial_weights()
    top = torch.tensor([[[3, 5], [4, 30]]])
    batch = TrainingBatch(
        hidden=torch.randn((1, 16), generator=torch.Generator().manual_seed(1)),
        fed_token_ids=torch.tensor([[1, 2]]),
        label_token_ids=torch.tensor([[3, 4]]),
        top_token_ids=top,
        top_probabilities=torch.tensor([[[0.6, 0.3], [0.5, 0.5]]]),
    )
    # An untrained head only reads its state: both levels say the same.
    head_rows = target.head_rows[:12].float()
    log_probs = (head_rows @ (batch.hidden[0] * weights["gain"])).log_softmax(-1)
    emitted = -(log_probs[3] + 0.8 * log_probs[4])
    soft = -(0.6 * log_probs[3] + 0.3 * log_probs[5] + 0.8 * 0.5 * log_probs[4])
    torch.testing.assert_close(drafter.loss(weights, batch), 0.5 * emitted + 0.5 * soft)


def test_labels_outside_the_draft_vocabulary_do_not_count() -> None:
    """B2: they are masked, not mapped to some other token."""
    target = tiny_llama(2)
    drafter = head_of(target, size=10)
    weights = {name: tensor.requires_grad_() for name, tensor in drafter.initial_weights().items()}

    def loss(labels: list[list[int]]) -> torch.Tensor:
        count = len(labels)
        batch = TrainingBatch(
            hidden=torch.randn((count, 16), generator=torch.Generator().manual_seed(1)),
            fed_token_ids=torch.ones((count, 2), dtype=torch.int64),
            label_token_ids=torch.tensor(labels),
            top_token_ids=torch.full((count, 2, 1), 30),
            top_probabilities=torch.ones((count, 2, 1)),
        )
        return drafter.loss(weights, batch)

    assert float(loss([[20, 39], [-1, -1]]).detach()) == 0.0
    reachable = loss([[3, 20], [15, 5]])
    assert float(reachable.detach()) > 0.0
    # Masking a label leaves what the others add, weight of the level included.
    alone = loss([[3, -1], [15, 5]])
    assert float(reachable.detach()) == pytest.approx(float(alone.detach()))
    loss([[20, 39], [-1, -1]]).backward()  # type: ignore[no-untyped-call]
    assert all(tensor.grad is not None and not tensor.grad.any() for tensor in weights.values())


def test_a_reduced_vocabulary_never_drafts_and_never_learns_what_it_has_not(
    tmp_path: Path,
) -> None:
    """B2: acceptance is measured on the target's own ids."""
    target = tiny_llama(2)
    settings = TrainingSettings(num_levels=4, batch_size=32, steps_per_event=20)
    loop = Loop(tmp_path, target, head_of(target, size=12), settings)
    online = loop.start()
    prompt = random_prompts(6, count=1, length=12)[0]
    events, _ = loop.serve(prompt, 26)
    for received in placed(events):
        online.train(received)
    events, _ = loop.serve(prompt, 26)
    assert loop.trainer.num_refused_steps == 0
    for event in events:
        assert event.content is not None
        output = event.content.token_ids.tolist()
        beyond = event.content.token_ids >= 12
        for start, accepted in zip(
            event.windows.start, event.windows.acceptance_probability[:, 0, 1], strict=True
        ):
            index = start - event.first_position
            is_seen = index >= 0 and output[index] in [*prompt, *output[:index]]
            if index >= 0 and beyond[index] and not is_seen:
                assert accepted == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_released_is_what_is_served(tmp_path: Path, dtype: torch.dtype) -> None:
    """B3: masters stay float32 and move; the artifact has the target's type and another hash."""
    target = tiny_llama(2, dtype=dtype)
    settings = TrainingSettings(num_levels=4, batch_size=32, steps_per_event=3)
    loop = Loop(tmp_path, target, head_of(target), settings)
    online = loop.start()
    before = loop.served()
    events, _ = loop.serve(random_prompts(6, count=1, length=12)[0], 40)
    for received in placed(events):
        online.train(received)
    after = loop.served()
    assert after.version.weights_version == loop.trainer.version == len(events)
    assert after.version.draft_vocabulary_hash == loop.drafter.draft_vocabulary_hash
    release = loop.releases.read_all()[0]
    state = DrafterRegistry(str(tmp_path)).read_training_state(
        release.artifact_uri, manifest_sha256=release.manifest_sha256
    )
    for name, tensor in after.weights.items():
        master = state[f"weight.{name}"]
        assert tensor.dtype == dtype
        assert master.dtype == torch.float32
        assert torch.equal(tensor, master.to(dtype))
        assert not torch.equal(tensor, before.weights[name])
    hashes = {decode_drafter_released(data).manifest_sha256 for data in loop.releases.history}
    assert len(hashes) == len(events) + 1
