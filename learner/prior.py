"""What the past of a stream says about its drafters before a request begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.event_kernels import add_evidence


@dataclass(frozen=True, kw_only=True, slots=True)
class PriorSettings:
    """How much of the past counts, and how much it weighs.

    Attributes:
        half_life_events: Events of the stream after which evidence counts half, > 0.
        strength: How many nats of log-weight one unit of mean loss is worth, >= 0. Hedge at rate η
            that has watched a drafter for w windows weighs it so with strength η w.
        shrink_windows: Windows of "average drafter" that every drafter begins with, > 0.
        floor: Probability shared equally, in (0, 1]: no drafter gets less than floor / N.
        from_other_domains: Part of what other domains' streams say that a new domain is expected
            to share, in [0, 1]; the rest of its prior is "average drafter".
    """

    half_life_events: float = 8.0
    strength: float = 40.0
    shrink_windows: float = 16.0
    floor: float = 0.05
    from_other_domains: float = 0.1

    def __post_init__(self) -> None:
        for name in ("half_life_events", "shrink_windows"):
            if not 0.0 < getattr(self, name) < np.inf:
                raise ValueError(f"{name}={getattr(self, name)}, expected > 0 and finite")
        if not 0.0 <= self.strength < np.inf:
            raise ValueError(f"strength={self.strength}, expected >= 0 and finite")
        if not 0.0 < self.floor <= 1.0:
            raise ValueError(f"floor={self.floor} outside (0, 1]")
        if not 0.0 <= self.from_other_domains <= 1.0:
            raise ValueError(f"from_other_domains={self.from_other_domains} outside [0, 1]")

    @property
    def decay(self) -> float:
        """Factor on all evidence per event, in (0, 1)."""
        return float(0.5 ** (1.0 / self.half_life_events))


@dataclass(frozen=True, slots=True)
class StreamPrior:
    """Decayed evidence of one stream.

    A drafter's excess loss on a window is its loss minus the mean of the drafters that were awake.
    The same windows thus compare all; if one slept through the hard ones, it gains nothing by
    that. Where all are awake, the prior is softmax(-strength x mean loss), shrunk.

    Attributes:
        excess_loss: Decayed sum per drafter, shape (N,).
        num_windows: Decayed number of windows it was awake in, shape (N,), >= 0.
    """

    excess_loss: NDArray[np.float64]
    num_windows: NDArray[np.float64]

    @classmethod
    def empty(cls, num_drafters: int) -> StreamPrior:
        """Return a prior without evidence."""
        return cls(np.zeros(num_drafters), np.zeros(num_drafters))

    def learned(self, losses: NDArray[np.float64], settings: PriorSettings) -> StreamPrior:
        """Return the prior after one event; an event without windows changes nothing.

        Args:
            losses: Shape (W, N), in [0, 1]; NaN = asleep.
            settings: Whose ``decay`` to use.
        """
        if losses.shape[0] == 0:
            return self
        sums = add_evidence(losses, settings.decay, self.excess_loss, self.num_windows)
        return StreamPrior(*sums)

    def with_new(self, num_new: int) -> StreamPrior:
        """Return the prior with drafters added at the end: average, and without history."""
        zeros = np.zeros(num_new)
        return StreamPrior(
            np.concatenate([self.excess_loss, zeros]), np.concatenate([self.num_windows, zeros])
        )

    def only(self, positions: Sequence[int]) -> StreamPrior:
        """Return the prior of the drafters at ``positions``."""
        kept = np.array(positions, dtype=np.int64)
        return StreamPrior(self.excess_loss[kept], self.num_windows[kept])

    def log_weights(self, settings: PriorSettings) -> NDArray[np.float64]:
        """Return -strength x shrunk mean excess loss, normalised, shape (N,); all finite."""
        shrunk = self.excess_loss / (self.num_windows + settings.shrink_windows)
        return log_softmax(-settings.strength * shrunk)

    def probabilities(self, settings: PriorSettings) -> NDArray[np.float64]:
        """Return the floored probabilities, shape (N,), sum 1, each >= floor / N."""
        return floored(np.exp(self.log_weights(settings)), settings.floor)


def log_softmax(exponents: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithms of the distribution with these log-weights, shape (N,); all finite."""
    if not len(exponents):
        return exponents
    largest = exponents.max()
    return np.asarray(exponents - largest - np.log(np.exp(exponents - largest).sum()))


def floored(probabilities: NDArray[np.float64], floor: float) -> NDArray[np.float64]:
    """Return the distribution with ``floor`` of its mass shared equally, shape (N,)."""
    return np.asarray((1.0 - floor) * probabilities + floor / max(len(probabilities), 1))
