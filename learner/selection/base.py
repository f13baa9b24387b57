"""What all compiled policies share: state in two arrays, and the operations on it.

A policy's state is a ``table`` (rows, N), one value per drafter and row, and ``numbers`` (M,):
its parameters first, then counters. Row 0 holds the probabilities to be played next, row 1 the
prior. A kernel ``learn(table, numbers, losses)`` changes both in place. A policy is that kernel,
the meaning of its rows and numbers, and the class that names them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learner.selection import kernels
from learner.selection.compiled import LEARN_ROUND, Kernel, pointer
from learner.selection.policy import PolicyState, RoundFeedback, checked_losses, checked_prior

PROBABILITIES, PRIOR = 0, 1

Scope = Literal["request", "stream", "both"]
Choice = Literal["sample", "argmax", "sticky"]
Loss = Literal["length", "first", "hybrid"]
Objective = Literal["tokens", "seconds"]


class Row(Enum):
    """What a row of the table holds: it decides how a newcomer enters."""

    DISTRIBUTION = "distribution"
    """Sums to 1; a newcomer gets its share of it."""
    LOSS = "loss"
    """Cumulative loss; a newcomer gets what the others lost together."""
    REGRET = "regret"
    """Summed regret; a newcomer begins at 0, as if it had slept. If the one of the largest regret
    leaves, the others' rise by what the largest fell: they are judged as if it had not been
    there, else they would stay below 0 for as long as it had led."""
    SUM = "sum"
    """Other sums of its own; a newcomer begins at 0."""


class CompiledPolicy:
    """A policy whose learning is a compiled kernel; subclasses name rows, numbers and defaults.

    Attributes:
        name: Its name in settings, events and reports.
        version: Version of the layout of its state.
        kernel, round_kernel: How it learns, as ``compiled`` describes.
        rows: Meaning of every row of the table.
        parameters: Name and default of each parameter, stored first in ``numbers``.
        num_counters: Further numbers, 0 at the start.
        posteriors: Rows that are beliefs about who is best now; empty = its state is not made of
            them, so it cannot move towards what others believe.
        scope, choice, loss, objective: What it uses unless a specification says otherwise.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    kernel: ClassVar[Kernel] = staticmethod(kernels.learn_nothing)
    round_kernel: ClassVar[Kernel] = staticmethod(kernels.learn_nothing_of_rounds)
    rows: ClassVar[tuple[Row, ...]] = (Row.DISTRIBUTION, Row.DISTRIBUTION)
    parameters: ClassVar[Mapping[str, float]] = {}
    num_counters: ClassVar[int] = 0
    posteriors: ClassVar[tuple[int, ...]] = ()
    scope: ClassVar[Scope] = "request"
    choice: ClassVar[Choice] = "sample"
    loss: ClassVar[Loss] = "length"
    objective: ClassVar[Objective] = "tokens"

    def __init__(
        self, num_drafters: int, *, prior: ArrayLike | None = None, **parameters: float
    ) -> None:
        """Start afresh.

        Raises:
            ValueError: If the prior is no distribution or a parameter unknown or out of range.
        """
        unknown = sorted(set(parameters) - set(self.parameters))
        if unknown:
            known = ", ".join(self.parameters) or "none"
            raise ValueError(
                f"policy {self.name!r} has no parameter {unknown[0]!r}, known: {known}"
            )
        values = {**self.parameters, **parameters}
        for name, value in values.items():
            self.check_parameter(name, value)
        start = checked_prior(prior, num_drafters)
        self.numbers = np.array([*values.values(), *([0.0] * self.num_counters)])
        self.table = np.zeros((len(self.rows), num_drafters))
        for row, kind in zip(self.table, self.rows, strict=True):
            if kind is Row.DISTRIBUTION:
                row[:] = start

    @classmethod
    def check_parameter(cls, name: str, value: float) -> None:
        """Refuse a parameter's value; subclasses know their ranges.

        Raises:
            ValueError: If the value is out of range.
        """
        if not 0.0 <= value < math.inf:
            raise ValueError(f"policy {cls.name!r}: {name}={value}, expected >= 0 and finite")

    @property
    def num_drafters(self) -> int:
        """Number of drafters N."""
        return int(self.table.shape[1])

    @property
    def learns_rounds(self) -> bool:
        """Whether it is a bandit: fed by rounds, blind to windows."""
        return self.kernel is kernels.learn_nothing and self.round_kernel is not (
            kernels.learn_nothing_of_rounds
        )

    def probabilities(self) -> NDArray[np.float64]:
        """Return the probabilities to be played next, shape (N,)."""
        return np.array(self.table[PROBABILITIES])

    def learn(self, losses: NDArray[np.floating[Any]]) -> None:
        """Learn one window, shape (N,)."""
        self.learn_windows(np.asarray(losses)[None])

    def learn_windows(self, losses: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
        """Learn windows in order, shape (W, N), and return the probabilities after each."""
        return self.follow(checked_losses(losses, self.num_drafters))

    def follow(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Learn windows as ``learn_windows``: contiguous losses that were checked when measured."""
        after = np.empty_like(values)
        kernels.follow(self.kernel, self.table, self.numbers, values, after)
        return after

    def learn_round(self, feedback: RoundFeedback) -> None:
        """Learn one round, if this policy is a bandit.

        Raises:
            ValueError: If the drafter is not of the pool.
        """
        if not 0 <= feedback.drafter_index < self.num_drafters:
            raise ValueError(
                f"drafter_index={feedback.drafter_index} outside 0..{self.num_drafters - 1}"
            )
        pointer(self.round_kernel, LEARN_ROUND)(
            self.table,
            self.numbers,
            feedback.drafter_index,
            feedback.selection_probability,
            feedback.length_loss,
            feedback.agreement_loss,
        )

    def move_towards(self, belief: NDArray[np.float64], share: float) -> None:
        """Give ``share`` of every posterior, in [0, 1], to ``belief``, (N,), sum 1; in place."""
        rows = list(self.posteriors)
        self.table[rows] = (1.0 - share) * self.table[rows] + share * belief

    def state(self) -> PolicyState:
        """Return table and numbers."""
        arrays = {"table": self.table.copy(), "numbers": self.numbers.copy()}
        return PolicyState(name=self.name, version=self.version, arrays=arrays)

    @classmethod
    def from_state(cls, state: PolicyState) -> Self:
        """Continue from ``state``.

        Raises:
            ValueError: If the state is another policy's, of another version or of another shape.
        """
        if (state.name, state.version) != (cls.name, cls.version):
            raise ValueError(
                f"state of {state.name!r} version {state.version}, expected {cls.name!r} "
                f"version {cls.version}"
            )
        table, numbers = state.arrays["table"], state.arrays["numbers"]
        num_numbers = len(cls.parameters) + cls.num_counters
        if table.shape[:-1] != (len(cls.rows),) or numbers.shape != (num_numbers,):
            raise ValueError(
                f"state of {cls.name!r} has a table of shape {table.shape} and numbers of shape "
                f"{numbers.shape}, expected ({len(cls.rows)}, N) and ({num_numbers},)"
            )
        policy = cls.__new__(cls)
        policy.table = np.array(table, dtype=np.float64, order="C")
        policy.numbers = np.array(numbers, dtype=np.float64)
        return policy

    def with_drafters(self, places: Sequence[int], *, share: float) -> Self:
        """Return the policy over another pool: some stay, some leave, some are new.

        Args:
            places: For each drafter of the new pool, where it stands in this one; -1 = new.
            share: Mass that each newcomer gets of every distribution, in (0, 1); what is left is
                shared by those who stay as before. A newcomer has no history: it is weighed as if
                it had slept (Freund, Schapire, Singer and Warmuth, 1997).

        Raises:
            ValueError: If the new pool is empty.
        """
        new_to_old = _checked_places(places, self.num_drafters)
        if not 0.0 < share < 1.0:
            raise ValueError(f"share={share} outside (0, 1)")
        is_new = new_to_old < 0
        kept = new_to_old[~is_new]
        policy = type(self).__new__(type(self))
        policy.numbers = self.numbers.copy()
        policy.table = np.zeros((len(self.table), len(new_to_old)))
        for new, old, kind in zip(policy.table, self.table, self.rows, strict=True):
            new[~is_new] = old[kept]
            if not len(kept):
                new[:] = 1.0 / len(new) if kind is Row.DISTRIBUTION else 0.0
                continue
            prior = self.table[PRIOR, kept] / self.table[PRIOR, kept].sum()
            if kind is Row.DISTRIBUTION:
                _admit(new, is_new, share, prior)
            elif kind is Row.REGRET:
                new[~is_new] += old.max() - old[kept].max()
            elif kind is Row.LOSS:
                new[is_new] = self._newcomers_loss(old[kept], prior, len(new_to_old))
        policy._weigh()
        return policy

    def _newcomers_loss(
        self, losses: NDArray[np.float64], prior: NDArray[np.float64], num_drafters: int
    ) -> float:
        """Return the cumulative loss with which a newcomer enters.

        Args:
            losses: Of those who stay, shape (S,), S >= 1.
            prior: Theirs, shape (S,), sum 1.
            num_drafters: Size of the new pool.
        """
        return float(losses.min())

    def _weigh(self) -> None:
        """Form the probabilities anew from the other rows, where they follow from those alone."""


def _checked_places(places: Sequence[int], num_drafters: int) -> NDArray[np.int64]:
    """Return places as an array, or refuse an empty pool, a wrong place or one named twice."""
    if not len(places):
        raise ValueError("the new pool has no drafter, expected at least 1")
    kept = [place for place in places if place >= 0]
    if max(kept, default=-1) >= num_drafters or len(set(kept)) < len(kept):
        raise ValueError(f"places={list(places)}, expected each of 0..{num_drafters - 1} once")
    return np.asarray(places, dtype=np.int64)


def _admit(
    row: NDArray[np.float64],
    is_new: NDArray[np.bool_],
    share: float,
    prior: NDArray[np.float64],
) -> None:
    """Give newcomers their share of a distribution and the others the rest, in place.

    Args:
        row: Masses (N,); 0 for newcomers.
        is_new: Who is new, (N,), not all.
        share: Mass of each newcomer, at most an equal one.
        prior: Of the others, sum 1: how they share if their mass has left with another.
    """
    new_share = min(share, 1.0 / len(row))
    rest = 1.0 - new_share * int(is_new.sum())
    kept = row[~is_new]
    row[~is_new] = rest * (kept / kept.sum() if kept.sum() > 0.0 else prior)
    row[is_new] = new_share
