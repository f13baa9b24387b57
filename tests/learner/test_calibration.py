"""Scores that are right raise no alarm, wrong ones do, and what is compared is no chosen part."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.calibration import (
    ALARM_Z,
    Calibration,
    calibration,
    is_compared,
)
from learner.calibration_monitor import HALF_LIFE_ROUNDS, CalibrationMonitor
from schemas.events import NO_DRAFTER, AcceptanceRule, FinishReason, VerificationEvent
from tests.replay.synthetic import make_request

LEVELS = 4


def played(
    rng: np.random.Generator, num_rounds: int, *, true_over_scored: tuple[float, ...] = (1.0,) * 4
) -> Calibration:
    """Play rounds of one drafter whose levels are accepted at a multiple of their score."""
    scores = rng.uniform(0.3, 0.9, (num_rounds, LEVELS))
    is_accepted = rng.random(scores.shape) < np.minimum(scores * true_over_scored, 1.0)
    return calibration(
        np.zeros(num_rounds, np.int16),
        np.full(num_rounds, LEVELS, np.int16),
        np.cumprod(is_accepted, axis=1).sum(axis=1).astype(np.int16),
        scores.astype(np.float16),
        num_drafters=1,
    )


@pytest.mark.parametrize("seed", range(5))
def test_right_scores_raise_no_alarm_and_the_interval_lies_around_1(seed: int) -> None:
    found = played(np.random.default_rng(seed), 5000)
    assert not found.is_off.any()
    low, high = found.interval
    assert ((low < 1.03) & (high > 0.97)).all()
    np.testing.assert_allclose(found.ratio, 1.0, atol=0.1)


def test_the_interval_misses_1_in_about_one_run_of_twenty() -> None:
    misses = 0
    for seed in range(200):
        low, high = played(np.random.default_rng(seed), 300).interval
        misses += int(not low[0, 0] <= 1.0 <= high[0, 0])
    assert misses <= 20


def test_a_level_that_is_accepted_less_than_scored_is_found_and_its_ratio_told() -> None:
    """The first level is right, as of a head that was scored on the target's own features."""
    found = played(np.random.default_rng(0), 3000, true_over_scored=(1.0, 0.8, 0.8, 0.8))
    assert found.is_off.tolist() == [True]
    assert found.ratio[0, 0] == pytest.approx(1.0, abs=0.04)
    np.testing.assert_allclose(found.ratio[0, 1:3], 0.8, atol=0.07)
    assert found.interval[1][0, 1] < 1.0


def test_below_a_hundred_rounds_nothing_is_alarming() -> None:
    wrong = (0.1, 0.1, 0.1, 0.1)
    assert not played(np.random.default_rng(0), 99, true_over_scored=wrong).is_off.any()
    assert played(np.random.default_rng(0), 101, true_over_scored=wrong).is_off.any()


def test_levels_behind_a_rejection_or_beyond_the_draft_are_not_counted() -> None:
    found = calibration(
        np.array([1, 1, 0, NO_DRAFTER], np.int16),
        np.array([3, 2, 4, 0], np.int16),
        np.array([1, 2, 0, 0], np.int16),
        np.array([[0.9, 0.5, 0.4, 0.4]] * 4, np.float16),
        num_drafters=3,
    )
    assert found.num_rounds.tolist() == [[1, 0, 0, 0], [2, 2, 0, 0], [0, 0, 0, 0]]
    assert found.realised.tolist() == [[0, 0, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0]]
    np.testing.assert_allclose(found.predicted[1], [1.8, 1.0, 0, 0], atol=1e-3)
    assert np.isnan(found.ratio[2]).all()


def test_levels_that_were_not_scored_are_left_out() -> None:
    probability = np.array([[0.5, np.nan], [np.nan, np.nan]], np.float16)
    ones, twos = np.ones(2, np.int16), np.full(2, 2, np.int16)
    found = calibration(ones * 0, twos, ones, probability, num_drafters=1)
    assert found.num_rounds.tolist() == [[1, 0]]


def test_certain_scores_stand_one_rounding_and_not_a_habit() -> None:
    """Under a greedy target every score is 0 or 1."""
    count = 1000
    drafted, scores = np.ones(count, np.int16), np.ones((count, 1), np.float16)
    for num_wrong, is_off in ((0, False), (2, False), (10, True)):
        accepted = (np.arange(count) >= num_wrong).astype(np.int16)
        found = calibration(drafted * 0, drafted, accepted, scores, num_drafters=1)
        assert found.is_off.tolist() == [is_off]


def segments_cut_short(rng: np.random.Generator) -> list[tuple[NDArray[np.int64], Calibration]]:
    """Play segments of 24 positions with right scores; windows cut by the end are not there."""
    found = []
    for _ in range(3000):
        positions, accepted = [0], list[int]()
        while positions[-1] < 24:
            accepted.append(int(np.cumprod(rng.random(LEVELS) < 0.6).sum()))
            positions.append(positions[-1] + accepted[-1] + 1)
        start, end = np.array(positions[:-1]), positions[-1]
        scores = np.where((start + LEVELS < end)[:, None], 0.6, np.nan).repeat(LEVELS, axis=1)
        for usable in (np.ones(start.size, bool), is_compared(start, 0, end)):
            count = int(usable.sum())
            found.append(
                (
                    start[usable],
                    calibration(
                        np.zeros(count, np.int16),
                        np.full(count, LEVELS, np.int16),
                        np.array(accepted, np.int16)[usable],
                        scores[usable],
                        num_drafters=1,
                    ),
                )
            )
    return found


