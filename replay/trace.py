"""A whole log in columns: what comparisons, regret and plots read.

Axes: Q requests, R rounds, W windows, N drafters (all that occur in the log).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.measures import Estimator, expected_acceptance_length
from replay.requests import RequestTrace
from schemas.events import NO_DRAFTER

NO_WINDOW = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionChange:
    """From ``token`` of the log on, ``stream`` was served with this version of a drafter."""

    token: int
    stream: str
    drafter_id: str
    weights_version: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowColumns:
    """The windows of a log, reduced to what comparisons need.

    Attributes:
        request: Index of the request, int32 (W,).
        token: Tokens that the log had emitted before the window's start, int64 (W,).
        num_levels: Levels that exist, int16 (W,).
        num_speculative_tokens: K of the window's segment, int16 (W,).
        exact_length: Expected acceptance length, exact estimator, float32 (W, N), in [1, K + 1];
            NaN where the drafter was not scored.
        published_length: The same with the published estimator.
    """

    request: NDArray[np.int32]
    token: NDArray[np.int64]
    num_levels: NDArray[np.int16]
    num_speculative_tokens: NDArray[np.int16]
    exact_length: NDArray[np.float32]
    published_length: NDArray[np.float32]


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
        window: Index of the window that starts at the round's first position, int64, or
            ``NO_WINDOW``.
    """

    request: NDArray[np.int32]
    token: NDArray[np.int64]
    drafter: NDArray[np.int16]
    num_draft_tokens: NDArray[np.int16]
    num_accepted_tokens: NDArray[np.int16]
    num_emitted_tokens: NDArray[np.int16]
    selection_probability: NDArray[np.float32]
    seconds: NDArray[np.float32]
    window: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """A whole log in columns; requests in order of completion, Q of them.

    Attributes:
        request_stream: Index into ``streams`` per request, int32 (Q,).
        request_is_complete: Per request, bool (Q,).
    """

    drafter_ids: tuple[str, ...]
    streams: tuple[str, ...]
    request_ids: tuple[str, ...]
    request_stream: NDArray[np.int32]
    request_is_complete: NDArray[np.bool_]
    policy_names: tuple[str, ...]
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

    A request is reduced when it is added: of the levels only the acceptance lengths stay.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._num_windows = 0
        self._drafter_to_index: dict[str, int] = {}
        self._stream_to_index: dict[str, int] = {}
        self._policy_names: dict[str, None] = {}
        self._request_ids: list[str] = []
        self._request_stream: list[int] = []
        self._request_is_complete: list[bool] = []
        self._places: list[NDArray[np.int64]] = []
        self._windows: list[WindowColumns] = []
        self._rounds: list[RoundColumns] = []
        self._newest: dict[tuple[str, str], int] = {}
        self._changes: list[VersionChange] = []

    def add(self, request: RequestTrace) -> None:
        """Reduce one request and keep what comparisons need of it."""
        index, streams = self._drafter_to_index, self._stream_to_index
        place = np.array([index.setdefault(i, len(index)) for i in request.drafter_ids], np.int64)
        self._note_versions(request)
        self._rounds.append(self._round_columns(request, place))
        self._windows.append(self._window_columns(request))
        self._places.append(place)
        self._request_stream.append(streams.setdefault(request.stream, len(streams)))
        self._request_ids.append(request.request_id)
        self._request_is_complete.append(request.is_complete)
        self._policy_names.setdefault(request.policy_name)
        self._num_windows += request.windows.start.size
        self._num_tokens += request.num_tokens

    def build(self) -> Trace:
        """Lay out everything that was added."""
        return Trace(
            drafter_ids=tuple(self._drafter_to_index),
            streams=tuple(self._stream_to_index),
            request_ids=tuple(self._request_ids),
            request_stream=np.array(self._request_stream, dtype=np.int32),
            request_is_complete=np.array(self._request_is_complete, dtype=np.bool_),
            policy_names=tuple(self._policy_names),
            windows=self._joined_windows(),
            rounds=RoundColumns(**_joined(self._rounds, ROUND_DTYPES)),
            version_changes=tuple(self._changes),
        )

    def _round_columns(self, request: RequestTrace, place: NDArray[np.int64]) -> RoundColumns:
        rounds, starts = request.rounds, request.windows.start
        at = np.searchsorted(starts, rounds.first_position)
        found = np.append(starts, -1)[at] == rounds.first_position
        emitted = rounds.num_emitted_tokens
        before = np.cumsum(emitted, dtype=np.int64) - emitted
        return RoundColumns(
            request=np.full(emitted.size, len(self._request_ids), dtype=np.int32),
            token=self._num_tokens + before,
            # NO_DRAFTER is -1, so an extra last element of the table keeps it as it is.
            drafter=np.append(place, NO_DRAFTER)[rounds.drafter_index].astype(np.int16),
            num_draft_tokens=rounds.num_draft_tokens,
            num_accepted_tokens=rounds.num_accepted_tokens,
            num_emitted_tokens=emitted,
            selection_probability=rounds.selection_probability,
            seconds=rounds.draft_seconds + rounds.verify_seconds + rounds.score_seconds,
            window=np.where(found, self._num_windows + at, NO_WINDOW).astype(np.int64),
        )

    def _window_columns(self, request: RequestTrace) -> WindowColumns:
        windows = request.windows
        into_request = windows.start.astype(np.int64) - request.first_position
        return WindowColumns(
            request=np.full(windows.start.size, len(self._request_ids), dtype=np.int32),
            token=self._num_tokens + np.maximum(into_request, 0),
            num_levels=windows.num_levels,
            num_speculative_tokens=request.window_num_speculative_tokens,
            exact_length=_lengths(request, estimator="exact"),
            published_length=_lengths(request, estimator="published"),
        )

    def _joined_windows(self) -> WindowColumns:
        columns = _joined(self._windows, WINDOW_DTYPES)
        for name in ("exact_length", "published_length"):
            columns[name] = np.full(
                (self._num_windows, len(self._drafter_to_index)), np.nan, dtype=np.float32
            )
            row = 0
            for place, part in zip(self._places, self._windows, strict=True):
                rows = slice(row, row + part.request.size)
                columns[name][rows, place] = getattr(part, name)
                row = rows.stop
        return WindowColumns(**columns)

    def _note_versions(self, request: RequestTrace) -> None:
        """Note versions newer than any seen in the stream; late old requests are no change."""
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


