"""Falls are found, rises and noise are not, and the least useful expert leaves."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.drift import DriftDetector, DriftSettings, ExpertPool, regret_contributions

SETTINGS = DriftSettings(hold_off=30)


def alarms(values: NDArray[np.float64], settings: DriftSettings = SETTINGS) -> list[int]:
    detector = DriftDetector(settings)
    return [place for place, value in enumerate(values) if detector.update(float(value))]


def test_a_fall_is_found_soon_after_it() -> None:
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.normal(0.8, 0.1, 200), rng.normal(0.4, 0.1, 200)])
    found = alarms(values)
    assert found
    assert 200 <= found[0] <= 230


def test_steady_and_rising_acceptance_raises_no_alarm() -> None:
    rng = np.random.default_rng(0)
    assert alarms(rng.normal(0.6, 0.15, 2000)) == []
    assert alarms(np.concatenate([rng.normal(0.4, 0.1, 200), rng.normal(0.8, 0.1, 200)])) == []


def test_after_an_alarm_there_is_a_time_without_another() -> None:
    rng = np.random.default_rng(1)
    values = np.concatenate([rng.normal(level, 0.05, 150) for level in (0.9, 0.6, 0.3)])
    often = alarms(values, DriftSettings(hold_off=0))
    seldom = alarms(values, DriftSettings(hold_off=250))
    assert len(often) == 2
    assert seldom == often[:1]


def test_values_that_are_not_finite_are_left_out_and_counted() -> None:
    rng = np.random.default_rng(0)
    detector = DriftDetector(SETTINGS)
    for value in rng.normal(0.6, 0.05, 100):
        assert not detector.update(float(value))
        assert not detector.update(float("nan"))
        assert not detector.update(float("-inf"))
    assert detector.num_left_out == 200
    assert 0.55 < detector.mean < 0.65


def test_a_contribution_is_what_the_best_would_have_lost_more_without() -> None:
    losses = np.array([[0.1, 0.5, 0.4], [0.6, 0.2, 0.3], [0.3, np.nan, 0.3]])
    assert np.allclose(regret_contributions(losses), [0.3, 0.1, 0.0])


def test_a_block_with_one_awake_expert_tells_nothing() -> None:
    assert np.allclose(regret_contributions(np.array([[0.1, np.nan]])), [0.0, 0.0])


def test_a_fall_freezes_the_head_and_a_copy_goes_on() -> None:
    pool = ExpertPool("head", SETTINGS)
    rng = np.random.default_rng(0)
    spawned = None
    for value in np.concatenate([rng.normal(0.8, 0.05, 100), rng.normal(0.3, 0.05, 60)]):
        spawned = pool.observe("code", float(value), {}) or spawned
    assert spawned is not None
    assert (spawned.frozen_id, spawned.learning_id, spawned.retired_id) == ("head", "head.1", None)
    assert pool.expert_ids == ("head", "head.1")


def test_streams_are_watched_apart() -> None:
    """A switch between streams of different difficulty is no drift of either."""
    pool = ExpertPool("head", SETTINGS)
    rng = np.random.default_rng(0)
    for _ in range(300):
        assert pool.observe("easy", float(rng.normal(0.9, 0.05)), {}) is None
        assert pool.observe("hard", float(rng.normal(0.2, 0.05)), {}) is None


def test_the_least_useful_expert_leaves_a_full_pool_but_never_the_learning_one() -> None:
    pool = ExpertPool("head", DriftSettings(max_experts=3))
    pool.spawn({})
    pool.spawn({})
    spawned = pool.spawn({"head": 2.0, "head.1": 0.5, "head.2": 0.0})
    assert spawned.retired_id == "head.1"
    assert pool.expert_ids == ("head", "head.2", "head.3")
    assert len(pool.expert_ids) == 3


@pytest.mark.parametrize("changes", [{"delta": 0.0}, {"max_experts": 1}])
def test_invalid_settings_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DriftSettings(**changes)  # type: ignore[arg-type]
