"""What a step costs at each batch size, measured while it serves.

Between one call of ``propose`` and the next lie the target's pass, the sampling and vLLM's own
work. For B rows with D drafted tokens that takes ``base + extra(D)`` seconds, and ``extra`` is no
straight line: matrix units read rows in tiles, so some tokens are all but free and the next one is
dear. It is a line fitted to all steps that drafted, bent where steps with so many tokens were seen
to differ from it, and never falls.

A machine's speed drifts faster than the shape of this curve. So the curve is remembered long and
multiplied by a scale that follows every step.

``base`` is the mean of steps without drafts, with a memory of its own: in a large batch hardly a
step is without drafts, and what drafting at all costs would be forgotten. So such a step is asked
for now and then. Drafting that is never tried is forgotten towards what is assumed before anything
is measured, that a drafted token costs a twentieth of a step, and is therefore tried again. Only
plain steps are told: every row went on, none read a prompt, nobody waited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression

BARE_MEMORY = 0.95
"""Of steps without drafts, per such step."""

DRAFTED_MEMORY = 0.995
"""Of steps with drafts, per step of either kind."""

SCALE_MEMORY = 0.9
"""Of the machine's speed, per step."""

TOKEN_SHARE = 0.05
"""Share of a step that a drafted token is assumed to cost; a tenth of it is the least."""

RIDGE = 2.0
"""Steps that the assumption counts as."""

LINE_STEPS = 8.0
"""Steps that the line counts as, where steps with so many tokens bend it."""

NUM_BINS = 16
"""Numbers of drafted tokens that are told apart."""

STEPS_PER_FIT = 8

LONGEST_RATIO = 4.0
"""A step so many times the usual was held up by something else."""

RATE_MEMORY = 0.98
"""Per step: the running rate of tokens per second."""

FIRST_BARE_STEPS, RAREST_BARE_STEP = 4, 100
"""A bare step is due after so many drafted ones, at first and at last."""

