"""What another policy would have earned, from a log that knows only what was played.

Without scoring, a round tells the acceptance length of the drafter that was played and nothing of
the others. If drafters were selected by chance, with probability p, other policies can still be
judged. With π the other policy's probability of the played drafter, w = π / p, y the length:

- importance-weighted: the mean of w y. Unbiased.
- doubly robust: the mean of Σ_i π_i b_i + w (y - b_played), where b are lengths predicted from
  rounds before (Dudík, Langford and Li, "Doubly robust policy evaluation and learning", 2011).
  Unbiased too, and steadier where the predictions are good.

Both are means over the logged rounds: over the places at which the log's own policy made rounds
begin. π and b may depend on the past, not on the round they are used in.

Neither can say anything where chance played no part: a drafter that would not have been played
whatever the coin was never weighed. Then, and where nearly all weight lies on few rounds, there is
a refusal instead of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled
from replay.regret import Interval, block_bootstrap_interval

MIN_EFFECTIVE_ROUNDS = 100.0
"""Rounds of equal weight that an estimate must be worth."""

CERTAIN = 1.0 - 1e-6
"""Events carry probabilities as float32: from here on the choice was not by chance."""

MAX_UNSUPPORTED = 0.01
"""Share of the rounds that may be without chance where the other policy wants another drafter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyEstimate:
    """Mean acceptance length of a policy over the logged rounds, estimated.

    Attributes:
        num_rounds: Rounds in which a drafter was played.
        effective_sample_size: (Σ w)² / Σ w²: rounds of equal weight that this is worth.
        importance_weighted, doubly_robust: With 95 % block-bootstrap intervals; None if refused.
        refusal: Why there is no number; None if there is.
    """

    num_rounds: int
    effective_sample_size: float
    importance_weighted: Interval | None = None
    doubly_robust: Interval | None = None
    refusal: str | None = None


def off_policy_estimate(
    lengths: NDArray[np.float64],
    drafter: NDArray[np.integer],
    logged_probability: NDArray[np.floating],
    policy_probabilities: NDArray[np.float64],
    predictions: NDArray[np.float64],
    generator: np.random.Generator,
    *,
    block_length: int | None = None,
) -> OffPolicyEstimate:
    """Estimate a policy's mean acceptance length from the played drafters' lengths alone.

    Args:
        lengths: Of the played drafter, (T,).
        drafter: Index of it, (T,), >= 0.
        logged_probability: Its probability when it was selected, (T,), in (0, 1].
        policy_probabilities: The other policy's, before each round, (T, N).
        predictions: Lengths predicted before each round, (T, N); see ``running_means``.
        generator: The dice of the bootstrap.
        block_length: Rounds per bootstrap block; about those of a request.
    """
    count = lengths.size
    if count == 0:
        return OffPolicyEstimate(
            num_rounds=0, effective_sample_size=0.0, refusal="no round had a drafter"
        )
    row = np.arange(count)
    wanted = policy_probabilities[row, drafter]
    weights = wanted / logged_probability
    squares = float(weights @ weights)
    effective = float(weights.sum() ** 2 / squares) if squares > 0.0 else 0.0
    refusal = _refusal(wanted, logged_probability, effective)
    if refusal is not None:
        return OffPolicyEstimate(num_rounds=count, effective_sample_size=effective, refusal=refusal)
    error = weights * (lengths - predictions[row, drafter])
    robust = np.einsum("tn,tn->t", policy_probabilities, predictions) + error
    return OffPolicyEstimate(
        num_rounds=count,
        effective_sample_size=effective,
        importance_weighted=_mean(weights * lengths, generator, block_length),
        doubly_robust=_mean(robust, generator, block_length),
    )


def _refusal(
    wanted: NDArray[np.float64], logged_probability: NDArray[np.floating], effective: float
) -> str | None:
    is_certain = logged_probability >= CERTAIN
    unsupported = float(np.mean(is_certain & (wanted < CERTAIN)))
    if unsupported > MAX_UNSUPPORTED:
        what = "all" if is_certain.all() else f"{is_certain.mean():.0%} of the"
        return (
            f"{what} logged choices had probability 1: where chance played no part, what another "
            "drafter would have given cannot be weighed; log with a policy that draws, or score"
        )
    if effective < MIN_EFFECTIVE_ROUNDS:
        return (
            f"the weights are worth {effective:.0f} rounds of {wanted.size:,}, fewer than "
            f"{MIN_EFFECTIVE_ROUNDS:.0f}: the log hardly ever did what this policy wants"
        )
    return None


def _mean(
    values: NDArray[np.float64], generator: np.random.Generator, block_length: int | None
) -> Interval:
    found = block_bootstrap_interval(values, generator, block_length=block_length)
    mean = float(values.mean())
    if found is None:
        return Interval(value=mean, low=mean, high=mean)
    return Interval(value=mean, low=found.low / values.size, high=found.high / values.size)


@compiled
def running_means(
    lengths: NDArray[np.float64],
    drafter: NDArray[np.int64],
    weight: float,
    out: NDArray[np.float64],
) -> None:
    """Write the lengths predicted before each round, (T, N).

    The mean of what the drafter gave so far, drawn towards the mean of all by ``weight`` rounds.
    """
    num_drafters = out.shape[1]
    sums = np.zeros(num_drafters)
    counts = np.zeros(num_drafters)
    total = 0.0
    for index in range(lengths.size):
        overall = total / index if index else 1.0
        for other in range(num_drafters):
            out[index, other] = (sums[other] + weight * overall) / (counts[other] + weight)
        sums[drafter[index]] += lengths[index]
        counts[drafter[index]] += 1.0
        total += lengths[index]


def robust_losses(
    losses: NDArray[np.float64],
    drafter: NDArray[np.integer],
    logged_probability: NDArray[np.floating],
    predictions: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return doubly robust estimates of every drafter's loss in every round, (T, N), cut to [0, 1].

    They stand in for windows where a policy is to learn from such a log. Cutting biases what is
    learned, not the estimate of its worth.
    """
    row = np.arange(losses.size)
    estimates = predictions.copy()
    estimates[row, drafter] += (losses - predictions[row, drafter]) / logged_probability
    return np.clip(estimates, 0.0, 1.0)
