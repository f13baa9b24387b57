"""A trainer runs any update rule: told the delay, serving what it serves, and resumed whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from learner.examples import TrainingBatch
from learner.updates.online_gradient import OnlineGradientSettings
from learner.updates.registry import parse_rule
from learner.updates.rule import Weights
from schemas.events import DrafterVersion, VerificationEvent
from tests.learner.trainers import SETTINGS, Place, event_of, placed, same, train

RULES = [
    "momentum:form=projected",
    "optimistic:step_size=average_delay",
    "ensemble:num_experts=2,radius=1",
    "ensemble:backward=shared,losses=surrogate",
]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Return an empty place."""
    return Place(tmp_path / "here")


def drafted_with(event: VerificationEvent, version: int) -> VerificationEvent:
    """Return the event as if the trained drafter had been the first of the pool."""
    first = DrafterVersion(drafter_id="softmax", weights_version=version)
    return replace(event, drafters=(first, *event.drafters[1:]))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("crash_after", [1, 4])
def test_a_restart_goes_on_bit_for_bit(
    place: Place, tmp_path: Path, rule: str, crash_after: int
) -> None:
    settings = replace(SETTINGS, rule=rule, release_every_events=2, keep_versions=50)
    numbers = [0, 1, 2, 1, 3, 4, 5, 6]
    events = placed([drafted_with(event_of(number), number // 3) for number in numbers])
    undisturbed = Place(tmp_path / "there")
    train(undisturbed.online(undisturbed.trainer(settings)), events)
    train(place.online(place.trainer(settings)), events[:crash_after])
    train(place.online(place.trainer(settings)), events)
    expected, found = undisturbed.states(), place.states()
    assert len(expected) == len(found) == 1 + 7 // 2
    assert all(same(a, b) for a, b in zip(expected, found, strict=True))


def test_the_last_step_reports_its_loss_and_its_cost(place: Place) -> None:
    trainer = place.trainer(replace(SETTINGS, rule="ensemble:num_experts=4"))
    assert trainer.last_report is None
    train(place.online(trainer), placed([event_of(0)]))
    assert trainer.last_report is not None
    assert trainer.last_report.loss > 0.0
    assert trainer.last_report.num_backwards == 4


def test_an_ensemble_is_weighed_by_an_event_before_it_learns_from_it(place: Place) -> None:
    trainer = place.trainer(replace(SETTINGS, rule="ensemble:share=0.5"))
    online, told = place.online(trainer), list[Weights]()
    loss = trainer.drafter.loss

    def noting(weights: Weights, batch: TrainingBatch) -> torch.Tensor:
        told.append({name: tensor.detach().clone() for name, tensor in weights.items()})
        return loss(weights, batch)

    trainer.drafter.loss = noting  # type: ignore[method-assign]
    train(online, placed([event_of(0)]))
    # Three experts on what is new, then two steps of each.
    assert len(told) == 3 + 3 * 2
    assert all(not tensor.any() for one in told[:3] for tensor in one.values())


def test_what_is_released_is_what_the_rule_serves(place: Place) -> None:
    settings = replace(SETTINGS, rule="optimistic:form=projected")
    trainer = place.trainer(settings)
    train(place.online(trainer), placed([event_of(0), event_of(1)]))
    (release,) = place.releases.read_all()
    served = place.registry.read(
        release.artifact_uri, manifest_sha256=release.manifest_sha256
    ).tensors["matrix"]
    state = place.states()[-1]
    rule = parse_rule(settings.rule).resume(state, settings.gradient, name="optimistic", version=1)
    assert torch.equal(served, rule.served_weights["matrix"])
    assert not torch.equal(served, state["weight.matrix"])


def delays_of(place: Place, versions: list[int], *, restart_after: int | None = None) -> list[int]:
    """Train on events drafted with ``versions``; return the delay that every step was told."""
    settings = replace(SETTINGS, keep_versions=50)
    found: list[int] = []
    trainer = place.trainer(settings)
    for number, version in enumerate(versions):
        if number == restart_after:
            trainer = place.trainer(settings)
        step = trainer._update.step

        def told(loss: object, *, delay_updates: int, step: object = step) -> object:
            found.append(delay_updates)
            return step(loss, delay_updates=delay_updates)  # type: ignore[operator]

        trainer._update.step = told  # type: ignore[method-assign, assignment]
        event = drafted_with(event_of(number), version)
        place.online(trainer).train(placed([event] * (number + 1))[number])
        trainer._update.step = step  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("restart_after", [None, 2])
def test_the_delay_is_counted_in_updates_since_the_weights_that_drafted(
    place: Place, restart_after: int | None
) -> None:
    """Two updates per event and release: version v holds 2 v updates."""
    versions = [0, 0, 2, 1]
    found = delays_of(place, versions, restart_after=restart_after)
    assert found == [0, 1, 2, 3, 0, 1, 4, 5]


def test_an_event_that_names_no_version_of_the_drafter_has_no_delay_of_its_own(
    place: Place,
) -> None:
    trainer = place.trainer()
    train(place.online(trainer), placed([event_of(0), event_of(1)]))
    assert trainer.num_updates == 4
    assert trainer._updates_when_served(placed([event_of(2)])[0]) == 4
    newer = drafted_with(event_of(2), 99)
    assert trainer._updates_when_served(placed([newer])[0]) == 4


def test_another_rule_goes_on_from_what_was_served(place: Place) -> None:
    events = placed([event_of(i) for i in range(4)])
    first = replace(SETTINGS, rule="optimistic", keep_versions=50)
    train(place.online(place.trainer(first)), events[:2])
    second = replace(first, rule="ensemble", steps_per_event=0)
    train(place.online(place.trainer(second)), events[:3])
    before, after = [
        place.registry.read(one.artifact_uri, manifest_sha256=one.manifest_sha256).tensors
        for one in place.releases.all_releases()[-2:]
    ]
    assert same(before, after)
    assert "expert.2.weight.matrix" in place.states()[-1]


def test_releases_that_name_no_rule_are_those_of_the_online_gradient(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Artifacts written before there were several rules."""
    trainer = place.trainer()
    whole = trainer._config

    def config() -> dict[str, object]:
        new = ("rule", "num_updates", "version_to_num_updates")
        return {key: value for key, value in whole().items() if key not in new}

    monkeypatch.setattr(trainer, "_config", config)
    train(place.online(trainer), placed([event_of(0)]))
    resumed = place.trainer(replace(SETTINGS, gradient=OnlineGradientSettings()))
    train(place.online(resumed), placed([event_of(0), event_of(1)]))
    assert resumed.version == 2
    assert not same(*place.states()[-2:])


def test_invalid_rules_are_refused_when_the_trainer_starts(place: Place) -> None:
    with pytest.raises(ValueError, match="unknown update rule 'adam'"):
        place.trainer(replace(SETTINGS, rule="adam"))
