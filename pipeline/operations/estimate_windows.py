"""Acceptances of one drawn request, as compressible as real ones (see ``estimate_sample``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri

from pipeline.bench.synthetic import PERSISTENCE, SHARED_VARIANCE, hit_rate
from pipeline.configuration.pool_settings import DrafterSettings

Value = TypeVar("Value", bound=np.generic)

LOOKUP_SHARE = 0.4
"""Share of the positions where a drafter that looks up has a proposal."""

LOOKUP_STAY = 0.8
"""Chance that it is as at the position before: what is copied is copied for a while."""

ALIKE = 0.7
"""Share of a window in which heads, which learn from the same text, propose the same."""

CERTAINTY_SPREAD = 0.8
"""How far the target's certainty follows the difficulty of a position."""


@dataclass(frozen=True, slots=True)
class _Proposals:
    """What one drafter would propose, (P, K) each.

    Attributes:
        is_made: Whether there is a proposal.
        is_top: Whether it is the target's most probable token.
        other_chance: The target's probability of it if it is not.
    """

    is_made: NDArray[np.bool_]
    is_top: NDArray[np.bool_]
    other_chance: NDArray[np.float64]


class DrawnText:
    """The positions of one request: how hard each is, and how sure the target is there.

    Args:
        rng: The dice.
        num_positions: P.
        num_levels: K, >= 1.
        acceptance_length: Mean of the drafters that propose everywhere, bonus included, >= 1.
        is_sampled: Whether the target draws.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        num_positions: int,
        num_levels: int,
        *,
        acceptance_length: float,
        is_sampled: bool,
    ) -> None:
        self._rng = rng
        self._count = num_positions
        self._levels = num_levels
        self._is_sampled = is_sampled
        size = num_positions + num_levels - 1
        length = min(max(acceptance_length, 1.01), num_levels + 0.99)
        self._bound = float(ndtri(hit_rate(length, num_levels)))
        self._difficulty = _persistent_noise(rng, size)
        certainty = np.ones(size)
        if is_sampled:
            certainty = ndtr(self._bound - CERTAINTY_SPREAD * self._difficulty)
        self._certainty = self._by_window(certainty)
        self._is_top_emitted = self._by_window(rng.random(size) < certainty)
        self._alike = rng.standard_normal((num_positions, num_levels))

    def acceptances(
        self, pool: Sequence[DrafterSettings]
    ) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Return acceptance probability and realised acceptance, (P, K, N) each."""
        shape = (self._count, self._levels, len(pool))
        probability, realised = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
        for index, one in enumerate(pool):
            found = self._proposals(one)
            chance = np.where(found.is_top, self._certainty, found.other_chance)
            # A chain ends where nothing is proposed.
            is_made = np.logical_and.accumulate(found.is_made, axis=1)
            probability[..., index] = chance * is_made
            realised[..., index] = found.is_top & self._is_top_emitted & is_made
        return probability, realised

    def _proposals(self, one: DrafterSettings) -> _Proposals:
        rng, size = self._rng, len(self._difficulty)
        other = self._by_window(rng.beta(0.3, 3.0, size))
        is_made = np.full(size, one.kind != "none")
        if one.kind in ("prompt_lookup", "suffix"):
            is_made = _persistent_choice(rng, size)
        shared, own = math.sqrt(SHARED_VARIANCE), math.sqrt(1.0 - SHARED_VARIANCE)
        if one.kind in ("hydra", "convex", "eagle"):
            # From further away a head proposes something else for the same position.
            is_alike = rng.random(self._alike.shape) < ALIKE
            noise = np.where(is_alike, self._alike, rng.standard_normal(is_alike.shape))
            other = np.where(is_alike, other, rng.beta(0.3, 3.0, is_alike.shape))
        else:
            noise = self._by_window(rng.standard_normal(size))
        is_top = shared * self._by_window(self._difficulty) + own * noise < self._bound
        # What is not its most probable token has no chance with a greedy target.
        other_chance = other * (1.0 - self._certainty)
        return _Proposals(self._by_window(is_made), np.asarray(is_top), other_chance)

    def _by_window(self, values: NDArray[Value]) -> NDArray[Value]:
        """Return what each level of each window sees of values per position."""
        return sliding_window_view(values, self._levels)


def _persistent_noise(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    steps = rng.standard_normal(count)
    steps[1:] *= math.sqrt(1.0 - PERSISTENCE**2)
    for position in range(1, count):
        steps[position] += PERSISTENCE * steps[position - 1]
    return steps


def _persistent_choice(rng: np.random.Generator, count: int) -> NDArray[np.bool_]:
    is_fresh = rng.random(count) > LOOKUP_STAY
    drawn = rng.random(count) < LOOKUP_SHARE
    return np.asarray(drawn[np.maximum.accumulate(np.where(is_fresh, np.arange(count), 0))])
