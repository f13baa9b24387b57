"""Estimates from what was played alone hit the truth, or are refused."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from replay.analysis import analyse
from replay.off_policy import off_policy_estimate, robust_losses, running_means
from replay.summary import OffPolicyRow
from schemas.events import VerificationEvent
from tests.replay.synthetic import log, make_request, window_rows, write_log
from tests.replay.test_rerun import policy_selector

TRUTH = np.array([2.0, 3.0, 4.5])
"""Mean lengths of three drafters."""


@dataclass
class Logged:
    """A log of draws from known lengths, and everything an estimate is made from."""

    lengths: NDArray[np.float64]
    drafter: NDArray[np.int64]
    probability: NDArray[np.float64]
    predictions: NDArray[np.float64]


def logged(seed: int, *, num_rounds: int = 1000) -> Logged:
    """Play with probabilities that drift, never below a tenth."""
    generator = np.random.default_rng(seed)
    drift = 0.5 + 0.4 * np.sin(np.arange(num_rounds) / 90.0)
    chances = np.column_stack([0.1 + 0.7 * drift, np.full(num_rounds, 0.1), 0.8 - 0.7 * drift])
    drafter = (generator.random((num_rounds, 1)) > np.cumsum(chances, axis=1)).sum(axis=1)
    lengths = 1.0 + generator.poisson(TRUTH[drafter] - 1.0)
    predictions = np.empty((num_rounds, 3))
    running_means(lengths, drafter, 10.0, predictions)
    return Logged(lengths, drafter, chances[np.arange(num_rounds), drafter], predictions)


def policies(num_rounds: int) -> dict[str, NDArray[np.float64]]:
    """Return fixed policies, the uniform one, and one that changes over time."""
    moving = np.zeros((num_rounds, 3))
    moving[: num_rounds // 2, 0] = moving[num_rounds // 2 :, 2] = 1.0
    return {
        "first": np.tile([1.0, 0.0, 0.0], (num_rounds, 1)),
        "last": np.tile([0.0, 0.0, 1.0], (num_rounds, 1)),
        "uniform": np.full((num_rounds, 3), 1 / 3),
        "moving": moving,
    }


@pytest.mark.parametrize("name", ["first", "last", "uniform", "moving"])
def test_both_estimates_are_unbiased_and_their_intervals_cover_the_truth(name: str) -> None:
    count = 80
    probabilities = policies(1000)[name]
    truth = float((probabilities @ TRUTH).mean())
    values: dict[str, list[float]] = {"importance_weighted": [], "doubly_robust": []}
    covered = dict.fromkeys(values, 0)
    for seed in range(count):
        one = logged(seed)
        found = off_policy_estimate(
            one.lengths,
            one.drafter,
            one.probability,
            probabilities,
            one.predictions,
            np.random.default_rng(seed),
        )
        for estimator in values:
            interval = getattr(found, estimator)
            values[estimator].append(interval.value)
            covered[estimator] += interval.low <= truth <= interval.high
    for estimator, estimates in values.items():
        error = np.std(estimates) / np.sqrt(count)
        assert abs(np.mean(estimates) - truth) < 3.5 * error, estimator
        assert covered[estimator] >= 0.88 * count, estimator
    assert np.std(values["doubly_robust"]) < 0.7 * np.std(values["importance_weighted"])


def test_bad_predictions_do_not_bias_the_doubly_robust_estimate() -> None:
    probabilities = policies(1000)["last"]
    estimates = []
    for seed in range(80):
        one = logged(seed)
        found = off_policy_estimate(
            one.lengths,
            one.drafter,
            one.probability,
            probabilities,
            np.full_like(one.predictions, 9.0),
            np.random.default_rng(seed),
        )
        assert found.doubly_robust is not None
        estimates.append(found.doubly_robust.value)
    assert np.mean(estimates) == pytest.approx(TRUTH[2], abs=3.5 * np.std(estimates) / np.sqrt(80))


def test_the_policy_that_was_logged_is_worth_all_its_rounds() -> None:
    one = logged(0)
    chances = np.zeros((1000, 3))
    chances[np.arange(1000), one.drafter] = one.probability
    found = off_policy_estimate(
        one.lengths,
        one.drafter,
        one.probability,
        chances,
        one.predictions,
        np.random.default_rng(0),
    )
    assert found.effective_sample_size == pytest.approx(1000)
    assert found.importance_weighted is not None
    assert found.importance_weighted.value == pytest.approx(one.lengths.mean())


def test_predictions_know_only_rounds_before() -> None:
    one = logged(1)
    changed = one.lengths.copy()
    changed[500:] += 5.0
    other = np.empty_like(one.predictions)
    running_means(changed, one.drafter, 10.0, other)
    assert np.array_equal(other[:501], one.predictions[:501])
    assert not np.array_equal(other[501:], one.predictions[501:])


def test_estimated_losses_are_unbiased_before_they_are_cut() -> None:
    one = logged(2, num_rounds=4000)
    losses, predictions = 0.4 + one.lengths / 100.0, 0.4 + one.predictions / 100.0
    estimates = robust_losses(losses, one.drafter, one.probability, predictions)
    assert (estimates.mean(axis=0) - 0.4) * 100 == pytest.approx(TRUTH, rel=0.1)
    cut = robust_losses(losses - 0.4, one.drafter, one.probability, predictions - 0.4)
    assert cut.min() == 0.0 and cut.max() <= 1.0


def test_where_chance_played_no_part_there_is_a_reason_instead_of_a_number() -> None:
    one = logged(3)
    certain = np.ones(1000)
    estimate = off_policy_estimate(
        one.lengths,
        one.drafter,
        certain,
        policies(1000)["last"],
        one.predictions,
        np.random.default_rng(0),
    )
    assert estimate.importance_weighted is None and estimate.doubly_robust is None
    assert "all logged choices had probability 1" in (estimate.refusal or "")


def test_too_few_effective_rounds_are_refused() -> None:
    one = logged(4, num_rounds=150)
    estimate = off_policy_estimate(
        one.lengths,
        one.drafter,
        one.probability,
        policies(150)["last"],
        one.predictions,
        np.random.default_rng(0),
    )
    assert 0 < estimate.effective_sample_size < 100
    assert estimate.importance_weighted is None
    assert "rounds of 150, fewer than 100" in (estimate.refusal or "")


def test_no_round_is_no_estimate() -> None:
    empty = np.empty(0)
    estimate = off_policy_estimate(
        empty,
        empty.astype(int),
        empty,
        np.empty((0, 3)),
        np.empty((0, 3)),
        np.random.default_rng(0),
    )
    assert estimate.refusal == "no round had a drafter"


def bandit_log(folder: Path, *, policy: str | None = None, num_requests: int = 40) -> None:
    """Write a log that scored nothing."""
    events: list[VerificationEvent] = []
    for index in range(num_requests):
        event = make_request(
            num_tokens=150,
            sequence=index,
            request_id=f"r{index}",
            selector=None if policy is None else policy_selector(policy),
            policy_name=policy or "hedge",
        )
        events.append(replace(event, windows=window_rows(event.windows, 0, 0)))
    write_log(folder, log(events))


def rows_of(folder: Path, *policies: str) -> dict[str, OffPolicyRow]:
    summary = analyse(folder, np.random.default_rng(0), policies=policies).summary
    return {row.policy: row for row in summary.off_policy}


def test_a_log_without_scoring_is_judged_by_what_was_played(tmp_path: Path) -> None:
    """Drafters were drawn uniformly, so a fixed one is what it was whenever it was played."""
    bandit_log(tmp_path)
    summary = analyse(tmp_path, np.random.default_rng(0)).summary
    played = {row.drafter_id: row.played_length for row in summary.drafters if row.stream is None}
    names = ("fixed:drafter-0", "fixed:drafter-2", "normal_hedge:scope=stream", "ucb", "hedge")
    rows = rows_of(tmp_path, *names)
    assert tuple(rows) == names
    for index in (0, 2):
        row = rows[f"fixed:drafter-{index}"]
        expected = played[f"drafter-{index}"]
        assert row.refusal is None and expected is not None
        assert row.doubly_robust == pytest.approx(expected, rel=0.1)
        assert row.doubly_robust_low is not None and row.doubly_robust_high is not None
        assert row.doubly_robust_low < expected < row.doubly_robust_high
    lengths = [rows[name].doubly_robust or 0.0 for name in names]
    assert lengths[1] < lengths[2] <= lengths[0] * 1.05
    assert lengths[2] > 0.85 * lengths[0], "what is learned from estimates must find the best"


def test_a_log_of_a_fixed_drafter_tells_nothing_of_others(tmp_path: Path) -> None:
    bandit_log(tmp_path, policy="fixed:1", num_requests=10)
    rows = rows_of(tmp_path, "fixed:drafter-1", "fixed:drafter-0", "normal_hedge")
    assert rows["fixed:drafter-1"].refusal is None
    for name in ("fixed:drafter-0", "normal_hedge"):
        assert "all logged choices had probability 1" in (rows[name].refusal or "")


def test_a_log_with_scoring_needs_no_estimates(tmp_path: Path) -> None:
    write_log(tmp_path, log([make_request()]))
    assert rows_of(tmp_path, "hedge") == {}
