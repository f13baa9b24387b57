"""A head's older versions are released as experts, once each, whatever crashes in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.drift import DriftSettings
from learner.ports import FencedError
from learner.spawning import SpawnSettings
from learner.training import DrafterTrainer
from schemas.events import (
    AcceptanceRule,
    DrafterReleased,
    DrafterVersion,
    ReleaseState,
    VerificationEvent,
)
from tests.learner.fakes import PlacedEvent
from tests.learner.trainers import SETTINGS, Place, event_of, same
from tests.schemas.builders import make_windows

EXPERTS = SpawnSettings(max_experts=2, drift=DriftSettings(hold_off=10))
TRAINING = replace(
    SETTINGS, experts=EXPERTS, keep_versions=2, steps_per_event=1, release_every_events=4
)
RATE = {True: 0.9, False: 0.2}
"""Chance of acceptance of who knows the regime, and of who does not."""


def event(sequence: int, id_to_rate: dict[str, float]) -> VerificationEvent:
    """Return an event in which every drafter is accepted at its rate."""
    made = event_of(sequence, num_windows=12, num_drafters=len(id_to_rate))
    rng = np.random.default_rng(sequence)
    rates = np.array(list(id_to_rate.values()))
    shape = (12, made.num_speculative_tokens, len(rates))
    windows = make_windows(
        rng,
        num_windows=12,
        num_drafters=len(rates),
        num_speculative_tokens=made.num_speculative_tokens,
        first_position=int(made.windows.start[0]),
        rule=AcceptanceRule.GREEDY,
        acceptance_probability=(rng.random(shape) < rates).astype(np.float64),
    )
    return replace(
        made,
        stream="s",
        windows=windows,
        drafters=tuple(DrafterVersion(drafter_id=one, weights_version=0) for one in id_to_rate),
    )


class Life:
    """Events of regimes, played to trainers that may die and come back."""

    def __init__(self, folder: Path, settings: SpawnSettings = EXPERTS) -> None:
        self.place = Place(folder)
        self.training = replace(TRAINING, experts=settings)
        self.trainer = self.place.trainer(self.training)
        self.log: list[PlacedEvent] = []
        self.knows = {"softmax": "-"}

    def play(self, regime: str, num_events: int) -> None:
        """The head knows a regime after a third of its events."""
        for number in range(num_events):
            if number == num_events // 3:
                self.knows["softmax"] = regime
            rates = {one: RATE[self.knows[one] == regime] for one in self.pool()}
            made = event(len(self.log), rates)
            self.log.append(PlacedEvent(partition=0, offset=len(self.log), event=made))
            before = set(self.trainer.expert_ids)
            self.place.online(self.trainer).train(self.log[-1])
            for new in set(self.trainer.expert_ids) - before:
                self.knows[new] = "ABC"[len(self.knows) - 1]

    def pool(self) -> list[str]:
        return ["softmax", *self.trainer.expert_ids]

    def restart(self) -> None:
        self.trainer = self.place.trainer(self.training)
        online = self.place.online(self.trainer)
        for received in self.log[online.start_offsets().get(0, 0) :]:
            online.train(received)

    def experts(self) -> dict[str, DrafterReleased]:
        found = {one.drafter_id: one for one in self.place.releases.read_all()}
        return {one: found[one] for one in found if one != "softmax"}


def live(life: Life) -> list[str]:
    return [one for one, release in life.experts().items() if release.state is ReleaseState.LIVE]


def test_the_head_as_it_was_before_the_fall_is_released_as_an_expert(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.play("A", 60)
    assert life.experts() == {}
    life.play("B", 60)
    (release,) = life.experts().values()
    assert (release.drafter_id, release.version) == ("softmax.expert-1", 0)
    assert release.state is ReleaseState.LIVE
    origin = int(release.reason.split(" version ")[1].split(",")[0])
    assert 10 <= origin <= 15, "released after every fourth event, 60 of them before the fall"
    registry = life.place.registry
    kept = registry.find("softmax", origin)
    assert same(
        registry.read(kept.uri, manifest_sha256=kept.manifest_sha256).tensors,
        registry.read(release.artifact_uri, manifest_sha256=release.manifest_sha256).tensors,
    )


def test_the_pool_keeps_its_bound_and_the_retired_expert_is_told(tmp_path: Path) -> None:
    life = Life(tmp_path, replace(EXPERTS, max_experts=1))
    for regime, num_events in (("A", 40), ("B", 100), ("C", 40)):
        life.play(regime, num_events)
    assert live(life) == ["softmax.expert-2"]
    gone = life.experts()["softmax.expert-1"]
    assert gone.state is ReleaseState.RETIRED
    assert "makes room for softmax.expert-2" in gone.reason


def test_versions_that_may_still_become_experts_are_not_pruned(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.play("A", 70)
    versions = life.place.registry.versions("softmax")
    assert len(versions) <= 2 + 8
    assert max(versions) - min(versions) >= 10, "older ones than the newest two are still there"


@pytest.mark.parametrize("dies_at", ["write", "copied", "published"])
def test_a_crash_while_an_expert_is_kept_leaves_one_expert_and_the_same_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    undisturbed = Life(tmp_path / "undisturbed")
    life = Life(tmp_path / "killed")
    for one in (undisturbed, life):
        one.play("A", 60)
    with monkeypatch.context() as patched:
        _die(patched, life.trainer, dies_at)
        with pytest.raises(KeyboardInterrupt):
            life.play("B", 60)
    life.knows["softmax.expert-1"] = "A"
    life.restart()
    num_left = 120 - len(life.log)
    undisturbed.play("B", 60)
    life.knows["softmax"] = "B"
    for number in range(num_left):
        made = undisturbed.log[120 - num_left + number]
        life.log.append(made)
        life.place.online(life.trainer).train(made)
    assert live(life) == live(undisturbed) == ["softmax.expert-1"]
    assert life.place.registry.versions("softmax.expert-1") == [0]
    assert life.experts().keys() == undisturbed.experts().keys()
    assert same(life.trainer._update.state(), undisturbed.trainer._update.state())
    assert life.trainer._config()["experts"] == undisturbed.trainer._config()["experts"]


def _die(patched: pytest.MonkeyPatch, trainer: DrafterTrainer, when: str) -> None:
    """Let the trainer die while it keeps its first expert."""
    keeper = trainer._keeper
    assert keeper is not None
    publish: Callable[[DrafterReleased], None] = keeper._board.publish

    def dying_publish(release: DrafterReleased) -> None:
        if release.drafter_id == "softmax.expert-1":
            if when == "published":
                publish(release)
            raise KeyboardInterrupt
        publish(release)

    def dying_copy(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if when == "write":
        patched.setattr(keeper._store, "copy", dying_copy)
    patched.setattr(keeper._board, "publish", dying_publish)


def test_a_restart_at_any_time_keeps_the_same_experts(tmp_path: Path) -> None:
    whole, parted = Life(tmp_path / "whole"), Life(tmp_path / "parted")
    for regime in "ABA":
        for _ in range(2):
            whole.play(regime, 30)
            parted.play(regime, 30)
            parted.restart()
    assert live(parted) == live(whole) != []
    assert same(parted.trainer._update.state(), whole.trainer._update.state())


def test_an_expert_retired_by_hand_stays_retired(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.play("A", 60)
    life.play("B", 60)
    (release,) = life.experts().values()
    life.place.releases.publish(replace(release, state=ReleaseState.RETIRED))
    life.restart()
    assert life.trainer.expert_ids == ()


def test_invalid_view_of_an_older_trainer_keeps_nothing(tmp_path: Path) -> None:
    life = Life(tmp_path)
    life.play("A", 60)
    other = life.place.trainer(life.training)
    other.release("by another")
    life.trainer._settings = replace(life.training, release_every_events=10_000)
    with pytest.raises(FencedError, match="another trainer"):
        life.play("B", 60)
    assert life.experts() == {}