def test_rounds_whose_window_is_there_only_if_enough_was_accepted_would_deceive() -> None:
    found = segments_cut_short(np.random.default_rng(0))
    everything, first_halves = Calibration.empty(1, LEVELS), Calibration.empty(1, LEVELS)
    for one, other in zip(found[::2], found[1::2], strict=True):
        everything, first_halves = everything.after(one[1]), first_halves.after(other[1])
    assert everything.z[0, -1] > ALARM_Z
    assert np.abs(first_halves.z).max() < ALARM_Z


def sampled(sequence: int, **changes: object) -> VerificationEvent:
    """Return a request whose drafters are accepted as often as scored."""
    event = make_request(
        hit_rates=[0.5, 0.8],
        num_tokens=90,
        rule=AcceptanceRule.SPECULATIVE_SAMPLING,
        sequence=sequence,
    )
    return replace(event, **changes)  # type: ignore[arg-type]


def flattering(sequence: int, *, weights_version: int = 0) -> VerificationEvent:
    """Return one in which the second drafter is scored too high."""
    event = sampled(sequence)
    scores = event.windows.acceptance_probability.copy()
    scores[..., 1] = np.minimum(scores[..., 1] + np.float16(0.15), 1)
    drafters = tuple(replace(one, weights_version=weights_version) for one in event.drafters)
    return replace(
        event,
        windows=replace(event.windows, acceptance_probability=scores),
        drafters=drafters,
    )


def test_a_drafter_is_named_once_and_only_if_it_is_off(caplog: pytest.LogCaptureFixture) -> None:
    monitor = CalibrationMonitor()
    with caplog.at_level(logging.WARNING):
        for sequence in range(60):
            assert monitor.observe(sampled(sequence)) == []
        found = [
            one for sequence in range(60, 200) for one in monitor.observe(flattering(sequence))
        ]
    assert found == ["drafter-1"]
    assert caplog.text.count("drafter-1 was accepted at level ") == 1
    assert set(monitor.drafter_to_calibration) == {"drafter-0", "drafter-1"}


def test_new_weights_begin_without_a_past() -> None:
    monitor = CalibrationMonitor()
    for sequence in range(20):
        monitor.observe(flattering(sequence, weights_version=1))
    before = monitor.drafter_to_calibration["drafter-1"].num_rounds[0, 0]
    monitor.observe(flattering(20, weights_version=2))
    assert monitor.drafter_to_calibration["drafter-1"].num_rounds[0, 0] < before / 5


def event_calibration(event: VerificationEvent) -> Calibration:
    """Return what one segment says, from the definition."""
    rounds, windows, size = event.rounds, event.windows, len(event.drafters)
    row = np.searchsorted(windows.start, rounds.first_position)
    is_there = np.append(windows.start, -1)[row] == rounds.first_position
    is_there &= rounds.drafter_index != NO_DRAFTER
    is_there &= is_compared(rounds.first_position, event.first_position, event.num_positions)
    found = np.flatnonzero(is_there)
    return calibration(
        rounds.drafter_index[found],
        rounds.num_draft_tokens[found],
        rounds.num_accepted_tokens[found],
        windows.acceptance_probability[row[found], :, rounds.drafter_index[found]],
        num_drafters=size,
    )


def test_what_the_monitor_adds_up_is_what_the_definition_says() -> None:
    monitor = CalibrationMonitor()
    expected = [Calibration.empty(1, LEVELS)] * 2
    for sequence in range(30):
        event = sampled(sequence)
        monitor.observe(event)
        found = event_calibration(event)
        for index, before in enumerate(expected):
            new = Calibration(
                predicted=found.predicted[index, None],
                realised=found.realised[index, None],
                variance=found.variance[index, None],
                num_rounds=found.num_rounds[index, None],
            )
            decay = 0.5 ** (new.num_rounds[0, 0] / HALF_LIFE_ROUNDS)
            expected[index] = before.after(new, decay=decay)
    for index, wanted in enumerate(expected):
        seen = monitor.drafter_to_calibration[f"drafter-{index}"]
        for name in Calibration.__dataclass_fields__:
            np.testing.assert_allclose(getattr(seen, name), getattr(wanted, name), rtol=1e-12)


def test_a_deeper_pool_keeps_what_was_seen_of_the_first_levels() -> None:
    monitor = CalibrationMonitor()
    monitor.observe(sampled(0))
    before = monitor.drafter_to_calibration["drafter-0"].num_rounds
    deeper = make_request(hit_rates=[0.5, 0.8], num_tokens=9, sequence=1, num_speculative_tokens=9)
    monitor.observe(deeper)
    after = monitor.drafter_to_calibration["drafter-0"].num_rounds
    np.testing.assert_array_equal(after, np.pad(before, ((0, 0), (0, 9 - LEVELS))))


def test_the_past_fades() -> None:
    monitor = CalibrationMonitor()
    for sequence in range(150):
        monitor.observe(sampled(sequence))
    num_rounds = monitor.drafter_to_calibration["drafter-1"].num_rounds[0, 0]
    together = sum(event_calibration(sampled(s)).num_rounds[1, 0] for s in range(150))
    assert num_rounds < 0.9 * together


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.ERROR])
def test_requests_that_did_not_end_by_themselves_are_left_out(reason: FinishReason) -> None:
    seen = {}
    for finish_reason in (FinishReason.STOP, reason):
        monitor = CalibrationMonitor()
        monitor.observe(sampled(0, finish_reason=finish_reason))
        seen[finish_reason] = monitor.drafter_to_calibration["drafter-1"].num_rounds.sum()
    assert seen[FinishReason.STOP] > 0
    assert seen[reason] == 0
