"""A head is kept when it would be missed, in a bounded family, whatever restarts in between."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from learner.drift import DriftSettings
from learner.spawning import ExpertFamily, Snapshots, Spawn, SpawnSettings, expert_id, family_of

SETTINGS = SpawnSettings(max_experts=2, drift=DriftSettings(hold_off=30))
NOISE = 0.2
LENGTH = {True: 3.2, False: 1.6}
"""Of whoever knows the regime, and of whoever does not."""


class Player:
    """A head that learns a regime in some events, and its experts, which know what it knew."""

    def __init__(self, settings: SpawnSettings = SETTINGS, *, seed: int = 0) -> None:
        self.settings = settings
        self.family = ExpertFamily("head", settings)
        self.rng = np.random.default_rng(seed)
        self.knows = {"head": "-"}
        self.snapshots: Snapshots[str] = Snapshots()
        self.spawns: list[Spawn] = []

    def play(self, regime: str, num_events: int, *, stream: str = "s", restarts: int = 0) -> None:
        """Play events of a regime; the head knows it from the 40th on."""
        for number in range(num_events):
            self.snapshots.note(self.family.num_events, self.knows["head"])
            if number == 40:
                self.knows["head"] = regime
            lengths = {
                one: LENGTH[self.knows[one] == regime] + float(self.rng.normal(0.0, NOISE))
                for one in self.family.ids
            }
            spawn = self.family.observe(stream, lengths)
            if spawn is not None:
                self.spawns.append(spawn)
                self.knows[spawn.expert_id] = str(self.snapshots.before(spawn.since))
            if restarts and number % restarts == 0:
                state = json.loads(json.dumps(self.family.state()))
                self.family = ExpertFamily.from_state("head", self.settings, state)


def known(player: Player) -> list[str]:
    return [player.knows[one] for one in player.family.expert_ids]


def test_what_was_known_before_the_change_is_kept_not_what_it_has_become_since() -> None:
    player = Player()
    player.play("A", 200)
    assert player.spawns == []
    player.play("B", 200)
    assert [one.expert_id for one in player.spawns] == ["head.expert-1"]
    assert abs(player.spawns[0].since - 200) <= 2
    assert known(player) == ["A"]


def test_a_head_whose_regime_an_expert_knows_is_not_kept_twice() -> None:
    player = Player()
    for regime in "ABABA":
        player.play(regime, 200)
    assert sorted(known(player)) == ["A", "B"]


def test_the_expert_that_contributed_least_makes_room() -> None:
    player = Player()
    for regime, size in (("A", 400), ("B", 120), ("C", 400), ("D", 200)):
        player.play(regime, size)
    assert len(player.family.expert_ids) == 2
    assert "B" not in known(player)
    assert player.spawns[-1].retired_id == "head.expert-2"


def test_a_head_that_contributed_less_than_every_expert_is_not_kept_in_a_full_family() -> None:
    player = Player(SpawnSettings(max_experts=1, drift=DriftSettings(hold_off=30)))
    for regime, size in (("A", 400), ("B", 120), ("A", 120)):
        player.play(regime, size)
    assert known(player) == ["A"]


def test_the_same_experts_are_kept_whenever_the_learner_restarts() -> None:
    whole, parted = Player(), Player()
    for regime in "ABCBA":
        whole.play(regime, 150)
        parted.play(regime, 150, restarts=7)
    assert len(whole.spawns) >= 2
    assert parted.spawns == whole.spawns
    assert parted.family.state() == whole.family.state()


def test_streams_of_different_difficulty_side_by_side_spawn_nothing() -> None:
    family = ExpertFamily("head", SETTINGS)
    rng = np.random.default_rng(0)
    for _ in range(300):
        for stream, length in (("easy", 3.0), ("hard", 2.9)):
            assert family.observe(stream, {"head": float(rng.normal(length, NOISE))}) is None


def new_stream(lengths: Mapping[str, float], expert_ids: Sequence[str] = ()) -> list[Spawn]:
    family = ExpertFamily("head", SETTINGS)
    family.expert_ids = tuple(expert_ids)
    for _ in range(100):
        family.observe("old", {"head": 3.0})
    found = [family.observe("new", lengths) for _ in range(30)]
    return [one for one in found if one is not None]


def test_a_new_stream_that_is_served_badly_keeps_the_head_as_it_was_before_it() -> None:
    (spawn,) = new_stream({"head": 1.5})
    assert spawn.since == 100
    assert "new stream new" in spawn.reason


def test_a_new_stream_that_is_served_well_by_anybody_keeps_nothing() -> None:
    assert new_stream({"head": 2.95}) == []
    assert new_stream({"head": 1.5, "other": 2.95}, ["other"]) == []


def test_an_event_without_the_head_or_with_numbers_that_are_not_tells_nothing() -> None:
    family = ExpertFamily("head", SETTINGS)
    before = family.state()
    assert family.observe("s", {}) is None
    assert family.observe("s", {"head": float("nan")}) is None
    assert family.state() == before


def test_streams_are_forgotten_beyond_their_bound() -> None:
    settings = SpawnSettings(max_streams=3)
    family = ExpertFamily("head", settings)
    for number in range(20):
        family.observe(f"stream-{number}", {"head": 2.0})
    assert list(family.state()["streams"]) == ["stream-17", "stream-18", "stream-19"]


def test_an_expert_retired_by_hand_is_let_go() -> None:
    player = Player()
    player.play("A", 200)
    player.play("B", 200)
    player.family.forget("head.expert-1")
    assert player.family.ids == ("head",)


def test_ids_of_experts_name_their_family() -> None:
    assert expert_id("head", 3) == "head.expert-3"
    assert family_of("head.expert-3") == "head"
    assert family_of("head") is None
    assert family_of("expert-3") is None


def test_snapshots_are_spaced_and_bounded() -> None:
    snapshots: Snapshots[int] = Snapshots(spacing=5, most=3)
    assert snapshots.before(0) is None
    for index in range(31):
        snapshots.note(index, index)
    assert [index for index, _ in snapshots.points] == [20, 25, 30]
    assert (snapshots.before(29), snapshots.before(3)) == (25, 20)


@pytest.mark.parametrize(
    "changes", [{"max_experts": 0}, {"num_first": 1}, {"max_streams": 0}, {"half_life_events": 0}]
)
def test_invalid_settings_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        SpawnSettings(**changes)  # type: ignore[arg-type]
