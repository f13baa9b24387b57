"""One pass over a log: columns, self-check and re-runs; then the tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from replay.errors import ReplayError
from replay.hindsight import Hindsight, hindsight
from replay.ports import SelectorFactory
from replay.reader import LogReader
from replay.regret import ComparableRounds, comparable_rounds
from replay.requests import RequestTrace, join_requests
from replay.rerun import Disagreement, Walk, verify_logged_rounds, verify_logged_selection, walk
from replay.selectors import logged_selector, selector_from_name
from replay.summary import ReplaySummary, RerunCheck, summarise
from replay.trace import Trace, TraceBuilder
from schemas.events import NO_DRAFTER

MAX_EXAMPLES = 5
DEFAULT_MAX_SWITCHES = 64
DEFAULT_MAX_RELEARNED = 50_000
"""Windows that the check of logged selection learns again: some seconds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Analysis:
    """A log, analysed: what the report is written from."""

    name: str
    trace: Trace
    rounds: ComparableRounds
    max_switches: int
    best: Hindsight | None
    summary: ReplaySummary


def analyse(
    log: Path,
    generator: np.random.Generator,
    *,
    policies: Sequence[str] = (),
    worker_selector: SelectorFactory | None = logged_selector,
    max_relearned: int | None = DEFAULT_MAX_RELEARNED,
    score_block: int | None = None,
    max_switches: int = DEFAULT_MAX_SWITCHES,
    on_request: Callable[[], None] | None = None,
) -> Analysis:
    """Read a log once, check it against itself, re-run ``policies`` over it, and sum up.

    Args:
        log: The data folder, its ``events`` folder, any folder below, or one file.
        generator: The dice of coins, selections and bootstrap.
        policies: Names for ``learner.selection.policy_from_name``; each starts every request anew.
        worker_selector: Remakes the selector of a request; logged selection probabilities are
            compared with its own. None = do not compare.
        max_relearned: Windows that this comparison may learn; the requests after them are not
            compared. None = compare all.
        score_block: Complete windows that ``policies`` learn at a time; None = as the workers did.
        max_switches: Largest S of the switching comparators.
        on_request: Called after each request, for a progress bar.

    Raises:
        ReplayError: If there is nothing to read, or a policy is unknown.
    """
    reader = LogReader(log)
    builder = TraceBuilder()
    check = _SelfCheck(worker_selector, max_relearned)
    walks = _Walks(policies, generator, score_block)
    for request in join_requests(reader):
        builder.add(request)
        check.add(request)
        walks.add(request)
        if on_request is not None:
            on_request()
    trace = builder.build()
    rounds = comparable_rounds(trace)
    best = hindsight(rounds, max_switches)
    summary = summarise(
        reader.summary(),
        trace,
        rounds,
        generator,
        check=check.result(),
        policy_to_walk=walks.policy_to_walk,
        best=best,
    )
    return Analysis(
        name=str(log),
        trace=trace,
        rounds=rounds,
        max_switches=max_switches,
        best=best,
        summary=summary,
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
            selector = self._worker_selector(request)
        except ValueError as error:
            self._reasons.setdefault(f"selection was not re-run: {error}")
            return ()
        self._room -= num_windows
        self._num_selections_checked += num_selections
        return verify_logged_selection(request, selector)

    def result(self) -> RerunCheck:
        return RerunCheck(
            num_rounds=self._num_rounds,
            num_checked=self._num_checked,
            num_selections=self._num_selections,
            num_selections_checked=self._num_selections_checked,
            num_disagreements=self._num_disagreements,
            examples=(*self._examples, *self._reasons)[:MAX_EXAMPLES],
        )


class _Walks:
    """Walks every request with every policy, all with the same coins."""

    def __init__(
        self, policies: Sequence[str], generator: np.random.Generator, score_block: int | None
    ) -> None:
        self._score_block = score_block
        self.policy_to_walk = {policy: Walk() for policy in policies}
        self._policy_to_factory = {policy: selector_from_name(policy) for policy in policies}
        self._generator = generator

    def add(self, request: RequestTrace) -> None:
        if not request.drafter_ids or not self._policy_to_factory:
            return
        seed = int(self._generator.integers(2**63))
        for policy, factory in self._policy_to_factory.items():
            try:
                selector = factory(request)
            except ValueError as error:
                raise ReplayError(f"cannot re-run {policy}: {error}") from error
            dice = np.random.default_rng(seed)
            self.policy_to_walk[policy] += walk(
                request, selector, dice, score_block=self._score_block
            )
