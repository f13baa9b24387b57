"""The segments of a request joined into one set of arrays.

Axes: R rounds, W windows, K levels, N drafters (all that occur in the request).
Drafters may come and go between segments; arrays are aligned by drafter id and hold NaN where a
drafter was not in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from schemas.arrow import LoggedEvent
from schemas.events import (
    NO_DRAFTER,
    AcceptanceRule,
    Rounds,
    ScoredWindows,
    VerificationEvent,
)

MAX_OPEN_REQUESTS = 10_000
"""Requests that may wait for their last segment; beyond it the oldest is taken as cut."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestTrace:
    """All that the log holds of one request, its segments joined in order.

    Attributes:
        is_contiguous: No segment is missing before the last one that is there.
        is_complete: And that one is the final one.
        is_deterministic: Accepted or not follows from the windows alone (greedy, one-hot).
        num_speculative_tokens: Largest K of its segments.
        prior_probabilities: What the request's policy started from, float64 (N,); 0 for a drafter
            that joined later.
        drafter_ids: Drafters of any segment, length N; ``rounds.drafter_index`` points into it.
        segment_versions: Weights version per segment and drafter, (G, N); -1 = not in the pool.
        rounds: In order, shape (R,).
        round_segment: Segment of each round, (R,).
        windows: Sorted by start, (W, K, N); NaN = not scored, no such level, or not in the pool.
        window_num_speculative_tokens: K of the segment that logged the window, (W,).
    """

    stream: str
    request_id: str
    policy_name: str
    is_contiguous: bool
    is_complete: bool
    is_deterministic: bool
    num_speculative_tokens: int
    first_position: int
    end_position: int
    prior_probabilities: NDArray[np.float64]
    drafter_ids: tuple[str, ...]
    segment_versions: NDArray[np.int64]
    rounds: Rounds
    round_segment: NDArray[np.int64]
    windows: ScoredWindows
    window_num_speculative_tokens: NDArray[np.int16]

    @property
    def num_tokens(self) -> int:
        """Tokens that its rounds emitted."""
        return int(self.rounds.num_emitted_tokens.sum(dtype=np.int64))

    @property
    def score_block(self) -> int:
        """Windows that its worker scored at once, as far as its rounds show; at least 1.

        The last round of a request scores what is left, so it does not count.
        """
        counts = self.rounds.num_scored_windows[: -1 if self.is_complete else None]
        return int(counts[counts > 0].min(initial=np.iinfo(np.int16).max)) if counts.any() else 1


def join_requests(events: Iterable[LoggedEvent]) -> Iterator[RequestTrace]:
    """Join the segments of every request, in order of completion.

    Requests without a final segment follow at the end, marked as not complete. Memory is bounded
    by the requests that run at the same time, and by ``MAX_OPEN_REQUESTS``.
    """
    waiting: dict[tuple[str, str], list[VerificationEvent]] = {}
    for logged in events:
        event = logged.event
        key = (event.stream, event.request_id)
        waiting.setdefault(key, []).append(event)
        if event.is_final:
            yield join_segments(waiting.pop(key))
        elif len(waiting) > MAX_OPEN_REQUESTS:
            yield join_segments(waiting.pop(next(iter(waiting))))
    for segments in waiting.values():
        yield join_segments(segments)


def join_segments(segments: Sequence[VerificationEvent]) -> RequestTrace:
    """Join segments of one request, given in any order.

    Raises:
        ValueError: If there is no segment.
    """
    if not segments:
        raise ValueError("no segment to join")
    ordered = sorted(segments, key=lambda event: event.segment_index)
    drafter_ids = tuple(dict.fromkeys(i for event in ordered for i in event.drafter_ids))
    depth = max(event.num_speculative_tokens for event in ordered)
    places = [_places(event, drafter_ids) for event in ordered]
    last = ordered[-1]
    is_contiguous = [event.segment_index for event in ordered] == list(range(len(ordered)))
    prior = np.zeros(len(drafter_ids))
    prior[places[0]] = ordered[0].prior_probabilities
    return RequestTrace(
        stream=last.stream,
        request_id=last.request_id,
        policy_name=last.policy_name,
        is_contiguous=is_contiguous,
        is_complete=is_contiguous and last.is_final,
        is_deterministic=all(
            event.sampling.acceptance_rule is not AcceptanceRule.SPECULATIVE_SAMPLING
            for event in ordered
        ),
        num_speculative_tokens=depth,
        first_position=ordered[0].first_position,
        end_position=last.first_position + last.num_positions,
        prior_probabilities=prior,
        drafter_ids=drafter_ids,
        segment_versions=_versions(ordered, places, len(drafter_ids)),
        rounds=_joined_rounds(ordered, places),
        round_segment=_repeat_index([event.rounds.first_position.size for event in ordered]),
        windows=_joined_windows(ordered, places, depth, len(drafter_ids)),
        window_num_speculative_tokens=np.repeat(
            np.array([event.num_speculative_tokens for event in ordered], dtype=np.int16),
            [event.windows.start.size for event in ordered],
        ),
    )


def _places(event: VerificationEvent, drafter_ids: tuple[str, ...]) -> NDArray[np.int64]:
    """Return where each drafter of the event stands in ``drafter_ids``."""
    return np.array([drafter_ids.index(i) for i in event.drafter_ids], dtype=np.int64)


def _repeat_index(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def _versions(
    ordered: Sequence[VerificationEvent], places: Sequence[NDArray[np.int64]], num_drafters: int
) -> NDArray[np.int64]:
    versions = np.full((len(ordered), num_drafters), -1, dtype=np.int64)
    for row, event, place in zip(versions, ordered, places, strict=True):
        row[place] = [drafter.weights_version for drafter in event.drafters]
    return versions


def _joined_rounds(
    ordered: Sequence[VerificationEvent], places: Sequence[NDArray[np.int64]]
) -> Rounds:
    columns = {
        field.name: np.concatenate([getattr(event.rounds, field.name) for event in ordered])
        for field in fields(Rounds)
    }
    # NO_DRAFTER is -1, so an extra last element of the table keeps it as it is.
    columns["drafter_index"] = np.concatenate(
        [
            np.append(place, NO_DRAFTER)[event.rounds.drafter_index]
            for event, place in zip(ordered, places, strict=True)
        ]
    ).astype(np.int16)
    return Rounds(**columns)


def _joined_windows(
    ordered: Sequence[VerificationEvent],
    places: Sequence[NDArray[np.int64]],
    depth: int,
    num_drafters: int,
) -> ScoredWindows:
    start = np.concatenate([event.windows.start for event in ordered])
    shape = (start.size, depth, num_drafters)
    probability = np.full(shape, np.nan, dtype=np.float16)
    realised = np.full(shape, np.nan, dtype=np.float16)
    row = 0
    for event, place in zip(ordered, places, strict=True):
        rows = slice(row, row + event.windows.start.size)
        block = (rows, slice(0, event.num_speculative_tokens), place)
        probability[block] = event.windows.acceptance_probability
        realised[block] = event.windows.realised_acceptance
        row = rows.stop
    # Segments complete windows in order of start; sorting only matters where the log is damaged.
    order = np.argsort(start, kind="stable")
    return ScoredWindows(
        start=start[order],
        num_levels=np.concatenate([event.windows.num_levels for event in ordered])[order],
        acceptance_probability=probability[order],
        realised_acceptance=realised[order],
    )