def _lengths(request: RequestTrace, *, estimator: Estimator) -> NDArray[np.float32]:
    """Return expected acceptance lengths of all windows, (W, N); NaN where not scored."""
    windows = request.windows
    return expected_acceptance_length(
        windows.acceptance_probability,
        windows.realised_acceptance,
        num_levels=windows.num_levels,
        estimator=estimator,
    ).astype(np.float32)


def _segment_tokens(request: RequestTrace) -> list[int]:
    """Return the tokens that the request had emitted when each segment began, length G."""
    num_segments = request.segment_versions.shape[0]
    emitted = np.bincount(
        request.round_segment,
        weights=request.rounds.num_emitted_tokens,
        minlength=num_segments,
    ).astype(np.int64)
    return [int(before) for before in np.cumsum(emitted) - emitted]


def _joined(
    parts: Sequence[WindowColumns | RoundColumns], name_to_dtype: dict[str, Any]
) -> dict[str, NDArray[Any]]:
    """Concatenate the named columns; the dtypes matter where there is no part at all."""
    return {
        name: np.concatenate(
            [np.empty(0, dtype=dtype), *(getattr(part, name) for part in parts)]
        ).astype(dtype, copy=False)
        for name, dtype in name_to_dtype.items()
    }


WINDOW_DTYPES: dict[str, Any] = {
    "request": np.int32,
    "token": np.int64,
    "num_levels": np.int16,
    "num_speculative_tokens": np.int16,
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
    "window": np.int64,
}
