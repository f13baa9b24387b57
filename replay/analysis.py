"""One pass over a log: columns, self-check and re-runs; then the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from learner.selection.fixed import Fixed
from replay.arm_rerun import chooses_arms, logged_arms, verify_logged_arms
from replay.arm_walks import ArmPool
from replay.calibrating import CalibrationMeter
from replay.cost import CostMeter, MeasuredCost
from replay.errors import ReplayError
from replay.hindsight import Hindsight, hindsight
from replay.notes import (
    alarms,
    estimates,
    missing_comparisons,
    missing_parts,
    mixtures,
    refusals,
)
from replay.off_policy_rows import knows_only_what_was_played, off_policy_rows
from replay.policy_rows import policy_rows
from replay.ports import SelectorFactory
from replay.reader import LogReader, LogSummary
from replay.regret import ComparableRounds, comparable_rounds
from replay.regret_rows import regret_rows
from replay.requests import RequestTrace, join_requests
from replay.rerun import Disagreement, verify_logged_rounds, verify_logged_selection
from replay.selectors import logged_selector
from replay.summary import CalibrationRow, OffPolicyRow, ReplaySummary, RerunCheck
from replay.tables import domain_rows, drafter_rows, stream_rows
from replay.trace import Trace, TraceBuilder
from replay.walks import PolicyWalks, WalkOptions, chooses_by_time, parsed, starts_mixed
from schemas.events import NO_DRAFTER

MAX_EXAMPLES = 5
DEFAULT_MAX_SWITCHES = 64
DEFAULT_MAX_RELEARNED = 50_000
"""Windows that the check of logged selection learns again: some seconds."""

MAX_LISTED = 30
"""Names that a refusal lists."""

MAX_STREAMS = 12
"""Streams that are looked at closely, those with most tokens; all are in the tables."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Analysis:
    """A log, analysed: what the report is written from.

    Attributes:
        best: Comparators over all streams; None if there is nothing to compare.
        stream_to_best: Comparators of the largest streams, largest first, if there are several.
    """

    name: str
    trace: Trace
    rounds: ComparableRounds
    best: Hindsight | None
    stream_to_best: Mapping[int, Hindsight]
    summary: ReplaySummary


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOptions:
    """What is asked of a log.

    Attributes:
        walks: Policies, levels and drafters of the re-runs.
        streams: Only these streams; None = all.
        worker_selector: Remakes the selector of a request; logged selection probabilities are
            compared with its own. None = do not compare.
        max_relearned: Windows that this comparison may learn; the requests after them are not
            compared. None = compare all.
        max_switches: Largest S of the switching comparators.
    """

    walks: WalkOptions = field(default_factory=WalkOptions)
    streams: tuple[str, ...] | None = None
    worker_selector: SelectorFactory | None = logged_selector
    max_relearned: int | None = DEFAULT_MAX_RELEARNED
    max_switches: int = DEFAULT_MAX_SWITCHES


def analyse(
    log: Path,
    generator: np.random.Generator,
    *,
    policies: Sequence[str] = (),
    options: ReplayOptions | None = None,
    on_request: Callable[[], None] | None = None,
) -> Analysis:
    """Read a log once, check it against itself, re-run policies over it, and sum up.

    Args:
        log: The data folder, its ``events`` folder, any folder below, or one file.
        generator: The dice of coins, selections and bootstrap.
        policies: Re-run, short for ``options.walks.policies``.
        options: What is asked; None = everything of the whole log.
        on_request: Called after each request, for a progress bar.

    Raises:
        ReplayError: If there is nothing to read, or a policy, drafter or stream is unknown.
    """
    asked = options or ReplayOptions(walks=WalkOptions(policies=tuple(policies)))
    reads_prompts = any(starts_mixed(parsed(text)) for text in asked.walks.policies)
    reader = LogReader(log, streams=asked.streams, reads_prompts=reads_prompts)
    refuse_unknown(reader, asked)
    meters = _Meters(asked, generator, _arm_pool(log, asked))
    for request in join_requests(reader.segments()):
        meters.add(request)
        if on_request is not None:
            on_request()
    trace = meters.builder.build()
    depth = max(reader.summary().num_speculative_tokens, default=0)
    cost = meters.cost.measured(len(trace.drafter_ids), depth)
    rounds = comparable_rounds(trace)
    best = hindsight(rounds, asked.max_switches, trace.streams)
    stream_to_best = dict(_best_per_stream(trace, rounds, asked.max_switches))
    summary = _summary(
        reader.summary(),
        trace,
        rounds,
        cost,
        generator,
        best=best,
        stream_to_best=stream_to_best,
        walks=meters.walks,
        calibration=tuple(meters.calibration.rows(trace.drafter_ids)),
        check=meters.check.result(),
    )
    return Analysis(
        name=str(log),
        trace=trace,
        rounds=rounds,
        best=best,
        stream_to_best=stream_to_best,
        summary=summary,
    )


