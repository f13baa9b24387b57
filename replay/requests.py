"""The segments of a request joined into one set of arrays.

Axes: R rounds, W windows, K levels, N drafters (all that occur in the request).
Drafters may come and go between segments; arrays are aligned by drafter id and hold NaN where a
drafter was not in the pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from replay.segments import ROUND_FIELDS, Segment, segment_of_event
from schemas.arrow import LoggedEvent
from schemas.columns import VERIFICATION_EVENT_SCHEMA
from schemas.events import NO_DRAFTER, Rounds, ScoredWindows, VerificationEvent

MAX_OPEN_REQUESTS = 10_000
"""Requests that may wait for their last segment; beyond it the oldest is taken as cut."""


_ROUND_DTYPES = {
    name: VERIFICATION_EVENT_SCHEMA.field(f"rounds_{name}").type.value_type.to_pandas_dtype()
    for name in ROUND_FIELDS
}
_DRAFTER = ROUND_FIELDS.index("drafter_index")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestTrace:
    """All that the log holds of one request, its segments joined in order.

    Attributes:
        is_contiguous: No segment is missing before the last one that is there.
        is_complete: And that one is the final one.
        is_deterministic: Accepted or not follows from the windows alone (greedy, one-hot).
        num_speculative_tokens: Largest K of its segments.
        is_censored: It was aborted or failed: how far drafts would have reached is unknown.
        prior_probabilities: The stream's prior, float64 (N,); 0 for a drafter that joined later.
        policy_table: Packed state that its policy started from, over the first
            ``num_started_drafters``; empty = it started from the prior.
        policy_numbers: The rest of that state.
        num_started_drafters: Drafters of its first segment; they lead ``drafter_ids``.
        prompt_token_ids: int32, if it consented and prompts were read; else empty.
        awake: Which drafters could be selected in each round, bool (R, N); None = not recorded.
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
    is_censored: bool
    is_deterministic: bool
    num_speculative_tokens: int
    first_position: int
    end_position: int
    prior_probabilities: NDArray[np.float64]
    policy_table: NDArray[np.float64]
    policy_numbers: NDArray[np.float64]
    num_started_drafters: int
    prompt_token_ids: NDArray[np.int32]
    awake: NDArray[np.bool_] | None
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


def join_requests(rows: Iterable[LoggedEvent | Segment]) -> Iterator[RequestTrace]:
    """Join the segments of every request, in order of completion.

    Requests without a final segment follow at the end, marked as not complete. Memory is bounded
    by the requests that run at the same time, and by ``MAX_OPEN_REQUESTS``.
    """
    waiting: dict[tuple[str, str], list[Segment]] = {}
    for row in rows:
        segment = row if isinstance(row, Segment) else segment_of_event(row.event)
        key = (segment.stream, segment.request_id)
        waiting.setdefault(key, []).append(segment)
        if segment.is_final:
            yield join_segments(waiting.pop(key))
        elif len(waiting) > MAX_OPEN_REQUESTS:
            yield join_segments(waiting.pop(next(iter(waiting))))
    for segments in waiting.values():
        yield join_segments(segments)


def join_segments(segments: Sequence[Segment | VerificationEvent]) -> RequestTrace:
    """Join segments of one request, given in any order.

    Raises:
        ValueError: If there is no segment.
    """
    if not segments:
        raise ValueError("no segment to join")
    found = [one if isinstance(one, Segment) else segment_of_event(one) for one in segments]
    ordered = sorted(found, key=lambda segment: segment.segment_index)
    first, last = ordered[0], ordered[-1]
    drafter_ids = first.drafter_ids
    if any(segment.drafter_ids != drafter_ids for segment in ordered):
        drafter_ids = tuple(dict.fromkeys(i for segment in ordered for i in segment.drafter_ids))
    places = [_places(segment, drafter_ids) for segment in ordered]
    is_contiguous = [segment.segment_index for segment in ordered] == list(range(len(ordered)))
    return RequestTrace(
        stream=last.stream,
        request_id=last.request_id,
        policy_name=last.policy_name,
        is_contiguous=is_contiguous,
        is_complete=is_contiguous and last.is_final,
        is_censored=last.is_censored,
        is_deterministic=all(segment.is_deterministic for segment in ordered),
        num_speculative_tokens=max(segment.num_speculative_tokens for segment in ordered),
        first_position=first.first_position,
        end_position=last.first_position + last.num_positions,
        prior_probabilities=_aligned(first.prior_probabilities, places[0], len(drafter_ids), 0.0),
        policy_table=first.policy_table,
        policy_numbers=first.policy_numbers,
        num_started_drafters=len(first.drafter_ids),
        prompt_token_ids=first.prompt_token_ids,
        awake=_awake_by_round(ordered, places, len(drafter_ids)),
        drafter_ids=drafter_ids,
        segment_versions=np.array(
            [
                _aligned(segment.weights_versions, place, len(drafter_ids), -1)
                for segment, place in zip(ordered, places, strict=True)
            ]
        ),
        rounds=_joined_rounds(ordered, places),
        round_segment=_repeat_index([segment.rounds.shape[1] for segment in ordered]),
        windows=_joined_windows(ordered, places, len(drafter_ids)),
        window_num_speculative_tokens=np.repeat(
            np.array([segment.num_speculative_tokens for segment in ordered], dtype=np.int16),
            [segment.windows.shape[1] for segment in ordered],
        ),
    )


