"""The contract of a selection policy, and the checks that all policies share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

PROBABILITY_TOLERANCE = 1e-3
"""Largest distance from 1 of a sum of probabilities that renormalising may repair."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyState:
    """A policy as plain numbers: its name, the version of its layout, and float64 arrays."""

    name: str
    version: int
    arrays: Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundFeedback:
    """What a round tells of the drafter that was played: all that a bandit may see.

    Attributes:
        drafter_index: The drafter that was played.
        selection_probability: Its probability when it was selected, in (0, 1], from the event.
        length_loss: 1 - acceptance length / (K + 1), in [0, 1].
        agreement_loss: 1 - mean acceptance probability over the block, in [0, 1].
    """

    drafter_index: int
    selection_probability: float
    length_loss: float
    agreement_loss: float

    def __post_init__(self) -> None:
        if not 0.0 < self.selection_probability <= 1.0:
            raise ValueError(f"selection_probability={self.selection_probability} outside (0, 1]")
        for name in ("length_loss", "agreement_loss"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}={getattr(self, name)} outside [0, 1]")


class Policy(Protocol):
    """Chooses among N drafters.

    Full-information policies learn every drafter's loss on each completed window, bandits the
    outcome of each round for the drafter that was played; each ignores the other feedback. A
    policy holds no clock, no generator and no I/O; what it learned is its ``state``.
    """

    @property
    def num_drafters(self) -> int:
        """Number of drafters N, at least 1."""

    def probabilities(self) -> NDArray[np.float64]:
        """Return the chance of each drafter to be selected next, shape (N,), sum 1."""

    def learn(self, losses: NDArray[np.floating[Any]]) -> None:
        """Learn one completed window.

        Args:
            losses: Loss per drafter, shape (N,), in [0, 1]; NaN = asleep: it is charged what the
                others lost together.

        Raises:
            ValueError: If the shape is wrong or a loss is not a number in [0, 1]; the state is
                then unchanged.
        """

    def learn_windows(self, losses: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Learn completed windows in order, losses (W, N) as ``learn`` takes them.

        Returns:
            The probabilities after each window, shape (W, N).

        Raises:
            ValueError: As ``learn``; then none of the windows was learned.
        """

    def learn_round(self, feedback: RoundFeedback) -> None:
        """Learn the outcome of one round."""

    def state(self) -> PolicyState:
        """Return all that ``policy_from_state`` needs to go on bit for bit."""


def checked_losses(losses: NDArray[np.floating[Any]], num_drafters: int) -> NDArray[np.float64]:
    """Return losses (W, N) as contiguous float64, or refuse them; NaN stays NaN.

    Raises:
        ValueError: As ``Policy.learn_windows``.
    """
    values = np.ascontiguousarray(losses, dtype=np.float64)
    if values.ndim != 2 or values.shape[1] != num_drafters:
        raise ValueError(f"losses have shape {values.shape}, expected (W, {num_drafters})")
    bad = (values < 0.0) | (values > 1.0)
    if bad.any():
        window, index = (int(i) for i in np.argwhere(bad)[0])
        raise ValueError(f"losses[{window}, {index}]={values[window, index]} outside [0, 1]")
    return values


def checked_prior(prior: ArrayLike | None, num_drafters: int) -> NDArray[np.float64]:
    """Return the prior renormalised in float64; uniform if None.

    Raises:
        ValueError: If there is no drafter, a probability is not positive (a drafter with none
            could never be learned), or the sum is off by more than ``PROBABILITY_TOLERANCE``.
    """
    if num_drafters < 1:
        raise ValueError(f"num_drafters={num_drafters}, expected at least 1")
    if prior is None:
        return np.full(num_drafters, 1.0 / num_drafters)
    values = np.asarray(prior, dtype=np.float64)
    if values.shape != (num_drafters,):
        raise ValueError(f"prior has shape {values.shape}, expected ({num_drafters},)")
    if not np.all(values > 0.0):
        index = int(np.argmin(values > 0.0))
        raise ValueError(f"prior[{index}]={values[index]}, expected > 0")
    return renormalised("prior", values)


def renormalised(name: str, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the float64 vector divided by its sum.

    Raises:
        ValueError: If an element is not in [0, 1] up to the tolerance, or the sum is off by more.
    """
    highest = 1.0 + PROBABILITY_TOLERANCE
    good = (probabilities >= 0.0) & (probabilities <= highest)
    if not good.all():
        index = int(np.argmin(good))
        raise ValueError(f"{name}[{index}]={probabilities[index]} outside [0, 1]")
    total = float(probabilities.sum())
    if not abs(total - 1.0) <= PROBABILITY_TOLERANCE:
        raise ValueError(f"{name} sums to {total}, expected 1 within {PROBABILITY_TOLERANCE}")
    return probabilities / total
