"""Measured seconds of drafting, verifying and scoring, as decayed ratios of sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.feedback import aligned
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

        Args:
            event: Its rounds are measured; orphans' seconds are left out.
            positions: As ``learner.feedback.drafter_positions``.
            decay: Factor on all that was known before, in (0, 1].
        """
        measured = _measured(event, positions, len(self.draft_seconds))
        sums = {}
        for name, before in self.arrays().items():
            after = np.zeros(max(len(before), len(measured[name])))
            after[: len(before)] = decay * before
            after[: len(measured[name])] += measured[name]
            sums[name] = after
        return CostSums(**sums)

    def model(self) -> CostModel:
        """Return mean seconds; NaN = never measured."""
        return CostModel(
            draft_seconds=_ratio(self.draft_seconds, self.num_draft_tokens),
            score_seconds=_ratio(self.score_seconds, self.num_scored_windows),
            verify_seconds=_ratio(self.verify_seconds, self.num_verifications),
        )


_PER_DRAFTER = ("draft_seconds", "num_draft_tokens", "score_seconds", "num_scored_windows")


def _no_verifications(size: int) -> dict[str, NDArray[np.float64]]:
    return {"verify_seconds": np.zeros(size), "num_verifications": np.zeros(size)}


def _measured(
    event: VerificationEvent, positions: NDArray[np.int64], num_drafters: int
) -> dict[str, NDArray[np.float64]]:
    """Return the sums of one event, per-drafter ones in the learner's order.

    Workers time the scoring of all drafters together, so every window that was scored for some
    drafter carries the same share. The first pass of a request reads its prompt: it would make
    decoding without a draft look as expensive as the prompt is long, and is left out.
    """
    rounds, windows, size = event.rounds, event.windows, len(event.drafters)
    drafted = rounds.num_draft_tokens.astype(np.int64)
    has_drafter = rounds.drafter_index >= 0
    drafter = rounds.drafter_index[has_drafter].astype(np.int64)
    num_scored = (~np.isnan(windows.acceptance_probability)).any(axis=1).sum(axis=0)
    share_seconds = float(rounds.score_seconds.sum(dtype=np.float64)) / max(num_scored.sum(), 1)
    per_drafter = {
        "draft_seconds": _sums(drafter, rounds.draft_seconds[has_drafter], size),
        "num_draft_tokens": _sums(drafter, drafted[has_drafter], size),
        "score_seconds": num_scored * np.float64(share_seconds),
        "num_scored_windows": num_scored.astype(np.float64),
    }
    levels = event.num_speculative_tokens + 1
    is_decoding = rounds.first_position > event.num_prompt_tokens
    decoded = drafted[is_decoding]
    return {
        **{
            name: aligned(values, positions, num_drafters, absent=0.0)
            for name, values in per_drafter.items()
        },
        "verify_seconds": _sums(decoded, rounds.verify_seconds[is_decoding], levels),
        "num_verifications": _sums(decoded, np.ones(len(decoded)), levels),
    }


def _sums(index: NDArray[np.int64], values: NDArray[Any], size: int) -> NDArray[np.float64]:
    """Add up values by index, shape (size,)."""
    return np.bincount(index, values, size).astype(np.float64)


def _ratio(seconds: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    is_known = counts > FORGOTTEN_COUNT
    return np.where(is_known, seconds / np.where(is_known, counts, 1.0), np.nan)
