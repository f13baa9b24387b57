"""What a log says, as plain data: for the terminal, for JSON, and for the tables of the report.

A value that cannot be given is None and carries its reason; nothing here is ever NaN.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.measures import acceptance_rate
from replay import comparators
from replay.hindsight import Hindsight, switching_name
from replay.reader import LogSummary
from replay.regret import ComparableRounds, block_bootstrap_interval, regret
from replay.rerun import Walk
from replay.trace import NO_WINDOW, Trace
from schemas.events import NO_DRAFTER

ALL_STREAMS = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamRow:
    """One stream, or all of them (``stream`` None).

    ``mean_acceptance_length`` is emitted tokens per round, bonus included; ``num_idle_rounds`` are
    those without drafter. ``tokens_per_second`` counts draft, verify and score seconds.
    """

    stream: str | None
    num_requests: int
    num_tokens: int
    num_rounds: int
    num_idle_rounds: int
    mean_acceptance_length: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterRow:
    """One drafter in one stream, or in all (``stream`` None).

    Attributes:
        num_windows: Windows on which it was scored.
        exact_length, published_length: Mean expected acceptance length over those windows.
        num_rounds: Rounds in which it was played.
        played_length: Emitted tokens per round in those.
        expected_length: Mean of the exact estimator on the windows of the same rounds: far from
            ``played_length`` means that scoring does not see what drafting does.
        acceptance_rate: Accepted per drafted token in those rounds.
    """

    stream: str | None
    drafter_id: str
    num_windows: int
    exact_length: float | None
    published_length: float | None
    num_rounds: int
    played_length: float | None
    expected_length: float | None
    acceptance_rate: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RegretRow:
    """Regret against one comparator; positive where the comparator was better.

    ``*_low`` and ``*_high`` bound a 95 % block-bootstrap interval; both are None where there are
    too few rounds for one.
    """

    stream: str | None
    comparator: str
    path_length: int
    num_rounds: int
    tokens: float
    tokens_low: float | None
    tokens_high: float | None
    loss: float
    loss_low: float | None
    loss_high: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRow:
    """What a policy would have done with the same text; counts as in ``rerun.Walk``."""

    policy: str
    mean_acceptance_length: float | None
    num_rounds: int
    num_tokens: int
    num_idle_rounds: int
    num_skipped_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RerunCheck:
    """Whether the log agrees with itself.

    Attributes:
        num_rounds: Rounds of the log.
        num_checked: Rounds that could be rebuilt from windows.
        num_selections: Rounds with a drafter.
        num_selections_checked: Of these, whose selection probability was rebuilt with the logged
            policy from the logged prior.
        num_disagreements: Numbers that differ.
        examples: The first few of them, or why something could not be checked, in words.
    """

    num_rounds: int
    num_checked: int
    num_selections: int
    num_selections_checked: int
    num_disagreements: int
    examples: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplaySummary:
    """All tables of a replay.

    ``notes`` are sentences on what is partial or missing in this log, and why.
    """

    log: LogSummary
    policy_names: tuple[str, ...]
    num_incomplete_requests: int
    num_windows: int
    total: StreamRow
    streams: tuple[StreamRow, ...]
    drafters: tuple[DrafterRow, ...]
    regrets: tuple[RegretRow, ...]
    policies: tuple[PolicyRow, ...]
    check: RerunCheck
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON types; docs/replay.md lists the keys."""
        plain: dict[str, Any] = _json_value(asdict(self))
        return plain


def summarise(
    log: LogSummary,
    trace: Trace,
    rounds: ComparableRounds,
    generator: np.random.Generator,
    *,
    check: RerunCheck,
    policy_to_walk: dict[str, Walk],
    best: Hindsight | None,
) -> ReplaySummary:
    """Compute every table of a log.

    Args:
        log: What was read.
        trace: Its columns.
        rounds: ``regret.comparable_rounds(trace)``.
        generator: The dice of the bootstrap.
        check: Result of the re-run.
        policy_to_walk: What other policies would have done.
        best: ``hindsight(rounds, ...)``.
    """
    total, *streams = _stream_rows(trace)
    return ReplaySummary(
        log=log,
        policy_names=trace.policy_names,
        num_incomplete_requests=int((~trace.request_is_complete).sum()),
        num_windows=trace.windows.request.size,
        total=total,
        streams=tuple(streams),
        drafters=_drafter_rows(trace),
        regrets=_regret_rows(trace, rounds, generator, best),
        policies=tuple(
            PolicyRow(
                policy=policy,
                mean_acceptance_length=walk.mean_acceptance_length,
                num_rounds=walk.num_rounds,
                num_tokens=walk.num_tokens,
                num_idle_rounds=walk.num_idle_rounds,
                num_skipped_tokens=walk.num_skipped_tokens,
            )
            for policy, walk in policy_to_walk.items()
        ),
        check=check,
        notes=tuple(_notes(log, trace, rounds)),
    )


def _stream_rows(trace: Trace) -> tuple[StreamRow, ...]:
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


