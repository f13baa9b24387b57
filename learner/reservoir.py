"""Reservoirs: of every stream a fair sample of all that it ever taught, within a bound of bytes.

A memory of the newest segments follows the traffic and forgets; replaying a sample of the past
beside it keeps what was known (Vitter, *Random sampling with a reservoir*, 1985, algorithm R).
Every stream has its own, so that a loud one does not drive out a quiet one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from learner.examples import Segment


def num_bytes(segment: Segment) -> int:
    """Return what a segment takes in memory, in bytes."""
    arrays = (
        segment.hidden,
        segment.token_ids,
        segment.top_token_ids,
        segment.top_probabilities,
    )
    return sum(array.nbytes for array in arrays)


MAX_STREAMS = 256
"""Streams that are sampled at a time; beyond, the least recently heard is forgotten."""


@dataclass(slots=True)
class _Kept:
    """A segment in the sample; None = it was there before a restart and is still to be read."""

    partition: int
    offset: int
    num_bytes: int
    segment: Segment | None
    first_offset: int

    def state(self) -> list[int]:
        """Return it as JSON; where reading must begin only if that is before its offset."""
        state = [self.partition, self.offset, self.num_bytes]
        return state if self.first_offset == self.offset else [*state, self.first_offset]

    @classmethod
    def of_state(cls, state: Sequence[int]) -> _Kept:
        """Return what ``state`` described, its segment still to be read."""
        partition, offset, size = state[:3]
        return cls(partition, offset, size, None, state[3] if len(state) > 3 else offset)


@dataclass(slots=True)
class _Sample:
    """The sample of one stream, and of how many segments."""

    num_seen: int = 0
    kept: list[_Kept] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(one.num_bytes for one in self.kept)


class StreamReservoirs:
    """Keeps a sample of the segments of every stream.

    A segment's place in the sample depends on the seed, its stream and how many came before it, so
    the same segments in the same order leave the same sample. What the sample is *of* is a state
    that travels with the weights; its segments are read again after a restart.

    Args:
        max_bytes: Bound over all streams, shared equally among them, >= 1.
        seed: Of the draws.
    """

    def __init__(self, max_bytes: int, *, seed: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}, expected >= 1")
        self._max_bytes = max_bytes
        self._seed = seed
        self._stream_to_sample: dict[str, _Sample] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes kept now."""
        return sum(sample.num_bytes for sample in self._stream_to_sample.values())

    @property
    def segments(self) -> Sequence[Segment]:
        """All that is kept, stream by stream."""
        return [one.segment for one in self._all() if one.segment is not None]

    def add(self, segment: Segment) -> None:
        """Let a segment into its stream's sample, or not; others leave to make room."""
        sample = self._sample(segment.stream)
        sample.num_seen += 1
        quota = self._max_bytes // len(self._stream_to_sample)
        size = num_bytes(segment)
        if size > quota:
            return
        rng = self._rng(segment.stream, sample.num_seen)
        # Beyond the quota a newcomer enters with the chance that every earlier one still has.
        is_full = sample.num_bytes + size > quota
        if is_full and rng.random() >= len(sample.kept) / sample.num_seen:
            return
        for stream, other in self._stream_to_sample.items():
            _shrink(other, quota - (size if stream == segment.stream else 0), rng)
        sample.kept.append(
            _Kept(segment.partition, segment.offset, size, segment, segment.first_offset)
        )

    def restore(self, segment: Segment) -> None:
        """Put a segment that was read again back into its place; pass over others."""
        for one in self._stream_to_sample.get(segment.stream, _Sample()).kept:
            if (one.partition, one.offset) == (segment.partition, segment.offset):
                one.segment = segment

    def forget_from(self, partition_to_offset: Mapping[int, int]) -> None:
        """Forget the segments at or beyond an offset; all those of partitions without one."""
        for sample in self._stream_to_sample.values():
            sample.kept = [
                one for one in sample.kept if one.offset < partition_to_offset.get(one.partition, 0)
            ]

    def first_offsets(self) -> dict[int, int]:
        """Return per partition where reading must begin to have every segment again."""
        offsets: dict[int, int] = {}
        for one in self._all():
            known = offsets.get(one.partition, one.first_offset)
            offsets[one.partition] = min(known, one.first_offset)
        return offsets

    def state(self) -> dict[str, Any]:
        """Return which segments are kept, as JSON; the least recently heard stream first."""
        return {
            stream: {
                "num_seen": sample.num_seen,
                "kept": [one.state() for one in sample.kept],
            }
            for stream, sample in self._stream_to_sample.items()
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; ``restore`` then takes the segments that are read again."""
        self._stream_to_sample = {
            stream: _Sample(
                one["num_seen"],
                [_Kept.of_state(kept) for kept in one["kept"]],
            )
            for stream, one in state.items()
        }

    def _all(self) -> list[_Kept]:
        return [one for sample in self._stream_to_sample.values() for one in sample.kept]

    def _sample(self, stream: str) -> _Sample:
        sample = self._stream_to_sample.pop(stream, None) or _Sample()
        self._stream_to_sample[stream] = sample
        if len(self._stream_to_sample) > MAX_STREAMS:
            del self._stream_to_sample[next(iter(self._stream_to_sample))]
        return sample

    def _rng(self, stream: str, seen: int) -> np.random.Generator:
        digest = int.from_bytes(sha256(stream.encode()).digest()[:8])
        return np.random.default_rng([self._seed, digest, seen])


def _shrink(sample: _Sample, quota: int, rng: np.random.Generator) -> None:
    """Drop segments at random until a stream keeps to its quota."""
    used = sample.num_bytes
    while used > quota:
        used -= sample.kept.pop(int(rng.integers(len(sample.kept)))).num_bytes
