"""Trainers under a gate: versions go on trial, go live, are refused, and training goes back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.gate import GateSettings
from learner.ports import FencedError
from learner.training import DrafterTrainer
from learner.trial import shadow_id
from schemas.events import DrafterReleased, DrafterVersion, ReleaseState, VerificationEvent
from tests.learner.fakes import PlacedEvent
from tests.learner.trainers import SETTINGS, Place, event_of, same
from tests.learner.trials import paired_event

GATED = replace(
    SETTINGS,
    keep_versions=3,
    gate=GateSettings(min_requests=3, max_requests=12, canary_share=0.0),
)
HEAD = "softmax"


class Traffic:
    """Events as workers would send them that follow the board."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.number = 0
        self.rng = np.random.default_rng(0)

    def event(self, rates: dict[int, float], *, default: float = 0.5) -> VerificationEvent:
        """Return the next request's event, with what is live and what is beside it."""
        own = {one.drafter_id: one for one in self.place.releases.read_all()}[HEAD].version
        beside = [
            one.version
            for one in self.place.releases.read_beside()
            if one.state in (ReleaseState.SHADOW, ReleaseState.CANARY) and one.version != own
        ]
        number, self.number = self.number, self.number + 1
        chances = {version: rates.get(version, default) for version in [own, *beside]}
        paired = paired_event(
            number, own=own, beside=[*beside, None][0], acceptance=chances, rng=self.rng
        )
        ids = [HEAD, shadow_id(HEAD)]
        drafters = tuple(
            DrafterVersion(drafter_id=ids[i], weights_version=one.weights_version)
            for i, one in enumerate(paired.drafters)
        )
        base = event_of(number, num_windows=24)
        return replace(
            base,
            request_id=f"request-{number}",
            drafters=drafters,
            prior_probabilities=np.full(len(drafters), 1 / len(drafters)),
            rounds=replace(base.rounds, drafter_index=np.minimum(base.rounds.drafter_index, 0)),
            num_awake_rounds=np.array(
                [len(base.rounds.first_position), 0][: len(drafters)], np.int32
            ),
            windows=paired.windows,
        )


