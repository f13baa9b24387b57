"""Reservoirs: of every stream a fair sample of all that it ever taught, within a bound of bytes.

A memory of the newest segments follows the traffic and forgets; replaying a sample of the past
beside it keeps what was known (Vitter, *Random sampling with a reservoir*, 1985, algorithm R).
Every stream has its own, so that a loud one does not drive out a quiet one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256

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


class StreamReservoirs:
    """Keeps a sample of the segments of every stream.

    A segment's place in the sample depends on the seed, its stream and how many came before it, so
    the same segments in the same order leave the same sample.

    Args:
        max_bytes: Bound over all streams, shared equally among them, >= 1.
        seed: Of the draws.

    Attributes:
        num_bytes: Bytes kept now.
    """

    def __init__(self, max_bytes: int, *, seed: int) -> None:
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}, expected >= 1")
        self._max_bytes = max_bytes
        self._seed = seed
        self._stream_to_segments: dict[str, list[Segment]] = {}
        self._stream_to_seen: dict[str, int] = {}
        self.num_bytes = 0

    @property
    def segments(self) -> Sequence[Segment]:
        """All that is kept, stream by stream."""
        return [one for kept in self._stream_to_segments.values() for one in kept]

    def add(self, segment: Segment) -> None:
        """Let a segment into its stream's sample, or not; others leave to make room."""
        kept = self._stream_to_segments.setdefault(segment.stream, [])
        seen = self._stream_to_seen[segment.stream] = (
            self._stream_to_seen.get(segment.stream, 0) + 1
        )
        quota = self._max_bytes // len(self._stream_to_segments)
        size = num_bytes(segment)
        if size > quota:
            return
        used = sum(map(num_bytes, kept))
        rng = self._rng(segment.stream, seen)
        # Beyond the quota a newcomer enters with the chance that every earlier one still has.
        if used + size > quota and rng.random() >= len(kept) / seen:
            return
        for stream in self._stream_to_segments:
            self._shrink(stream, quota - (size if stream == segment.stream else 0), rng)
        kept.append(segment)
        self.num_bytes += size

    def forget_from(self, partition_to_offset: Mapping[int, int]) -> None:
        """Forget the segments at or beyond an offset; all those of partitions without one."""
        for stream, kept in self._stream_to_segments.items():
            self._stream_to_segments[stream] = [
                one for one in kept if one.offset < partition_to_offset.get(one.partition, 0)
            ]
        self.num_bytes = sum(map(num_bytes, self.segments))

    def _shrink(self, stream: str, quota: int, rng: np.random.Generator) -> None:
        """Drop segments at random until a stream keeps to its quota."""
        kept = self._stream_to_segments[stream]
        used = sum(map(num_bytes, kept))
        while used > quota:
            gone = num_bytes(kept.pop(int(rng.integers(len(kept)))))
            used -= gone
            self.num_bytes -= gone

    def _rng(self, stream: str, seen: int) -> np.random.Generator:
        digest = int.from_bytes(sha256(stream.encode()).digest()[:8])
        return np.random.default_rng([self._seed, digest, seen])
