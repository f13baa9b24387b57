"""A whole log in columns: what comparisons, regret and plots read.

Of a window only sums stay, and of a round a few numbers, so that millions of them fit. Axes: Q
requests, R rounds, C chunks of windows, N drafters (all that occur in the log).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.window_kernels import halves, measure_lengths
from replay.chunks import chunk_size, sum_chunks
from replay.requests import RequestTrace
from schemas.events import NO_DRAFTER

NO_WINDOW = -1
"""In ``RoundColumns.depth``: no window starts where the round starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionChange:
    """From ``token`` of the log on, ``stream`` was served with this version of a drafter."""

    token: int
    stream: str
    drafter_id: str
    weights_version: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowColumns:
    """The windows of a log, added up over chunks of consecutive windows of one request.

    Attributes:
        request: Index of the request, int32 (C,).
        token: Tokens that the log had emitted before the chunk's middle window, int64 (C,).
        num_scored: Windows on which each drafter was scored, int32 (C, N).
        exact_length: Their expected acceptance lengths added up, exact estimator, float64 (C, N).
        published_length: The same with the published estimator.
    """

    request: NDArray[np.int32]
    token: NDArray[np.int64]
    num_scored: NDArray[np.int32]
    exact_length: NDArray[np.float64]
    published_length: NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RoundColumns:
    """The rounds of a log, in order of requests and time, each of shape (R,).

    Attributes:
        request: Index of the request, int32.
        token: Tokens that the log had emitted before the round, int64.
        drafter: Index into ``Trace.drafter_ids``, or ``NO_DRAFTER``, int16.
        num_draft_tokens, num_accepted_tokens, num_emitted_tokens: As logged, int16.
        selection_probability: The played drafter's probability when selected, float32.
        seconds: Draft, verify and score seconds together, float32.
        depth: K of the window that starts at the round's first position, int16, or ``NO_WINDOW``.
        num_levels: Levels that this window has, int16; 0 without one.
        lengths: Expected acceptance length of every drafter in this window, exact estimator,
            float32 (R, N), in [1, K + 1]; NaN without window and where it was not scored.
    """

    request: NDArray[np.int32]
    token: NDArray[np.int64]
    drafter: NDArray[np.int16]
    num_draft_tokens: NDArray[np.int16]
    num_accepted_tokens: NDArray[np.int16]
    num_emitted_tokens: NDArray[np.int16]
    selection_probability: NDArray[np.float32]
    seconds: NDArray[np.float32]
    depth: NDArray[np.int16]
    num_levels: NDArray[np.int16]
    lengths: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """A whole log in columns; requests in order of completion, Q of them.

    Attributes:
        request_stream: Index into ``streams`` per request, int32 (Q,).
        request_is_complete: Per request, bool (Q,).
        num_windows: Windows of the log.
    """

    drafter_ids: tuple[str, ...]
    streams: tuple[str, ...]
    request_stream: NDArray[np.int32]
    request_is_complete: NDArray[np.bool_]
    policy_names: tuple[str, ...]
    num_windows: int
    windows: WindowColumns
    rounds: RoundColumns
    version_changes: tuple[VersionChange, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens emitted by all rounds."""
        return int(self.rounds.num_emitted_tokens.sum(dtype=np.int64))


def build_trace(requests: Iterable[RequestTrace]) -> Trace:
    """Lay out the requests of a log in columns, reading each once."""
    builder = TraceBuilder()
    for request in requests:
        builder.add(request)
    return builder.build()


class TraceBuilder:
    """Collects requests one by one and lays them out in columns at the end.

    Attributes:
        drafter_to_index: Drafters in order of appearance.
    """

    def __init__(self) -> None:
        self.drafter_to_index: dict[str, int] = {}
        self._num_tokens = 0
        self._num_windows = 0
        self._stream_to_index: dict[str, int] = {}
        self._policy_names: dict[str, None] = {}
        self._request_stream: list[int] = []
        self._request_is_complete: list[bool] = []
        self._rounds = _Parts(ROUND_DTYPES, ROUND_PER_DRAFTER)
        self._windows = _Parts(WINDOW_DTYPES, WINDOW_PER_DRAFTER)
        self._newest: dict[tuple[str, str], int] = {}
        self._changes: list[VersionChange] = []

    def add(self, request: RequestTrace) -> NDArray[np.int64]:
        """Reduce one request, keep what comparisons need, and return its drafters' indices."""
        index, streams = self.drafter_to_index, self._stream_to_index
        place = np.array([index.setdefault(i, len(index)) for i in request.drafter_ids], np.int64)
        windows = request.windows
        exact, published = np.empty((2, windows.start.size, len(place)))
        measure_lengths(
            halves(windows.acceptance_probability),
            halves(windows.realised_acceptance),
            windows.num_levels,
            exact,
            published,
        )
        self._note_versions(request)
        self._rounds.add(self._round_columns(request, place, exact), place)
        self._windows.add(self._window_columns(request, exact, published), place)
        self._request_stream.append(streams.setdefault(request.stream, len(streams)))
        self._request_is_complete.append(request.is_complete)
        self._policy_names.setdefault(request.policy_name)
        self._num_windows += windows.start.size
        self._num_tokens += request.num_tokens
        return place

    def build(self) -> Trace:
        """Lay out everything that was added; the builder is empty afterwards."""
        num_drafters = len(self.drafter_to_index)
        return Trace(
            drafter_ids=tuple(self.drafter_to_index),
            streams=tuple(self._stream_to_index),
            request_stream=np.array(self._request_stream, dtype=np.int32),
            request_is_complete=np.array(self._request_is_complete, dtype=np.bool_),
            policy_names=tuple(self._policy_names),
            num_windows=self._num_windows,
            windows=WindowColumns(**self._windows.joined(num_drafters)),
            rounds=RoundColumns(**self._rounds.joined(num_drafters)),
            version_changes=tuple(self._changes),
        )

    def _round_columns(
        self, request: RequestTrace, place: NDArray[np.int64], exact: NDArray[np.float64]
    ) -> dict[str, NDArray[Any]]:
        rounds, windows = request.rounds, request.windows
        emitted = rounds.num_emitted_tokens
        at = np.searchsorted(windows.start, rounds.first_position)
        found = np.append(windows.start, -1)[at] == rounds.first_position
        at, lengths = at[found], np.full((emitted.size, len(place)), np.nan, dtype=np.float32)
        depth = np.full(emitted.size, NO_WINDOW, dtype=np.int16)
        num_levels = np.zeros(emitted.size, dtype=np.int16)
        lengths[found] = exact[at]
        depth[found] = request.window_num_speculative_tokens[at]
        num_levels[found] = windows.num_levels[at]
        return {
            "request": np.full(emitted.size, len(self._request_stream)),
            "token": self._num_tokens + np.cumsum(emitted, dtype=np.int64) - emitted,
            # NO_DRAFTER is -1, so an extra last element of the table keeps it as it is.
            "drafter": np.append(place, NO_DRAFTER)[rounds.drafter_index],
            "num_draft_tokens": rounds.num_draft_tokens,
            "num_accepted_tokens": rounds.num_accepted_tokens,
            "num_emitted_tokens": emitted,
            "selection_probability": rounds.selection_probability,
            "seconds": rounds.draft_seconds + rounds.verify_seconds + rounds.score_seconds,
            "depth": depth,
            "num_levels": num_levels,
            "lengths": lengths,
        }

    def _window_columns(
        self,
        request: RequestTrace,
        exact: NDArray[np.float64],
        published: NDArray[np.float64],
    ) -> dict[str, NDArray[Any]]:
        size = chunk_size(self._num_windows)
        num_chunks = -(-len(exact) // size)
        shape = (num_chunks, exact.shape[1])
        num_scored, sums = np.zeros(shape, dtype=np.int32), np.zeros((2, *shape))
        sum_chunks(exact, published, size, num_scored, sums[0], sums[1])
        middle = np.minimum(np.arange(num_chunks) * size + size // 2, len(exact) - 1)
        into_request = request.windows.start[middle].astype(np.int64) - request.first_position
        return {
            "request": np.full(num_chunks, len(self._request_stream)),
            "token": self._num_tokens + np.maximum(into_request, 0),
            "num_scored": num_scored,
            "exact_length": sums[0],
            "published_length": sums[1],
        }

    def _note_versions(self, request: RequestTrace) -> None:
        """Note versions newer than any seen in the stream; late old requests are no change."""
        newest = [self._newest.get((request.stream, one), -1) for one in request.drafter_ids]
        if not (request.segment_versions > newest).any():
            return
        for versions, token in zip(request.segment_versions, _segment_tokens(request), strict=True):
            for drafter_id, version in zip(request.drafter_ids, versions, strict=True):
                key = (request.stream, drafter_id)
                if version > self._newest.get(key, -1):
                    self._newest[key] = int(version)
                    self._changes.append(
                        VersionChange(
                            token=self._num_tokens + token,
                            stream=request.stream,
                            drafter_id=drafter_id,
                            weights_version=int(version),
                        )
                    )


def _segment_tokens(request: RequestTrace) -> list[int]:
    """Return the tokens that the request had emitted when each segment began, length G."""
    num_segments = request.segment_versions.shape[0]
    emitted = np.bincount(
        request.round_segment,
        weights=request.rounds.num_emitted_tokens,
        minlength=num_segments,
    ).astype(np.int64)
    return [int(before) for before in np.cumsum(emitted) - emitted]


class _Parts:
    """Columns in parts, one part per request; those per drafter follow the log's drafters."""

    def __init__(self, dtypes: dict[str, Any], absent: dict[str, Any]) -> None:
        self._dtypes = dtypes
        self._absent = absent
        self._columns: dict[str, list[NDArray[Any]]] = {name: [] for name in dtypes}
        self._places: list[NDArray[np.int64]] = []

    def add(self, columns: dict[str, NDArray[Any]], place: NDArray[np.int64]) -> None:
        for name, values in columns.items():
            self._columns[name].append(values.astype(self._dtypes[name], copy=False))
        self._places.append(place)

    def joined(self, num_drafters: int) -> dict[str, NDArray[Any]]:
        """Concatenate column by column, freeing the parts on the way."""
        return {name: self._joined(name, num_drafters) for name in self._dtypes}

    def _joined(self, name: str, num_drafters: int) -> NDArray[Any]:
        parts = self._columns.pop(name)
        total = sum(len(part) for part in parts)
        if name not in self._absent:
            return np.concatenate([np.empty(0, dtype=self._dtypes[name]), *parts])
        joined = np.full((total, num_drafters), self._absent[name], dtype=self._dtypes[name])
        row = 0
        for place, part in zip(self._places, parts, strict=True):
            joined[row : row + len(part), place] = part
            row += len(part)
        return joined


WINDOW_DTYPES: dict[str, Any] = {
    "request": np.int32,
    "token": np.int64,
    "num_scored": np.int32,
    "exact_length": np.float64,
    "published_length": np.float64,
}
WINDOW_PER_DRAFTER: dict[str, Any] = {
    "num_scored": 0,
    "exact_length": 0.0,
    "published_length": 0.0,
}
ROUND_DTYPES: dict[str, Any] = {
    "request": np.int32,
    "token": np.int64,
    "drafter": np.int16,
    "num_draft_tokens": np.int16,
    "num_accepted_tokens": np.int16,
    "num_emitted_tokens": np.int16,
    "selection_probability": np.float32,
    "seconds": np.float32,
    "depth": np.int16,
    "num_levels": np.int16,
    "lengths": np.float32,
}
ROUND_PER_DRAFTER: dict[str, Any] = {"lengths": np.nan}