def serve(
    place: Place, trainer: DrafterTrainer, traffic: Traffic, rates: dict[int, float], n: int
) -> None:
    """Serve requests and train on each."""
    online = place.online(trainer)
    for _ in range(n):
        number = traffic.number
        event = traffic.event(rates)
        online.train(PlacedEvent(partition=0, offset=number, event=event))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return an empty place."""
    return Place(tmp_path / "here")


def own(place: Place) -> list[tuple[int, str]]:
    return [(one.version, one.state.value) for one in place.releases.all_releases()]


def beside(place: Place) -> list[tuple[int, str]]:
    return [(one.version, one.state.value) for one in place.releases.all_beside()]


def test_the_first_version_goes_live_at_once_and_the_next_on_trial(place: Place) -> None:
    trainer = place.trainer(GATED)
    serve(place, trainer, Traffic(place), {}, 2)
    assert own(place) == [(0, "live")]
    assert beside(place) == [(1, "candidate"), (1, "shadow")]
    assert trainer.version == 1


def test_a_better_version_goes_live_with_its_evidence(place: Place) -> None:
    trainer = place.trainer(GATED)
    serve(place, trainer, Traffic(place), {0: 0.3, 1: 0.8}, 4)
    assert own(place) == [(0, "live"), (1, "live")]
    assert beside(place)[-1] == (0, "shadow")
    live = place.releases.read_all()[0]
    assert live.evidence is not None
    assert live.evidence.difference_low > 0.0
    assert live.evidence.new_acceptance_length > live.evidence.old_acceptance_length
    assert live.reason.startswith("better: ")


def test_a_worse_version_is_retired_and_training_goes_back_to_the_live_one(place: Place) -> None:
    trainer = place.trainer(GATED)
    traffic = Traffic(place)
    before = place.states()[0]
    serve(place, trainer, traffic, {0: 0.8, 1: 0.2}, 3)
    assert not same(trainer._update.state(), before)
    trainer._settings = replace(trainer._settings, steps_per_event=0)
    serve(place, trainer, traffic, {0: 0.8, 1: 0.2}, 1)
    assert beside(place)[:3] == [(1, "candidate"), (1, "shadow"), (1, "retired")]
    assert own(place) == [(0, "live")]
    assert same(trainer._update.state(), before), "weights, moments and step count are back"
    assert place.releases.all_beside()[-1].parent_version == 0
    assert beside(place)[3:] == [(2, "candidate"), (2, "shadow")]


def test_a_live_version_that_turns_worse_is_rolled_back_and_its_events_stay_taken(
    place: Place,
) -> None:
    trainer = place.trainer(GATED)
    traffic = Traffic(place)
    serve(place, trainer, traffic, {0: 0.3, 1: 0.8}, 4)
    serve(place, trainer, traffic, {0: 0.8, 1: 0.2}, 3)
    assert own(place) == [(0, "live"), (1, "live"), (0, "live")]
    assert (1, "rolled_back") in beside(place)
    back = place.releases.read_all()[0]
    assert back.reason.startswith("worse: ")
    taken = back.training_window.partition_to_offset[0]
    assert taken == 7
    place.releases.beside.clear()  # whatever came after it was lost
    resumed = place.trainer(GATED)
    assert resumed.version == 0
    assert resumed._partition_to_contained[0].partition_to_offset == {0: taken}


def test_a_restart_goes_on_with_the_version_on_trial(place: Place) -> None:
    trainer = place.trainer(GATED)
    traffic = Traffic(place)
    serve(place, trainer, traffic, {}, 2)
    resumed = place.trainer(GATED)
    assert resumed.version == 1
    assert resumed.start_offsets() == {0: 0}
    serve(place, resumed, traffic, {0: 0.3, 1: 0.8}, 5)
    assert own(place)[-1] == (1, "live")


def test_invalid_views_of_an_older_trainer_are_fenced(place: Place) -> None:
    """Two trainers at once: one publishes, the other stops."""
    first, second = place.trainer(GATED), place.trainer(GATED)
    traffic = Traffic(place)
    serve(place, first, traffic, {0: 0.3, 1: 0.8}, 4)
    with pytest.raises(FencedError, match="version 1 was released by another trainer or by hand"):
        serve(place, second, traffic, {}, 1)


def test_invalid_number_that_another_trainer_has_taken_is_fenced(place: Place) -> None:
    """Both have looked before either has written."""
    first, second = place.trainer(), place.trainer()
    version = second._desk.next_version()
    taken = first.release("by the first")
    second._desk.next_version = lambda: version  # type: ignore[method-assign]
    with pytest.raises(FencedError, match=f"version {version} was written by another trainer"):
        second.release("by the second")
    assert place.releases.all_releases()[-1] == taken


def test_a_release_that_was_overtaken_prunes_nothing(place: Place) -> None:
    """The board has moved between the announcement and the look at what may go."""
    trainer = place.trainer(replace(SETTINGS, keep_versions=1))
    earlier = trainer.release("earlier")
    publish = place.releases.publish

    def publish_and_be_overtaken(release: DrafterReleased) -> None:
        publish(release)
        publish(earlier)

    place.releases.publish = publish_and_be_overtaken  # type: ignore[method-assign]
    trainer.release("overtaken")
    assert place.registry.versions(HEAD)[-2:] == [1, 2]
    place.releases.publish = publish  # type: ignore[method-assign]
    resumed = place.trainer(replace(SETTINGS, keep_versions=1))
    assert resumed.release("again").parent_version == earlier.version


def test_a_retired_drafter_is_not_trained(place: Place) -> None:
    place.trainer(GATED)
    live = place.releases.read_all()[0]
    place.releases.publish(replace(live, state=ReleaseState.RETIRED, reason="too old"))
    with pytest.raises(FencedError, match=r"version 0 is retired \(too old\)"):
        place.trainer(GATED)


def test_late_events_of_a_drafter_that_is_retired_meanwhile_release_nothing(place: Place) -> None:
    """Workers that have not heard of it go on naming the version; it stays retired all the same."""
    trainer, traffic = place.trainer(GATED), Traffic(place)
    serve(place, trainer, traffic, {}, 2)
    late = [traffic.event({0: 0.3, 1: 0.8}) for _ in range(12)]
    live = place.releases.read_all()[0]
    retired = replace(live, state=ReleaseState.RETIRED, reason="no longer wanted")
    place.releases.publish(retired)
    before = beside(place)
    online = place.online(trainer)
    with pytest.raises(FencedError, match="released by another trainer or by hand"):
        for number, event in enumerate(late, start=2):
            online.train(PlacedEvent(partition=0, offset=number, event=event))
    assert place.releases.read_all() == [retired]
    assert beside(place) == before


def test_without_a_gate_what_was_on_trial_is_retired_and_all_go_live(place: Place) -> None:
    serve(place, place.trainer(GATED), Traffic(place), {}, 1)
    trainer = place.trainer(SETTINGS)
    assert beside(place)[-1] == (1, "retired")
    assert trainer.version == 0
    released: DrafterReleased = trainer.release("by the test")
    assert (released.version, released.state) == (2, ReleaseState.LIVE)


def test_versions_in_use_are_never_pruned(place: Place) -> None:
    trainer = place.trainer(replace(GATED, keep_versions=1))
    traffic = Traffic(place)
    for _ in range(6):
        serve(place, trainer, traffic, {}, 4)
        live = place.releases.read_all()[0].version
        stored = place.registry.versions(HEAD)
        assert {live, trainer.version} <= set(stored)
        # What is live and what is beside it, and what each of them came from.
        assert len(stored) <= 4
