"""The tables of streams, domains and drafters, from the columns of a log."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.measures import acceptance_rate
from learner.shared_prior import domain_of
from replay.regret import ComparableRounds
from replay.summary import ALL_STREAMS, DomainRow, DrafterRow, StreamRow
from replay.trace import NO_WINDOW, Trace
from schemas.events import NO_DRAFTER


def stream_rows(trace: Trace) -> tuple[StreamRow, ...]:
    """Return the row of all streams together, then one per stream."""
    rounds, num_streams = trace.rounds, len(trace.streams)
    stream = trace.request_stream[rounds.request]
    num_requests = np.bincount(trace.request_stream, minlength=num_streams)
    num_rounds = np.bincount(stream, minlength=num_streams)
    is_idle = rounds.drafter == NO_DRAFTER
    num_idle, tokens, seconds = (
        np.bincount(stream, weights=column, minlength=num_streams)
        for column in (is_idle, rounds.num_emitted_tokens, rounds.seconds)
    )
    columns = np.column_stack([num_requests, num_rounds, num_idle, tokens, seconds])
    total = _stream_row(ALL_STREAMS, columns.sum(axis=0))
    return (total, *map(_stream_row, trace.streams, columns))


def _stream_row(stream: str | None, sums: NDArray[np.float64]) -> StreamRow:
    num_requests, num_rounds, num_idle, tokens, seconds = sums.tolist()
    return StreamRow(
        stream=stream,
        num_requests=int(num_requests),
        num_tokens=int(tokens),
        num_rounds=int(num_rounds),
        num_idle_rounds=int(num_idle),
        mean_acceptance_length=tokens / num_rounds if num_rounds else None,
        tokens_per_second=tokens / seconds if seconds > 0.0 else None,
    )


def domain_rows(
    trace: Trace, streams: tuple[StreamRow, ...], rounds: ComparableRounds
) -> tuple[DomainRow, ...]:
    """Return a row per domain, in order of appearance; ``streams`` are the rows of its streams."""
    sums = _length_sums(trace, rounds)
    domain_to_streams: dict[str, list[int]] = {}
    for index, stream in enumerate(trace.streams):
        domain_to_streams.setdefault(domain_of(stream), []).append(index)
    return tuple(
        _domain_row(trace, domain, [streams[i] for i in members], sums[members].sum(axis=0))
        for domain, members in domain_to_streams.items()
    )


def _length_sums(trace: Trace, rounds: ComparableRounds) -> NDArray[np.float64]:
    """Return compared rounds, played length and every drafter's length, per stream (S, 2 + N)."""
    size = len(trace.streams)
    ones = np.ones(rounds.num_rounds, dtype=np.float32)
    columns = [
        np.bincount(rounds.stream, weights=values, minlength=size)
        for values in (ones, rounds.played_lengths, *rounds.lengths.T)
    ]
    return np.column_stack(columns)


def _domain_row(
    trace: Trace, domain: str, streams: list[StreamRow], sums: NDArray[np.float64]
) -> DomainRow:
    count, played, drafters = int(sums[0]), sums[1], sums[2:]
    num_tokens, num_rounds = (
        sum(getattr(row, name) for row in streams) for name in ("num_tokens", "num_rounds")
    )
    best = int(drafters.argmax()) if count and drafters.size else None
    return DomainRow(
        domain=domain,
        num_streams=len(streams),
        num_requests=sum(row.num_requests for row in streams),
        num_tokens=num_tokens,
        num_rounds=num_rounds,
        mean_acceptance_length=ratio(num_tokens, num_rounds),
        num_compared=count,
        played_length=ratio(played, count),
        best_drafter_id=None if best is None else trace.drafter_ids[best],
        best_length=None if best is None else ratio(drafters[best], count),
    )


def drafter_rows(trace: Trace) -> tuple[DrafterRow, ...]:
    """Return the rows of all streams together, then of each stream where there are several."""
    drafter_sums = [_DrafterSums.of(trace, index) for index in range(len(trace.drafter_ids))]
    pairs = list(zip(trace.drafter_ids, drafter_sums, strict=True))
    rows = [sums.row(drafter_id, ALL_STREAMS, slice(None)) for drafter_id, sums in pairs]
    if len(trace.streams) > 1:
        for index, stream in enumerate(trace.streams):
            found = [
                sums.row(drafter_id, stream, slice(index, index + 1)) for drafter_id, sums in pairs
            ]
            rows.extend(row for row in found if row.num_windows or row.num_rounds)
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class _DrafterSums:
    """Counts and sums of one drafter per stream, each of shape (number of streams,)."""

    num_windows: NDArray[np.float64]
    exact: NDArray[np.float64]
    published: NDArray[np.float64]
    num_rounds: NDArray[np.float64]
    emitted: NDArray[np.float64]
    accepted: NDArray[np.float64]
    drafted: NDArray[np.float64]
    num_expected: NDArray[np.float64]
    expected: NDArray[np.float64]

    @classmethod
    def of(cls, trace: Trace, drafter: int) -> _DrafterSums:
        """Add up one drafter's windows and the rounds in which it was played."""
        rounds, windows = trace.rounds, trace.windows
        played = np.flatnonzero(rounds.drafter == drafter)
        judged = played[rounds.depth[played] != NO_WINDOW]
        expected = rounds.lengths[judged, drafter]
        judged, expected = judged[~np.isnan(expected)], expected[~np.isnan(expected)]

        def sums(request: NDArray[np.int32], values: NDArray[Any] | None) -> NDArray[np.float64]:
            stream = trace.request_stream[request]
            totals = np.bincount(stream, weights=values, minlength=len(trace.streams))
            return totals.astype(np.float64)

        by_round = rounds.request[played]
        return cls(
            num_windows=sums(windows.request, windows.num_scored[:, drafter]),
            exact=sums(windows.request, windows.exact_length[:, drafter]),
            published=sums(windows.request, windows.published_length[:, drafter]),
            num_rounds=sums(by_round, None),
            emitted=sums(by_round, rounds.num_emitted_tokens[played]),
            accepted=sums(by_round, rounds.num_accepted_tokens[played]),
            drafted=sums(by_round, rounds.num_draft_tokens[played]),
            num_expected=sums(rounds.request[judged], None),
            expected=sums(rounds.request[judged], expected),
        )

    def row(self, drafter_id: str, stream: str | None, streams: slice) -> DrafterRow:
        """Return the table row over some of the streams."""
        total = {
            field.name: float(getattr(self, field.name)[streams].sum()) for field in fields(self)
        }
        return DrafterRow(
            stream=stream,
            drafter_id=drafter_id,
            num_windows=int(total["num_windows"]),
            exact_length=ratio(total["exact"], total["num_windows"]),
            published_length=ratio(total["published"], total["num_windows"]),
            num_rounds=int(total["num_rounds"]),
            played_length=ratio(total["emitted"], total["num_rounds"]),
            expected_length=ratio(total["expected"], total["num_expected"]),
            acceptance_rate=acceptance_rate(int(total["accepted"]), int(total["drafted"])),
        )


def ratio(total: float, count: float) -> float | None:
    """Return total / count; None without anything to divide by."""
    return float(total) / count if count else None
