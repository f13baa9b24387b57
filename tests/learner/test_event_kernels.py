"""What is learned of an event in compiled passes is what the definitions say, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.cost import CostSums
from learner.feedback import drafter_positions, event_losses, is_learned
from learner.measures import (
    Estimator,
    acceptance_length_loss,
    acceptance_loss,
    expected_acceptance_length,
    hybrid_loss,
    policy_losses,
)
from learner.prior import PriorSettings, StreamPrior
from learner.selection.base import Loss
from schemas.events import AcceptanceRule, FinishReason, VerificationEvent
from tests.schemas.builders import make_drafters, make_event

SETTINGS = PriorSettings()
NAN = np.float16("nan")


def some_event(
    seed: int, *, num_drafters: int = 3, num_speculative_tokens: int = 4, num_windows: int = 30
) -> VerificationEvent:
    """Return the end of a request, with drafters asleep or failed within a window."""
    rng = np.random.default_rng(seed)
    levels = num_speculative_tokens
    event = make_event(
        seed=seed,
        num_windows=num_windows,
        num_drafters=num_drafters,
        num_speculative_tokens=levels,
        acceptance_rule=AcceptanceRule.SPECULATIVE_SAMPLING,
        finish_reason=FinishReason.STOP if seed % 3 else FinishReason.ABORTED,
    )
    end = event.first_position + event.num_positions
    start = end - num_windows + np.arange(num_windows)
    num_levels = np.minimum(levels, end - start).astype(np.int16)
    scores = np.stack([event.windows.acceptance_probability, event.windows.realised_acceptance])
    scores[:, rng.random((num_windows, levels, num_drafters)) < 0.02] = NAN
    scores[1, rng.random((num_windows, levels, num_drafters)) < 0.02] = NAN
    for row, count in enumerate(num_levels):
        scores[:, row, count:] = NAN
    windows = replace(
        event.windows,
        start=start.astype(np.int32),
        num_levels=num_levels,
        acceptance_probability=scores[0],
        realised_acceptance=scores[1],
    )
    return replace(event, windows=windows)


def aligned(
    values: NDArray[np.float64], places: NDArray[np.int64], size: int, absent: float
) -> NDArray[np.float64]:
    result = np.full((*values.shape[:-1], size), absent)
    result[..., places[places >= 0]] = values[..., places >= 0]
    return result


def evidence_by_definition(
    event: VerificationEvent, estimator: Estimator, weight: float
) -> NDArray[np.float64]:
    windows, levels = event.windows, event.num_speculative_tokens
    lengths = expected_acceptance_length(
        windows.acceptance_probability,
        windows.realised_acceptance,
        num_levels=windows.num_levels,
        estimator=estimator,
    )
    first = acceptance_loss(windows.acceptance_probability)
    return hybrid_loss(acceptance_length_loss(lengths, levels), first, weight=weight)


@pytest.mark.parametrize("estimator", ["exact", "published"])
@pytest.mark.parametrize("loss", ["first", "length", "hybrid"])
def test_one_pass_writes_both_losses_in_the_order_of_the_learner(
    estimator: Estimator, loss: Loss
) -> None:
    for seed in range(12):
        event = some_event(seed)
        places = drafter_positions(event.drafters, make_drafters(5)[1:])
        found = event_losses(
            event,
            places=places,
            num_drafters=4,
            estimator=estimator,
            length_weight=0.7,
            policy_loss=loss,
        )
        kept = is_learned(event)
        evidence = evidence_by_definition(event, estimator, 0.7)[kept]
        np.testing.assert_array_equal(found.evidence, aligned(evidence, places, 4, np.nan))
        windows = event.windows
        of_policy = policy_losses(
            windows.acceptance_probability,
            windows.realised_acceptance,
            windows.num_levels,
            loss=loss,
            num_speculative_tokens=event.num_speculative_tokens,
        )[kept]
        np.testing.assert_array_equal(found.of_policy, aligned(of_policy, places, 4, np.nan))


@pytest.mark.parametrize("num_drafters", [1, 2, 7, 8, 9, 16, 21])
def test_evidence_adds_up_as_it_is_defined(num_drafters: int) -> None:
    rng = np.random.default_rng(num_drafters)
    losses = rng.random((50, num_drafters))
    losses[rng.random(losses.shape) < 0.1] = np.nan
    before = StreamPrior(rng.normal(size=num_drafters), rng.random(num_drafters))
    after = before.learned(losses, SETTINGS)
    is_awake = ~np.isnan(losses)
    known = np.where(is_awake, losses, 0.0)
    means = known.sum(axis=1) / np.maximum(is_awake.sum(axis=1), 1)
    excess = np.where(is_awake, known - means[:, None], 0.0).sum(axis=0)
    decay = SETTINGS.decay
    np.testing.assert_array_equal(after.excess_loss, decay * before.excess_loss + excess)
    num_windows = decay * before.num_windows + is_awake.sum(axis=0)
    np.testing.assert_array_equal(after.num_windows, num_windows)


def costs_by_definition(
    sums: CostSums, event: VerificationEvent, places: NDArray[np.int64], decay: float
) -> dict[str, NDArray[np.float64]]:
    rounds, size = event.rounds, len(event.drafters)
    drafted = rounds.num_draft_tokens.astype(np.int64)
    chosen = rounds.drafter_index >= 0
    drafter = rounds.drafter_index[chosen].astype(np.int64)
    is_scored = ~np.isnan(event.windows.acceptance_probability)
    num_scored = is_scored.any(axis=1).sum(axis=0).astype(np.float64)
    score_seconds = float(rounds.score_seconds.sum(dtype=np.float64))
    new = {
        "draft_seconds": np.bincount(drafter, rounds.draft_seconds[chosen], size),
        "num_draft_tokens": np.bincount(drafter, drafted[chosen], size),
        "score_seconds": num_scored * (score_seconds / max(num_scored.sum(), 1)),
        "num_scored_windows": num_scored,
    }
    new = {name: aligned(one, places, len(sums.draft_seconds), 0.0) for name, one in new.items()}
    decoded = drafted[rounds.first_position > event.num_prompt_tokens]
    seconds = rounds.verify_seconds[rounds.first_position > event.num_prompt_tokens]
    levels = max(event.num_speculative_tokens + 1, len(sums.verify_seconds))
    new["verify_seconds"] = np.bincount(decoded, seconds, levels)
    new["num_verifications"] = np.bincount(decoded, np.ones(len(decoded)), levels)
    before = {
        name: np.pad(one, (0, len(new[name]) - len(one))) for name, one in sums.arrays().items()
    }
    return {name: decay * before[name] + new[name] for name in new}


def test_costs_add_up_as_they_are_defined() -> None:
    sums = CostSums.empty().with_new(4)
    for seed, levels in enumerate([4, 2, 6, 4]):
        event = some_event(seed, num_speculative_tokens=levels)
        places = drafter_positions(event.drafters, make_drafters(5)[1:])
        expected = costs_by_definition(sums, event, places, 0.9)
        sums = sums.learned(event, places, decay=0.9)
        for name, values in sums.arrays().items():
            np.testing.assert_array_equal(values, expected[name], err_msg=name)