EXACT_BITS = 3
"""Batches of up to 2^3 rows are told apart; larger ones by so many leading bits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepCost:
    """Seconds of a step of one batch size.

    Attributes:
        base: Without drafts, > 0.
        extra: On top with 1, 2, ... drafted tokens in all rows, (M,), rising.
        token: What one more drafted token costs by and large, > 0.
    """

    base: float
    extra: NDArray[np.float64]
    token: float

    @property
    def first(self) -> float:
        """What the first drafted token costs more than one by and large, >= 0."""
        return max(float(self.extra[0]) - self.token, 0.0)

    def seconds(self, num_draft_tokens: int) -> float:
        """Return the seconds of a step with so many drafted tokens in all rows, at most M."""
        return self.base + (float(self.extra[num_draft_tokens - 1]) if num_draft_tokens else 0.0)

    def scaled(self, scale: float) -> StepCost:
        """Return the cost on a machine that takes ``scale`` times as long."""
        return StepCost(base=self.base * scale, extra=self.extra * scale, token=self.token * scale)


def batch_class(num_rows: int) -> int:
    """Return the largest batch size of a class: 1, 2, ... 8, 10, 12, 14, 16, 20, ..."""
    width = 1 << max((num_rows - 1).bit_length() - EXACT_BITS, 0)
    return -(-num_rows // width) * width


class StepCosts:
    """Measures steps by batch size, and the rate of tokens per second they give.

    Args:
        num_levels: K, most tokens of a row's draft.
    """

    def __init__(self, num_levels: int) -> None:
        self._num_levels = max(num_levels, 1)
        self._classes: dict[int, _ClassCosts] = {}

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
        if place not in self._classes:
            self._classes[place] = _ClassCosts(place * self._num_levels)
        self._classes[place].observe(num_draft_tokens, num_emitted, seconds, own)

    def cost(self, num_rows: int) -> StepCost | None:
        """Return what steps of this batch size cost; None before anything was measured.

        One of another size was borrowed if ``extra`` ends earlier than this batch could draft.
        """
        near = self._nearest(num_rows)
        return None if near is None else near.cost()

    def rate(self, num_rows: int) -> float:
        """Return the running rate at this batch size, tokens per second of all rows; 0 = none."""
        near = self._nearest(num_rows)
        return 0.0 if near is None else near.rate()

    def owes_bare_step(self, num_rows: int) -> bool:
        """Tell whether a step without drafts is due, to know what drafting costs."""
        found = self._classes.get(batch_class(num_rows))
        return found is not None and found.owes_bare_step()

    def _nearest(self, num_rows: int) -> _ClassCosts | None:
        place = batch_class(num_rows)
        if place in self._classes or not self._classes:
            return self._classes.get(place)
        return self._classes[min(self._classes, key=lambda one: abs(one - place))]


class _ClassCosts:
    """Steps of one class of batch sizes, with up to ``num_tokens`` drafted tokens."""

    def __init__(self, num_tokens: int) -> None:
        self._tokens = np.arange(1, num_tokens + 1)
        self._bin_width = -(-num_tokens // NUM_BINS)
        # Per bin, the first of which has no drafts: weight, drafted tokens, scaled seconds.
        self._bins = np.zeros((self._bin(num_tokens) + 1, 3))
        self._usual = 0.0
        self._scale = 1.0
        self._rate = np.zeros(2)
        self._num_bare = 0
        self._num_drafted_since = 0
        self._num_since_fit = 0
        self._shape: StepCost | None = None

    def _bin(self, num_draft_tokens: int) -> int:
        return -(-num_draft_tokens // self._bin_width)

    def observe(self, num_draft_tokens: int, num_emitted: int, seconds: float, own: float) -> None:
        if self._usual > 0.0 and seconds > LONGEST_RATIO * self._usual:
            return
        self._usual = seconds if self._usual == 0.0 else 0.9 * self._usual + 0.1 * seconds
        drafted = min(num_draft_tokens, len(self._tokens))
        if self._shape is not None:
            ratio = seconds / self._shape.seconds(drafted)
            self._scale = SCALE_MEMORY * self._scale + (1.0 - SCALE_MEMORY) * ratio
        self._bins[1:] *= DRAFTED_MEMORY
        if drafted:
            self._num_drafted_since += 1
        else:
            self._bins[0] *= BARE_MEMORY
            self._num_bare += 1
            self._num_drafted_since = 0
        self._bins[self._bin(drafted)] += (1.0, drafted, seconds / self._scale)
        self._rate = RATE_MEMORY * self._rate + (num_emitted, seconds + own)
        self._num_since_fit += 1

    def rate(self) -> float:
        tokens, seconds = self._rate
        return float(tokens / seconds) if seconds > 0.0 else 0.0

    def owes_bare_step(self) -> bool:
        due = min(FIRST_BARE_STEPS * (self._num_bare + 1), RAREST_BARE_STEP)
        return self._num_drafted_since >= due

    def cost(self) -> StepCost:
        if self._shape is None or self._num_since_fit >= STEPS_PER_FIT:
            self._shape = self._fitted()
            self._num_since_fit = 0
        return self._shape.scaled(self._scale)

    def _fitted(self) -> StepCost:
        """Fit the line by least squares, drawn to the assumption by a ridge, and bend it."""
        usual = self._usual / self._scale
        assumed = TOKEN_SHARE * usual
        weight, _, seconds = self._bins[0]
        base = seconds / weight if weight > 0.0 else usual
        weights, sums, targets = self._bins[1:].T
        means = sums / np.maximum(weights, 1e-9)
        moments = np.array(
            [[weights.sum(), sums.sum()], [sums.sum(), float(sums @ means)]]
        ) + RIDGE * np.eye(2)
        sought = np.array([targets.sum() + RIDGE * base, float(targets @ means) + RIDGE * assumed])
        least = 0.1 * assumed
        token = max(float(np.linalg.solve(moments, sought)[1]), least)
        intercept = (sought[0] - moments[0, 1] * token) / moments[0, 0]
        # Until a bare step was seen, what drafting at all costs cannot be told from the rest.
        first = intercept - base if weight > 0.0 else 0.0
        beside_line = (targets - weights * (base + first) - token * sums) / (weights + LINE_STEPS)
        bins = -(-self._tokens // self._bin_width) - 1
        bent = first + token * self._tokens + beside_line[bins]
        rising = isotonic_regression(
            bent - least * self._tokens, weights=(weights + LINE_STEPS)[bins]
        )
        extra = np.maximum(rising.x, 0.0) + least * self._tokens
        return StepCost(base=float(base), extra=extra, token=token)
