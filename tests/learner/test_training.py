"""A trainer takes each event once, survives what is wrong with it, and goes on where it was."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from learner.examples import TrainingBatch
from learner.spawning import SpawnSettings
from learner.updates.online_gradient import OnlineGradientSettings
from learner.updates.rule import Weights
from pipeline.storage import ArtifactError
from schemas.codec import decode_drafter_released
from schemas.events import VerificationEvent
from tests.learner.fakes import PlacedEvent
from tests.learner.trainers import (
    HIDDEN,
    SETTINGS,
    VOCAB,
    Features,
    Place,
    Softmax,
    event_of,
    placed,
    same,
    train,
)
from tests.schemas.builders import make_event


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return an empty place."""
    return Place(tmp_path / "here")


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


def test_invalid_event_of_another_draft_vocabulary_is_refused_with_both_hashes(
    place: Place,
) -> None:
    drafter = Softmax()
    drafter.draft_vocabulary_hash = "ours"
    online = place.online(place.trainer(drafter=drafter))
    event = event_of(0)
    first = replace(event.drafters[0], drafter_id="softmax", draft_vocabulary_hash="theirs")
    with pytest.raises(ValueError, match="of softmax is theirs, expected ours"):
        online.train(placed([replace(event, drafters=(first, *event.drafters[1:]))])[0])
    unhashed = replace(first, draft_vocabulary_hash="")
    events = [event, replace(event_of(1), drafters=(unhashed, *event.drafters[1:]))]
    online.train(placed(events)[1])
    assert place.releases.read_all()[0].version == 1


def test_a_full_disk_costs_releases_and_not_the_training(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was trained meanwhile is in the first version that can be stored again."""
    undisturbed = Place(place.folder / "undisturbed", features=place.features)
    events = placed([event_of(number) for number in range(4)])
    whole = undisturbed.trainer()
    train(undisturbed.online(whole), events)
    trainer = place.trainer()
    online = place.online(trainer)

    def full(*_: object, **__: object) -> None:
        raise ArtifactError("drafters", found="[Errno 28] No space left on device", expected="room")

    with monkeypatch.context() as patched:
        patched.setattr(trainer._store, "write", full)
        for received in events[:3]:
            online.train(received)
    assert trainer.num_failed_releases == 3
    assert [one.version for one in place.releases.all_releases()] == [0]
    online.train(events[3])
    assert same(place.states()[-1], whole._update.state())


def test_five_thousand_updates_take_no_memory(place: Place) -> None:
    """Must stay within 5 %, with releases, pruning, reservoirs and experts at work."""
    settings = replace(
        SETTINGS,
        steps_per_event=10,
        memory_positions=400,
        replay_bytes=20_000,
        release_every_events=25,
        keep_versions=2,
        experts=SpawnSettings(),
    )
    trainer = place.trainer(settings)
    online = place.online(trainer)
    measured = []
    for number in range(520):
        online.train(at(number))
        if number in (120, 519):
            gc.collect()
            measured.append(resident_bytes())
    assert trainer.num_updates >= 5000
    assert measured[1] <= 1.05 * measured[0]


def at(number: int) -> PlacedEvent:
    return PlacedEvent(partition=0, offset=number, event=event_of(number))


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
