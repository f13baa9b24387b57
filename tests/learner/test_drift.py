"""Falls are found and placed; rises and noise are not found; a restart changes nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.drift import (
    MAX_VALUES,
    DriftDetector,
    DriftSettings,
    fall_point,
    regret_contributions,
)

SETTINGS = DriftSettings(delta=0.002, hold_off=30, min_fall=0.05)


def alarms(values: NDArray[np.float64], settings: DriftSettings = SETTINGS) -> list[int]:
    detector = DriftDetector(settings)
    return [place for place, value in enumerate(values) if detector.update(float(value))]


def test_a_fall_is_found_soon_after_it_and_placed_where_it_was() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0.8, 0.1, 200), rng.normal(0.4, 0.1, 200)])
    detector = DriftDetector(SETTINGS)
    found = [(place, n) for place, one in enumerate(values) if (n := detector.update(float(one)))]
    assert len(found) == 1
    place, num_behind = found[0]
    assert 200 <= place <= 230
    assert abs(place + 1 - num_behind - 200) <= 2


def test_steady_and_rising_acceptance_raises_no_alarm() -> None:
    rng = np.random.default_rng(0)
    assert alarms(rng.normal(0.6, 0.15, 2000)) == []
    assert alarms(np.concatenate([rng.normal(0.4, 0.1, 200), rng.normal(0.8, 0.1, 200)])) == []


def test_a_fall_from_which_a_head_soon_recovers_is_found_before_it_has() -> None:
    settings = DriftSettings(hold_off=10)
    for seed in range(5):
        noise = np.random.default_rng(seed).normal(0.0, 0.35, 102)
        parts = [np.full(8, 1.3), np.full(40, 3.6), np.linspace(1.4, 3.4, 16), np.full(38, 3.4)]
        (found,) = alarms(np.concatenate(parts) + noise, settings)
        assert 48 <= found <= 48 + 12


def test_steady_acceptance_seldom_raises_an_alarm_with_the_defaults() -> None:
    settings = DriftSettings(hold_off=10)
    values = np.random.default_rng(0).normal(2.5, 0.5, 20_000)
    assert len(alarms(values, settings)) <= 2


def test_after_an_alarm_there_is_a_time_without_another() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(level, 0.05, 150) for level in (0.9, 0.6, 0.3)])
    often = alarms(values, replace(SETTINGS, hold_off=0))
    seldom = alarms(values, replace(SETTINGS, hold_off=250))
    assert len(often) == 2
    assert seldom == often[:1]


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    rng = np.random.default_rng(0)
    detector = DriftDetector(SETTINGS)
    for value in rng.normal(0.6, 0.05, 100):
        assert detector.update(float(value)) is None
        assert detector.update(float("nan")) is None
        assert detector.update(float("-inf")) is None
    assert detector.num_left_out == 200
    assert 0.55 < detector.mean < 0.65


def test_a_restart_at_any_time_changes_no_alarm_and_memory_is_bounded() -> None:
    rng = np.random.default_rng(2)
    values = np.concatenate([rng.normal(level, 0.1, 900) for level in (0.9, 0.5, 0.8, 0.2)])
    whole, parted = DriftDetector(SETTINGS), DriftDetector(SETTINGS)
    num_alarms = 0
    for place, value in enumerate(values):
        found = whole.update(float(value))
        assert found == parted.update(float(value))
        num_alarms += found is not None
        if place % 97 == 0:
            parted = DriftDetector.from_state(json.loads(json.dumps(parted.state())), SETTINGS)
        assert len(whole.values) <= 2 * MAX_VALUES
    assert num_alarms == 2


def test_a_fall_is_where_the_halves_differ_most_and_no_rise() -> None:
    assert fall_point([1.0, 1.0, 1.0, 0.0, 0.0]) == 3
    assert fall_point([0.0, 0.0, 3.0, 3.0, 3.0, 3.0, 1.0, 1.0]) == 6


def test_a_contribution_is_what_the_best_would_have_lost_more_without() -> None:
    losses = np.array([[0.1, 0.5, 0.4], [0.6, 0.2, 0.3], [0.3, np.nan, 0.3]])
    assert np.allclose(regret_contributions(losses), [0.3, 0.1, 0.0])


def test_a_block_with_one_awake_expert_tells_nothing() -> None:
    assert np.allclose(regret_contributions(np.array([[0.1, np.nan]])), [0.0, 0.0])


@pytest.mark.parametrize("changes", [{"delta": 0.0}, {"hold_off": -1}, {"min_fall": float("nan")}])
def test_invalid_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DriftSettings(**changes)  # type: ignore[arg-type]
