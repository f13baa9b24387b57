"""The scoring schedule: sure while learning, sparing when settled, awake to change."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.scoring_schedule import (
    AGE,
    FACTOR,
    NUM_ALARMS,
    PROBABILITY,
    ScheduleSettings,
    begin_round,
    end_round,
    fresh_schedule,
    fresh_tallies,
    note_window,
    score_probability,
)

SETTINGS = ScheduleSettings(routine_share=0.01, floor=0.02, run_windows=4, learning_windows=10)


def settled(
    settings: ScheduleSettings = SETTINGS, *, length: float = 4.0, num_windows: int = 1000
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return schedule and tallies of two arms after windows in which arm 1 was ``length`` long."""
    schedule, tallies = fresh_schedule(settings), fresh_tallies(2)
    for _ in range(num_windows):
        note_window(schedule, tallies, np.ones(2), np.array([1.0, length]), 1)
    return schedule, tallies


def raise_alarm(schedule: NDArray[np.float64], tallies: NDArray[np.float64]) -> int:
    """Play rounds that are a token short until there is an alarm; return how many it took."""
    before = schedule[NUM_ALARMS]
    for count in range(1, 1000):
        end_round(schedule, tallies, 1, 3.0, 1)
        if schedule[NUM_ALARMS] > before:
            return count
    raise AssertionError("no alarm")


def learn_again(
    schedule: NDArray[np.float64], tallies: NDArray[np.float64], *, leader: int
) -> None:
    for _ in range(SETTINGS.learning_windows):
        note_window(schedule, tallies, np.ones(2), np.array([1.0, 4.0]), leader)


def test_all_is_scored_while_learning() -> None:
    schedule = fresh_schedule(SETTINGS)
    assert score_probability(schedule, 100.0) == 1.0
    schedule[AGE] = SETTINGS.learning_windows
    assert score_probability(schedule, 100.0) == 1.0
    schedule[AGE] = 2 * SETTINGS.learning_windows
    assert score_probability(schedule, 100.0) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.005, 1.0), (0.1, 0.1), (0.2, 0.05), (10.0, 0.02)]
)
def test_routine_scoring_takes_its_share_of_the_time(share: float, expected: float) -> None:
    schedule, _ = settled()
    assert score_probability(schedule, share) == pytest.approx(expected, rel=1e-2)


def test_a_run_keeps_its_decision_and_its_probability() -> None:
    schedule, tallies = settled()
    assert not begin_round(schedule, 0.1, 0.99)
    in_force = schedule[PROBABILITY]
    end_round(schedule, tallies, 0, 3.0, 1)
    assert not begin_round(schedule, 0.2, 0.0)
    assert schedule[PROBABILITY] == in_force
    end_round(schedule, tallies, 0, 1.0, 1)
    assert begin_round(schedule, 0.2, 0.0)
    assert schedule[PROBABILITY] != in_force


def test_about_as_many_runs_are_scored_as_the_probability_says() -> None:
    generator = np.random.default_rng(5)
    schedule, tallies = settled()
    num_scored = 0
    for _ in range(4000):
        num_scored += begin_round(schedule, 0.1, float(generator.random()))
        end_round(schedule, tallies, 0, float(SETTINGS.run_windows), 1)
    assert num_scored / 4000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("length", [1.0, 9.0])
def test_rounds_that_are_not_as_expected_bring_scoring_back(length: float) -> None:
    schedule, tallies = settled()
    assert score_probability(schedule, 1.0) < 0.05
    for _ in range(20):
        end_round(schedule, tallies, 1, length, 1)
    assert schedule[NUM_ALARMS] >= 1
    assert score_probability(schedule, 1.0) == 1.0


def test_rounds_as_expected_raise_no_alarm() -> None:
    schedule, tallies = settled()
    for _ in range(1000):
        end_round(schedule, tallies, 1, 4.0, 1)
    assert schedule[NUM_ALARMS] == 0


def test_no_speculation_raises_no_alarm() -> None:
    schedule, tallies = settled()
    for _ in range(1000):
        end_round(schedule, tallies, 0, 1.0, 0)
    assert schedule[NUM_ALARMS] == 0


def test_a_false_alarm_makes_the_next_one_harder_and_a_true_one_takes_it_back() -> None:
    schedule, tallies = settled()
    first = raise_alarm(schedule, tallies)
    learn_again(schedule, tallies, leader=1)
    assert schedule[FACTOR] == pytest.approx(SETTINGS.growth)
    assert raise_alarm(schedule, tallies) > first
    learn_again(schedule, tallies, leader=2)
    assert schedule[FACTOR] == 1.0


@pytest.mark.parametrize(
    ("name", "value"),
    [("floor", 0.0), ("run_windows", 0), ("memory", 1.0), ("growth", 0.5), ("alarm", np.nan)],
)
def test_invalid_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        ScheduleSettings(**{name: value})  # type: ignore[arg-type]