def _drafter_rows(trace: Trace) -> tuple[DrafterRow, ...]:
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
        exact, published = windows.exact_length[:, drafter], windows.published_length[:, drafter]
        scored = np.flatnonzero(~np.isnan(exact))
        played = np.flatnonzero(rounds.drafter == drafter)
        judged = played[rounds.window[played] != NO_WINDOW]
        expected = exact[rounds.window[judged]]
        judged, expected = judged[~np.isnan(expected)], expected[~np.isnan(expected)]

        def sums(request: NDArray[np.int32], values: NDArray[Any] | None) -> NDArray[np.float64]:
            stream = trace.request_stream[request]
            totals = np.bincount(stream, weights=values, minlength=len(trace.streams))
            return totals.astype(np.float64)

        by_window, by_round = windows.request[scored], rounds.request[played]
        return cls(
            num_windows=sums(by_window, None),
            exact=sums(by_window, exact[scored]),
            published=sums(by_window, published[scored]),
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
            exact_length=_ratio(total["exact"], total["num_windows"]),
            published_length=_ratio(total["published"], total["num_windows"]),
            num_rounds=int(total["num_rounds"]),
            played_length=_ratio(total["emitted"], total["num_rounds"]),
            expected_length=_ratio(total["expected"], total["num_expected"]),
            acceptance_rate=acceptance_rate(int(total["accepted"]), int(total["drafted"])),
        )


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None


def _regret_rows(
    trace: Trace,
    rounds: ComparableRounds,
    generator: np.random.Generator,
    best: Hindsight | None,
) -> tuple[RegretRow, ...]:
    if best is None:
        return ()
    rows = [
        _regret_row(rounds, name, sequence, ALL_STREAMS, generator)
        for name, sequence in best.name_to_sequence.items()
    ]
    if len(trace.streams) > 1:
        for index, part in rounds.by_stream():
            fixed = comparators.best_fixed(part.losses)
            stream = trace.streams[index]
            rows.append(_regret_row(part, switching_name(0), fixed, stream, generator))
    return tuple(rows)


def _regret_row(
    rounds: ComparableRounds,
    name: str,
    sequence: NDArray[np.int64],
    stream: str | None,
    generator: np.random.Generator,
) -> RegretRow:
    found = regret(rounds, sequence)
    block_length = request_block_length(rounds)
    tokens = block_bootstrap_interval(found.tokens, generator, block_length=block_length)
    loss = block_bootstrap_interval(found.loss, generator, block_length=block_length)
    return RegretRow(
        stream=stream,
        comparator=name,
        path_length=comparators.path_length(sequence),
        num_rounds=rounds.num_rounds,
        tokens=float(found.tokens.sum()),
        tokens_low=tokens.low if tokens else None,
        tokens_high=tokens.high if tokens else None,
        loss=float(found.loss.sum()),
        loss_low=loss.low if loss else None,
        loss_high=loss.high if loss else None,
    )


def request_block_length(rounds: ComparableRounds) -> int:
    """Return rounds per bootstrap block: a request's, and no less than T^(1/3)."""
    total = rounds.num_rounds
    num_requests = max(1, int(np.unique(rounds.request).size))
    return max(1, math.ceil(total / num_requests), math.ceil(math.cbrt(total)))


def _notes(log: LogSummary, trace: Trace, rounds: ComparableRounds) -> list[str]:
    notes = []
    num_cut = int((~trace.request_is_complete).sum())
    if log.num_unreadable_files:
        files = "file" if log.num_unreadable_files == 1 else "files"
        notes.append(f"Partial: {log.num_unreadable_files} unreadable {files} (listed under Log).")
    if num_cut:
        notes.append(
            f"Partial: {num_cut} of {trace.request_is_complete.size} requests are incomplete "
            "(still running, dropped, or the log was cut)."
        )
    if trace.rounds.request.size == 0:
        notes.append("No rounds: nothing was verified, so there is nothing to compare.")
    elif not trace.drafter_ids:
        notes.append("No drafters: every round wrote one token; there is nothing to compare.")
    elif trace.windows.request.size == 0:
        notes.append(
            "No scoring: the log holds no windows, so drafters that were not played and regret "
            "are unknown. Turn scoring on in the worker."
        )
    elif rounds.num_left_out:
        notes.append(
            f"Regret leaves out {rounds.num_left_out} of {trace.rounds.request.size} rounds whose "
            "window is not in the log."
        )
    if len(trace.drafter_ids) == 1 and rounds.num_rounds:
        notes.append("One drafter only: all comparators are that drafter.")
    if len(log.num_speculative_tokens) > 1:
        depths = ", ".join(map(str, log.num_speculative_tokens))
        notes.append(f"Mixed K ({depths}): lengths are in tokens, losses relative to each K.")
    notes.extend(
        f"{drafter_id} was not scored in {count} of {rounds.num_rounds} compared rounds; there it "
        "counts as no drafter."
        for drafter_id, count in zip(trace.drafter_ids, rounds.num_unscored, strict=True)
        if count
    )
    return notes


def _json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return value