class _Meters:
    """What is measured of a log while its requests go by."""

    def __init__(
        self, asked: ReplayOptions, generator: np.random.Generator, pool: ArmPool | None
    ) -> None:
        self.builder = TraceBuilder()
        self.cost = CostMeter()
        self.calibration = CalibrationMeter()
        self.check = _SelfCheck(asked.worker_selector, asked.max_relearned)
        self.walks = PolicyWalks(asked.walks, generator, self.builder.drafter_to_index, pool)

    def add(self, request: RequestTrace) -> None:
        """Measure one request."""
        place = self.builder.add(request)
        self.cost.add(request, place)
        self.calibration.add(request, place)
        self.check.add(request)
        self.walks.add(request)


def refuse_unknown(reader: LogReader, asked: ReplayOptions) -> None:
    """Refuse streams and drafters that the log does not have, before it is read.

    Raises:
        ReplayError: If there is one, with those that are known.
    """
    fixed = [text for text in asked.walks.policies if text.startswith(f"{Fixed.name}:")]
    drafter_ids = [text.partition(":")[2] for text in fixed]
    drafter_ids += asked.walks.drafter_ids or ()
    if not drafter_ids and asked.streams is None:
        return
    known_streams, known_drafters = reader.names()
    for kind, wanted, known in (
        ("stream", asked.streams or (), known_streams),
        ("drafter", drafter_ids, known_drafters),
    ):
        for name in wanted:
            if name not in known:
                listed = ", ".join(known[:MAX_LISTED]) or "none"
                more = f" and {len(known) - MAX_LISTED} more" if len(known) > MAX_LISTED else ""
                raise ReplayError(f"unknown {kind} {name!r}, the log has: {listed}{more}")
    allowed = asked.walks.drafter_ids
    for text in fixed:
        if allowed is not None and text.partition(":")[2] not in allowed:
            raise ReplayError(f"{text} is not among the drafters asked for: {', '.join(allowed)}")


def _arm_pool(log: Path, asked: ReplayOptions) -> ArmPool | None:
    """Read the log once for its costs, if a policy chooses (drafter, K) by them."""
    if not any(chooses_by_time(parsed(text)) for text in asked.walks.policies):
        return None
    reader, meter = LogReader(log, streams=asked.streams), CostMeter()
    numbers: dict[str, int] = {}
    for request in join_requests(reader.segments()):
        place = [numbers.setdefault(one, len(numbers)) for one in request.drafter_ids]
        meter.add(request, np.array(place, dtype=np.int64))
    depth = max(reader.summary().num_speculative_tokens)
    wanted = asked.walks.num_speculative_tokens
    allowed = asked.walks.drafter_ids
    return ArmPool.of_log(
        meter.measured(len(numbers), depth),
        numbers,
        tuple(one for one in numbers if allowed is None or one in allowed),
        depth if wanted is None else min(wanted, depth),
    )


def _best_per_stream(
    trace: Trace, rounds: ComparableRounds, max_switches: int
) -> Iterator[tuple[int, Hindsight]]:
    for stream in _largest_streams(trace):
        found = hindsight(rounds.of_stream(stream), max_switches, trace.streams)
        if found is not None:
            yield stream, found


