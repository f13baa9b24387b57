"""Measured seconds of drafting, verifying and scoring, as decayed ratios of sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from learner.event_kernels import add_costs
from schemas.events import CostModel, VerificationEvent

FORGOTTEN_COUNT = 1e-9
"""A decayed count below this says nothing any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CostSums:
    """Decayed sums of seconds and of what they were spent on.

    Attributes:
        draft_seconds, num_draft_tokens: Per drafter, shape (N,).
        score_seconds, num_scored_windows: Per drafter, shape (N,).
        verify_seconds, num_verifications: By drafted tokens 0..K of the verification (one row more
            than that), shape (K + 1,), for the largest K seen.
    """

    draft_seconds: NDArray[np.float64]
    num_draft_tokens: NDArray[np.float64]
    score_seconds: NDArray[np.float64]
    num_scored_windows: NDArray[np.float64]
    verify_seconds: NDArray[np.float64]
    num_verifications: NDArray[np.float64]

    @classmethod
    def empty(cls) -> CostSums:
        """Return sums of no drafter and no draft."""
        return cls(**{name: np.zeros(0) for name in _PER_DRAFTER}, **_no_verifications(1))

    @property
    def num_speculative_tokens(self) -> int:
        """Largest K seen."""
        return len(self.verify_seconds) - 1

    def arrays(self) -> Mapping[str, NDArray[np.float64]]:
        """Return all sums by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def with_new(self, num_new: int) -> CostSums:
        """Return the sums with unmeasured drafters added at the end."""
        sums = dict(self.arrays())
        for name in _PER_DRAFTER:
            sums[name] = np.concatenate([sums[name], np.zeros(num_new)])
        return CostSums(**sums)

    def only(self, positions: Sequence[int]) -> CostSums:
        """Return the sums of the drafters at ``positions``."""
        sums = dict(self.arrays())
        for name in _PER_DRAFTER:
            sums[name] = sums[name][np.array(positions, dtype=np.int64)]
        return CostSums(**sums)

    def learned(
        self, event: VerificationEvent, positions: NDArray[np.int64], *, decay: float
    ) -> CostSums:
        """Return the sums after one event.

        Workers time the scoring of all drafters together, so every window that was scored for some
        drafter carries the same share. The first pass of a request reads its prompt: it would make
        decoding without a draft look as expensive as the prompt is long, and is left out.

        Args:
            event: Its rounds are measured; orphans' seconds are left out.
            positions: As ``learner.feedback.drafter_positions``.
            decay: Factor on all that was known before, in (0, 1].
        """
        rounds = event.rounds
        per_drafter = decay * np.array([getattr(self, name) for name in _PER_DRAFTER])
        levels = max(len(self.verify_seconds), event.num_speculative_tokens + 1)
        per_length = np.zeros((len(_PER_LENGTH), levels))
        per_length[0, : len(self.verify_seconds)] = decay * self.verify_seconds
        per_length[1, : len(self.verify_seconds)] = decay * self.num_verifications
        add_costs(
            np.ascontiguousarray(event.windows.acceptance_probability).view(np.uint16),
            positions,
            rounds.drafter_index,
            rounds.num_draft_tokens,
            rounds.draft_seconds,
            rounds.verify_seconds,
            rounds.first_position > event.num_prompt_tokens,
            float(rounds.score_seconds.sum(dtype=np.float64)),
            per_drafter,
            per_length,
        )
        return CostSums.of_rows(per_drafter, per_length)

    @classmethod
    def of_rows(cls, per_drafter: NDArray[np.float64], per_length: NDArray[np.float64]) -> CostSums:
        """Return the sums in the rows (4, N) and (2, K + 1), in the order of the attributes."""
        return cls(
            draft_seconds=per_drafter[0],
            num_draft_tokens=per_drafter[1],
            score_seconds=per_drafter[2],
            num_scored_windows=per_drafter[3],
            verify_seconds=per_length[0],
            num_verifications=per_length[1],
        )

    def model(self) -> CostModel:
        """Return mean seconds; NaN = never measured."""
        return CostModel(
            draft_seconds=_ratio(self.draft_seconds, self.num_draft_tokens),
            score_seconds=_ratio(self.score_seconds, self.num_scored_windows),
            verify_seconds=_ratio(self.verify_seconds, self.num_verifications),
        )


_PER_DRAFTER = ("draft_seconds", "num_draft_tokens", "score_seconds", "num_scored_windows")
_PER_LENGTH = ("verify_seconds", "num_verifications")


def _no_verifications(size: int) -> dict[str, NDArray[np.float64]]:
    return {name: np.zeros(size) for name in _PER_LENGTH}


def _ratio(seconds: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    is_known = counts > FORGOTTEN_COUNT
    return np.where(is_known, seconds / np.where(is_known, counts, 1.0), np.nan)
