"""What a worker keeps per stream, bounded: there may be any number of streams."""

from __future__ import annotations

from typing import Generic, TypeVar

MAX_STREAMS = 10_000
"""Streams that a worker remembers; who comes back after that starts like a new one."""

T = TypeVar("T")


class RecentStreams(Generic[T]):
    """One value per stream, of those used last.

    Args:
        most: Streams kept, >= 1; beyond, the least recently used is forgotten.
    """

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._most = most
        self._stream_to_value: dict[str, T] = {}

    def __len__(self) -> int:
        return len(self._stream_to_value)

    def get(self, stream: str) -> T | None:
        """Return a stream's value; None if there is none, or none any more."""
        value = self._stream_to_value.pop(stream, None)
        if value is not None:
            self._stream_to_value[stream] = value
        return value

    def put(self, stream: str, value: T) -> None:
        """Keep a stream's value in place of the one before."""
        self._stream_to_value.pop(stream, None)
        self._stream_to_value[stream] = value
        if len(self._stream_to_value) > self._most:
            del self._stream_to_value[next(iter(self._stream_to_value))]
