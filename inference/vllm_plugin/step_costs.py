"""What a step costs at each batch size, measured while it serves.

Between one call of ``propose`` and the next lie the target's pass, the sampling and vLLM's own
work: for B rows with D drafted tokens about ``base + first [D > 0] + token D`` seconds. The three
are fitted per class of batch size, with forgetting, and a ridge towards what is assumed before
anything is measured: a drafted token costs a twentieth of a step. What is forgotten is therefore
tried again. Only plain steps are told: every row went on, none read a prompt, nobody waited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MEMORY = 0.99
"""Per plain step of a class."""

TOKEN_SHARE = 0.05
"""Share of a step that a drafted token is assumed to cost."""

RIDGE = 2.0
"""Steps that the assumption counts as."""

LONGEST_RATIO = 4.0
"""A step so many times the usual was held up by something else."""

RATE_MEMORY = 0.98
"""Per step: the running rate of tokens per second."""

NUM_CLASSES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds of a step of one batch size.

    Attributes:
        base: Without drafts, > 0.
        first: On top as soon as any row drafts, >= 0.
        token: On top per drafted token, > 0.
    """

    base: float
    first: float
    token: float

    def seconds(self, num_draft_tokens: int) -> float:
        """Return the seconds of a step with so many drafted tokens in all rows."""
        drafted = self.first + self.token * num_draft_tokens if num_draft_tokens else 0.0
        return self.base + drafted


def batch_class(num_rows: int) -> int:
    """Return the class of a batch size: 1, 2, 3-4, 5-8, 9-16, ..."""
    return min(max(num_rows - 1, 0).bit_length(), NUM_CLASSES - 1)


class StepCosts:
    """Measures steps by batch size, and the rate of tokens per second they give."""

    def __init__(self) -> None:
        self._moments = np.zeros((NUM_CLASSES, 3, 3))
        self._targets = np.zeros((NUM_CLASSES, 3))
        self._usual = np.zeros(NUM_CLASSES)
        self._fits: dict[int, StepCost] = {}
        self._rates = np.zeros((NUM_CLASSES, 2))

    def observe(
        self, num_rows: int, num_draft_tokens: int, num_emitted: int, seconds: float, own: float
    ) -> None:
        """Note a plain step.

        Args:
            num_rows: B >= 1.
            num_draft_tokens: D, over all rows.
            num_emitted: Tokens that all rows emitted.
            seconds: Of the step without ``own``.
            own: Seconds that this proposer took before it.
        """
        place = batch_class(num_rows)
        usual = self._usual[place]
        if usual > 0.0 and seconds > LONGEST_RATIO * usual:
            return
        self._usual[place] = seconds if usual == 0.0 else 0.9 * usual + 0.1 * seconds
        facts = np.array([1.0, float(num_draft_tokens > 0), float(num_draft_tokens)])
        self._moments[place] = MEMORY * self._moments[place] + np.outer(facts, facts)
        self._targets[place] = MEMORY * self._targets[place] + facts * seconds
        self._rates[place] = RATE_MEMORY * self._rates[place] + (num_emitted, seconds + own)
        self._fits.pop(place, None)

    def cost(self, num_rows: int) -> StepCost | None:
        """Return what steps of this batch size cost; None before anything was measured."""
        place = batch_class(num_rows)
        found = self._fits.get(place)
        if found is None:
            near = self._nearest(place)
            if near is None:
                return None
            found = _fitted(self._moments[near], self._targets[near], self._usual[near])
            if near == place:
                self._fits[place] = found
        return found

    def rate(self, num_rows: int) -> float:
        """Return the running rate at this batch size, tokens per second of all rows; 0 = none."""
        near = self._nearest(batch_class(num_rows))
        if near is None:
            return 0.0
        tokens, seconds = self._rates[near]
        return float(tokens / seconds) if seconds > 0.0 else 0.0

    def _nearest(self, place: int) -> int | None:
        known = np.flatnonzero(self._usual > 0.0)
        return int(known[np.argmin(np.abs(known - place))]) if known.size else None


def _fitted(moments: NDArray[np.float64], targets: NDArray[np.float64], usual: float) -> StepCost:
    """Fit by least squares, drawn to the assumption by a ridge, and keep costs possible."""
    token = TOKEN_SHARE * usual
    assumed = np.array([usual, 0.0, token])
    ridge = np.diag([1e-3, RIDGE, RIDGE])
    base, first, slope = np.linalg.solve(moments + ridge, targets + ridge @ assumed)
    return StepCost(
        base=max(float(base), 0.2 * usual),
        first=max(float(first), 0.0),
        token=max(float(slope), 0.1 * token),
    )