def _largest_streams(trace: Trace) -> list[int]:
    if len(trace.streams) < 2:
        return []
    stream = trace.request_stream[trace.rounds.request]
    tokens = np.bincount(
        stream, weights=trace.rounds.num_emitted_tokens, minlength=len(trace.streams)
    )
    return [int(index) for index in np.argsort(-tokens, kind="stable")[:MAX_STREAMS]]


def _summary(
    log: LogSummary,
    trace: Trace,
    rounds: ComparableRounds,
    cost: MeasuredCost,
    generator: np.random.Generator,
    *,
    best: Hindsight | None,
    stream_to_best: Mapping[int, Hindsight],
    walks: PolicyWalks,
    calibration: tuple[CalibrationRow, ...],
    check: RerunCheck,
) -> ReplaySummary:
    total, *streams = stream_rows(trace)
    regrets = regret_rows(trace, rounds, cost, generator, best=best, stream_to_best=stream_to_best)
    policies = tuple(policy_rows(walks, cost, generator))
    off_policy: tuple[OffPolicyRow, ...] = ()
    if trace.drafter_ids and knows_only_what_was_played(trace):
        depth = max(log.num_speculative_tokens, default=1)
        off_policy = tuple(off_policy_rows(trace, walks.specs, depth, generator))
    partial = tuple(missing_parts(log, trace))
    return ReplaySummary(
        log=log,
        policy_names=trace.policy_names,
        num_incomplete_requests=int((~trace.request_is_complete).sum()),
        num_windows=trace.num_windows,
        is_partial=bool(partial),
        total=total,
        streams=tuple(streams),
        domains=domain_rows(trace, tuple(streams), rounds),
        drafters=drafter_rows(trace),
        calibration=calibration,
        regrets=tuple(regrets),
        policies=policies,
        off_policy=off_policy,
        check=check,
        notes=(
            *partial,
            *alarms(calibration),
            *missing_comparisons(trace, rounds),
            *mixtures(log),
            *estimates(policies),
            *refusals(off_policy),
        ),
    )


class _SelfCheck:
    """Adds up the re-run of every request."""

    def __init__(self, worker_selector: SelectorFactory | None, max_relearned: int | None) -> None:
        self._worker_selector = worker_selector
        self._room = math.inf if max_relearned is None else max_relearned
        self._num_rounds = 0
        self._num_checked = 0
        self._num_disagreements = 0
        self._num_selections = 0
        self._num_selections_checked = 0
        self._examples: list[str] = []
        self._reasons: dict[str, None] = {}

    def add(self, request: RequestTrace) -> None:
        rebuilt = verify_logged_rounds(request)
        found = rebuilt.disagreements + self._selection(request)
        self._num_rounds += rebuilt.num_rounds
        self._num_checked += rebuilt.num_checked
        self._num_disagreements += len(found)
        room = MAX_EXAMPLES - len(self._examples)
        self._examples.extend(str(disagreement) for disagreement in found[:room])

    def _selection(self, request: RequestTrace) -> tuple[Disagreement, ...]:
        num_selections = int((request.rounds.drafter_index != NO_DRAFTER).sum())
        self._num_selections += num_selections
        num_windows = request.windows.start.size
        can_check = request.is_contiguous and num_selections and num_windows <= self._room
        if self._worker_selector is None or not can_check:
            return ()
        try:
            if chooses_arms(request):
                found = verify_logged_arms(request, logged_arms(request))
            else:
                found = verify_logged_selection(request, self._worker_selector(request))
        except ValueError as error:
            self._reasons.setdefault(f"selection was not re-run: {error}")
            return ()
        self._room -= num_windows
        self._num_selections_checked += num_selections
        return found

    def result(self) -> RerunCheck:
        return RerunCheck(
            num_rounds=self._num_rounds,
            num_checked=self._num_checked,
            num_selections=self._num_selections,
            num_selections_checked=self._num_selections_checked,
            num_disagreements=self._num_disagreements,
            examples=(*self._examples, *self._reasons)[:MAX_EXAMPLES],
        )
