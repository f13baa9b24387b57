"""Training examples: what an event teaches a drafter, and the memory they are drawn from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

NUM_SPREAD = 32
"""Windows of a segment that stand for all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """B examples of K levels; level k is fed one token and is to predict the next.

    Attributes:
        hidden: float32 (B, H), the target's state behind the first fed token.
        fed_token_ids: int64 (B, K).
        label_token_ids: int64 (B, K); -1 where the level's label was not verified.
        top_token_ids: int64 (B, K, C), the target's most probable tokens at the label's position.
        top_probabilities: float32 (B, K, C), their probabilities at temperature 1; 0 where the
            position was not verified or less was recorded. C is 0 if nothing was.
        context_hidden: float32 (B, N, H), the states that predicted the context's tokens; 0 where
            there is none.
        context_token_ids: int64 (B, N), the tokens before the first fed one, the oldest first; -1
            where the segment does not reach back so far. N is 0 unless asked for.
    """

    hidden: torch.Tensor
    fed_token_ids: torch.Tensor
    label_token_ids: torch.Tensor
    top_token_ids: torch.Tensor
    top_probabilities: torch.Tensor
    context_hidden: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, 0))
    context_token_ids: torch.Tensor = field(
        default_factory=lambda: torch.empty((0, 0), dtype=torch.int64)
    )

    def to(self, device: torch.device) -> TrainingBatch:
        """Return the same examples on a device."""
        return TrainingBatch(
            **{one.name: getattr(self, one.name).to(device) for one in fields(self)}
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Training material of one event, and where it was read.

    Attributes:
        hidden: float32 (P, H), the state that predicted each token.
        token_ids: int64 (P,).
        top_token_ids: int64 (P, C), the target's most probable tokens at each position.
        top_probabilities: float32 (P, C), their probabilities at temperature 1.
        stream: Of the event.
        read_from: Offset from which events must be read to have this segment again; that of the
            event, unless its states were computed from the whole request. None = ``offset``.
        state_seconds: What a trainer's share of having its states took.
    """

    partition: int
    offset: int
    hidden: NDArray[np.float32]
    token_ids: NDArray[np.int64]
    top_token_ids: NDArray[np.int64]
    top_probabilities: NDArray[np.float32]
    stream: str = ""
    read_from: int | None = None
    state_seconds: float = 0.0

    @property
    def first_offset(self) -> int:
        """Offset from which events must be read to have this segment again."""
        return self.offset if self.read_from is None else self.read_from

    @property
    def num_examples(self) -> int:
        """Windows that can be trained on: every position but the first starts one."""
        return max(len(self.token_ids) - 1, 0)


class Past(Protocol):
    """A sample of what a memory forgets."""

    @property
    def segments(self) -> Sequence[Segment]:
        """What is kept."""

    def add(self, segment: Segment) -> None:
        """Let a segment in, or not."""

    def restore(self, segment: Segment) -> None:
        """Take back a segment that was in before a restart; pass over others."""

    def forget_from(self, partition_to_offset: Mapping[int, int]) -> None:
        """Forget the segments at or beyond an offset; all those of partitions without one."""

    def first_offsets(self) -> dict[int, int]:
        """Return per partition where reading must begin to have every segment again."""


class ExampleMemory:
    """The newest segments, bounded by their positions, and perhaps a sample of the past.

    Args:
        max_positions: Bound, >= 1; the newest segment is always kept.
        past: Takes in every segment; None = what is forgotten is gone.
        past_share: Share of a draw that comes from the past, in [0, 1).
    """

    def __init__(
        self, max_positions: int, *, past: Past | None = None, past_share: float = 0.5
    ) -> None:
        self._max_positions = max_positions
        self._past = past
        self._past_share = past_share
        self._segments: deque[Segment] = deque()
        self._num_positions = 0

    def add(self, segment: Segment, *, is_new: bool = True) -> None:
        """Add the newest segment and forget the oldest beyond the bound.

        Args:
            segment: In order of offset within its partition.
            is_new: Whether it is taken for the first time; else the past knows whether it had it.
        """
        if self._past is not None and is_new:
            self._past.add(segment)
        elif self._past is not None:
            self._past.restore(segment)
        self._segments.append(segment)
        self._num_positions += len(segment.token_ids)
        while self._num_positions > self._max_positions and len(self._segments) > 1:
            self._num_positions -= len(self._segments.popleft().token_ids)

    def forget_from(self, partition_to_offset: Mapping[int, int]) -> None:
        """Forget the segments at or beyond an offset; all those of partitions without one."""
        self._segments = deque(
            one for one in self._segments if one.offset < partition_to_offset.get(one.partition, 0)
        )
        self._num_positions = sum(len(one.token_ids) for one in self._segments)
        if self._past is not None:
            self._past.forget_from(partition_to_offset)

    def first_offsets(self) -> dict[int, int]:
        """Return per partition where reading must begin to have every segment again."""
        offsets = {} if self._past is None else self._past.first_offsets()
        for segment in self._segments:
            known = offsets.get(segment.partition, segment.first_offset)
            offsets[segment.partition] = min(known, segment.first_offset)
        return offsets

    def draw(
        self, size: int, num_levels: int, rng: np.random.Generator, *, num_context: int = 0
    ) -> TrainingBatch | None:
        """Draw at most ``size`` distinct examples, uniformly; None if there is none.

        Args:
            size: Most examples, >= 1.
            num_levels: K, >= 1.
            rng: Draws them.
            num_context: Tokens before the first fed one that each example comes with, >= 0.
        """
        past = [] if self._past is None else self._past.segments
        num_past = round(size * self._past_share) if past else 0
        recent, starts = _drawn(self._segments, size - num_past, rng)
        older, older_starts = _drawn(past, num_past, rng)
        if not recent and not older:
            return None
        starts = np.concatenate([starts, older_starts])
        return _batch([*recent, *older], starts, num_levels, num_context)


def spread_examples(
    segment: Segment, num_levels: int, *, num_context: int = 0
) -> TrainingBatch | None:
    """Return some windows, spread evenly over a segment; None if it has none.

    Args:
        segment: Of P positions, P - 1 windows.
        num_levels: K, >= 1.
        num_context: Tokens before the first fed one that each example comes with, >= 0.
    """
    found = segment.num_examples
    if not found:
        return None
    starts = np.linspace(1, found, min(NUM_SPREAD, found)).round().astype(np.int64)
    return _batch([segment] * len(starts), starts, num_levels, num_context)


def _drawn(
    segments: Sequence[Segment], size: int, rng: np.random.Generator
) -> tuple[list[Segment], NDArray[np.int64]]:
    """Draw at most ``size`` distinct windows; return the segment and the start of each."""
    ends = np.cumsum([segment.num_examples for segment in segments])
    if not size or not len(ends) or not ends[-1]:
        return [], np.empty(0, np.int64)
    chosen = rng.choice(ends[-1], size=min(size, int(ends[-1])), replace=False)
    which = np.searchsorted(ends, chosen, side="right")
    starts = chosen - np.where(which > 0, ends[which - 1], 0) + 1
    return [segments[i] for i in which], starts


def _batch(
    segments: Sequence[Segment], starts: NDArray[np.int64], levels: int, num_context: int
) -> TrainingBatch:
    """Gather windows that start at index ``starts[i]`` >= 1 of ``segments[i]``."""
    num_top = max(segment.top_token_ids.shape[1] for segment in segments)
    hidden = np.stack([s.hidden[start - 1] for s, start in zip(segments, starts, strict=True)])
    tokens = np.full((len(segments), levels + 1), -1, dtype=np.int64)
    top_tokens = np.zeros((len(segments), levels, num_top), dtype=np.int64)
    top_probabilities = np.zeros(top_tokens.shape, dtype=np.float32)
    context = np.zeros((len(segments), num_context, hidden.shape[1]), dtype=np.float32)
    context_tokens = np.full((len(segments), num_context), -1, dtype=np.int64)
    for row, (segment, start) in enumerate(zip(segments, starts, strict=True)):
        first = max(start - 1 - num_context, 0)
        before = num_context - (start - 1 - first)
        context[row, before:] = segment.hidden[first : start - 1]
        context_tokens[row, before:] = segment.token_ids[first : start - 1]
        found = segment.token_ids[start - 1 : start + levels]
        tokens[row, : len(found)] = found
        place = (row, slice(len(found) - 1), slice(segment.top_token_ids.shape[1]))
        top_tokens[place] = segment.top_token_ids[start : start + levels]
        top_probabilities[place] = segment.top_probabilities[start : start + levels]
    return TrainingBatch(
        hidden=torch.from_numpy(hidden),
        fed_token_ids=torch.from_numpy(np.maximum(tokens[:, :-1], 0)),
        label_token_ids=torch.from_numpy(tokens[:, 1:].copy()),
        top_token_ids=torch.from_numpy(top_tokens),
        top_probabilities=torch.from_numpy(top_probabilities),
        context_hidden=torch.from_numpy(context),
        context_token_ids=torch.from_numpy(context_tokens),
    )