def _places(segment: Segment, drafter_ids: tuple[str, ...]) -> NDArray[np.int64] | None:
    """Return where each drafter of the segment stands in ``drafter_ids``; None = at its place."""
    if segment.drafter_ids == drafter_ids:
        return None
    return np.array([drafter_ids.index(i) for i in segment.drafter_ids], dtype=np.int64)


def _aligned(
    values: NDArray[Any], place: NDArray[np.int64] | None, num_drafters: int, absent: float
) -> NDArray[Any]:
    """Return per-drafter values in the order of the request; ``absent`` where there is none."""
    if place is None and values.size == num_drafters:
        return values
    result = np.full(num_drafters, absent, dtype=values.dtype)
    if values.size:
        result[place] = values
    return result


def _awake_by_round(
    ordered: Sequence[Segment], places: Sequence[NDArray[np.int64] | None], num_drafters: int
) -> NDArray[np.bool_] | None:
    """Return which drafters could be selected in each round, (R, N); None if a segment is mute."""
    if not all(segment.num_awake_rounds.size for segment in ordered if segment.drafter_ids):
        return None
    return np.concatenate(
        [
            np.arange(segment.rounds.shape[1])[:, None]
            < _aligned(segment.num_awake_rounds, place, num_drafters, 0)
            for segment, place in zip(ordered, places, strict=True)
        ]
    )


def _repeat_index(sizes: Sequence[int]) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)


def _joined_rounds(
    ordered: Sequence[Segment], places: Sequence[NDArray[np.int64] | None]
) -> Rounds:
    parts = []
    for segment, place in zip(ordered, places, strict=True):
        rounds = segment.rounds
        if place is not None:
            rounds = rounds.copy()
            # NO_DRAFTER is -1, so an extra last element of the table keeps it as it is.
            rounds[_DRAFTER] = np.append(place, NO_DRAFTER)[rounds[_DRAFTER].astype(np.int64)]
        parts.append(rounds)
    packed = np.concatenate(parts, axis=1)
    return Rounds(
        **{
            name: values.astype(dtype)
            for (name, dtype), values in zip(_ROUND_DTYPES.items(), packed, strict=True)
        }
    )


def _joined_windows(
    ordered: Sequence[Segment], places: Sequence[NDArray[np.int64] | None], num_drafters: int
) -> ScoredWindows:
    start, num_levels = np.concatenate([segment.windows for segment in ordered], axis=1)
    scores = [
        _joined_scores([getattr(segment, name) for segment in ordered], places, num_drafters)
        for name in ("acceptance_probability", "realised_acceptance")
    ]
    levels = num_levels.astype(np.int16)
    if np.any(start[1:] <= start[:-1]):
        # Segments complete windows in order of start; this only happens where the log is damaged.
        start, row = np.unique(start, return_index=True)
        levels, scores = levels[row], [values[row] for values in scores]
    return ScoredWindows(
        start=start,
        num_levels=levels,
        acceptance_probability=scores[0],
        realised_acceptance=scores[1],
    )


def _joined_scores(
    parts: Sequence[NDArray[np.float16]],
    places: Sequence[NDArray[np.int64] | None],
    num_drafters: int,
) -> NDArray[np.float16]:
    """Stack scores (W, K, N); NaN where a level or a drafter was not in a segment."""
    depth = max(part.shape[1] for part in parts)
    if all(
        place is None and part.shape[1] == depth for place, part in zip(places, parts, strict=True)
    ):
        return np.concatenate(parts)
    joined = np.full((sum(len(part) for part in parts), depth, num_drafters), np.nan, np.float16)
    row = 0
    for place, part in zip(places, parts, strict=True):
        rows = slice(row, row + len(part))
        joined[rows, : part.shape[1], slice(None) if place is None else place] = part
        row = rows.stop
    return joined
