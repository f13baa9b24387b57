"""Other policies over the same text: every request decoded again on paper, with the same coins.

``learner.walk`` says how and why. A policy of scope ``stream`` goes on where the stream's request
before ended, in order of completion; one of scope ``request`` starts every request anew; one of
scope ``both`` goes on from what its experts make of the stream's state (``learner.request_start``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from learner.selection import PolicySpec, parse_policy
from learner.selection.compiled import compiled
from learner.selection.fixed import Fixed
from learner.started_walks import StartedWalks, StreamEvidence
from learner.walk import Coins, PreparedTrace, Walker, WindowTrace, prepare
from replay.arm_walks import ArmPool, ArmRounds, ArmWalks
from replay.block_sums import BlockSums
from replay.errors import ReplayError
from replay.requests import RequestTrace
from schemas.events import NO_DRAFTER

TOKENS, ROUNDS, IDLE, SKIPPED, SWITCHES, ESTIMATED, WINDOWS = range(7)
WEIGHTED_TOKENS, WEIGHTED_ROUNDS, NUM_COUNTS = range(7, 10)
"""Columns of ``PolicySums.counts``: tokens emitted in rounds, rounds, of these without drafter,
tokens passed over, changes of drafter, tokens whose rounds are estimates, windows; and tokens and
rounds once more, each round weighed by one over the chance that its window was scored."""


def window_trace(request: RequestTrace) -> WindowTrace:
    """Return a request as its windows, positions counted from its first.

    At a position without window a logged round without drafter is taken as it is, and so is the
    last token of a request; where a window is there but every drafter sleeps, the target writes
    alone. Anything else is passed over.
    """
    windows = request.windows
    num_positions = request.end_position - request.first_position
    starts = windows.start.astype(np.int64) - request.first_position
    rows = slice(int(np.searchsorted(starts, 0)), int(np.searchsorted(starts, num_positions)))
    is_idle = np.zeros(num_positions, dtype=np.bool_)
    # Of a window that was broken off only level 1 is known: nobody slept there.
    is_idle[starts[rows]] = ~_is_broken(windows.realised_acceptance[rows], windows.num_levels[rows])
    without = request.rounds.drafter_index == NO_DRAFTER
    idle = request.rounds.first_position[without] - request.first_position
    # Rounds that the end of the request cut to nothing lie behind its last position.
    is_idle[idle[idle < num_positions]] = True
    if request.is_complete:
        is_idle[-1:] = True
    num_levels = windows.num_levels[rows]
    return WindowTrace(
        num_positions=num_positions,
        starts=starts[rows],
        num_levels=num_levels,
        is_whole=num_levels >= request.window_num_speculative_tokens[rows],
        acceptance_probability=windows.acceptance_probability[rows],
        realised_acceptance=windows.realised_acceptance[rows],
        is_idle=is_idle,
        is_censored=request.is_censored,
    )


def _is_broken(
    realised_acceptance: NDArray[np.float16], num_levels: NDArray[np.int16]
) -> NDArray[np.bool_]:
    """Return the windows whose second level some drafter's scores do not reach, (W,)."""
    if realised_acceptance.shape[1] < 2:
        return np.zeros(len(num_levels), dtype=np.bool_)
    # As bits, since numpy compares float16 slowly; beyond infinity lies NaN.
    is_missing = (realised_acceptance[:, :2].view(np.uint16) & 0x7FFF) > 0x7C00
    ends_early = (~is_missing[:, 0] & is_missing[:, 1]).any(axis=1)
    return np.asarray(ends_early & (num_levels > 1))


@compiled
def count_rounds(
    position: NDArray[np.int64],
    drafter: NDArray[np.int64],
    budget: NDArray[np.int64],
    number: NDArray[np.int64],
    num_positions: int,
    previous: int,
    by_draft: NDArray[np.float64],
    by_drafter: NDArray[np.float64],
) -> tuple[int, int, int]:
    """Count a walk's drafts, in place; return rounds without drafter, switches, last drafter.

    ``budget`` is the K of each round, ``number`` each drafter's number in the log, (N,).
    """
    num_idle = 0
    num_switches = 0
    for index in range(position.size):
        if drafter[index] < 0:
            by_draft[0] += 1.0
            num_idle += 1
            continue
        played = number[drafter[index]]
        drafted = min(budget[index], num_positions - position[index] - 1)
        by_draft[drafted] += 1.0
        by_drafter[played] += drafted
        if previous >= 0 and played != previous:
            num_switches += 1
        previous = played
    return num_idle, num_switches, previous


@dataclass(frozen=True, kw_only=True, slots=True)
class WalkOptions:
    """What is walked with.

    Attributes:
        policies: Specifications, as ``learner.selection.parse_policy`` reads them.
        num_speculative_tokens: Levels, at most; None = the logged ones.
        drafter_ids: Only these drafters; None = all that the log has.
        block: Complete windows learned at a time; None = as the workers did.
    """

    policies: tuple[str, ...] = ()
    num_speculative_tokens: int | None = None
    drafter_ids: tuple[str, ...] | None = None
    block: int | None = None


@dataclass(slots=True, eq=False)
class PolicySums:
    """What one policy did, per block of requests.

    Attributes:
        counts: Columns ``TOKENS``, ``ROUNDS``, ....
        by_draft: Verifications by number of drafted tokens, 0..K.
        by_drafter: Drafted tokens by the drafter's number in the log.
    """

    counts: BlockSums = field(default_factory=lambda: BlockSums(NUM_COUNTS))
    by_draft: BlockSums = field(default_factory=lambda: BlockSums(1))
    by_drafter: BlockSums = field(default_factory=lambda: BlockSums(0))


@dataclass(slots=True, eq=False)
class _Stream:
    """Where the policies stand in one stream."""

    drafter_ids: tuple[str, ...] = ()
    walkers: dict[int, Walker] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)


class PolicyWalks:
    """Walks every request with every policy, and adds up.

    Requests that have none of the drafters are left out.

    Attributes:
        specs: The policies.
        sums: What each did.
        logged: What the log did in the same requests: columns tokens, rounds, seconds.
        num_requests: Requests walked.

    Args:
        options: What to walk with.
        generator: The dice of the coins.
        drafter_to_number: Numbers of the log's drafters; new ones are appended to it.
        pool: What policies that choose (drafter, K) by time choose from; None = there is none.

    Raises:
        ReplayError: If a policy is unknown, or chooses by time without a pool.
    """

    def __init__(
        self,
        options: WalkOptions,
        generator: np.random.Generator,
        drafter_to_number: dict[str, int] | None = None,
        pool: ArmPool | None = None,
    ) -> None:
        self._options = options
        self._generator = generator
        self._streams: dict[str, _Stream] = {}
        self.specs = [parsed(text) for text in options.policies]
        self._arm_walks = {
            index: ArmWalks(spec, _given(pool, spec))
            for index, spec in enumerate(self.specs)
            if chooses_by_time(spec)
        }
        self._evidence = StreamEvidence()
        self._started_walks = {
            index: StartedWalks(spec, self._evidence)
            for index, spec in enumerate(self.specs)
            if starts_mixed(spec)
        }
        self.sums = [PolicySums() for _ in self.specs]
        self.logged = BlockSums(3)
        self._drafter_to_number = {} if drafter_to_number is None else drafter_to_number
        self.num_requests = 0

    def add(self, request: RequestTrace) -> None:
        """Walk one request with all policies, all with the same coins."""
        allowed = self._options.drafter_ids
        ids = tuple(i for i in request.drafter_ids if allowed is None or i in allowed)
        if not ids or not self.specs:
            return
        self.num_requests += 1
        for drafter_id in ids:
            self._drafter_to_number.setdefault(drafter_id, len(self._drafter_to_number))
        stream = self._streams.setdefault(request.stream, _Stream())
        if any(drafter_id not in stream.drafter_ids for drafter_id in ids):
            stream.drafter_ids = tuple(dict.fromkeys((*stream.drafter_ids, *ids)))
        trace = window_trace(request)
        coins = Coins.toss(self._generator, trace.num_positions, request.num_speculative_tokens)
        score_coins = self._generator.random(trace.num_positions)
        prepared = self._prepared(request, trace, coins)
        over_pool = _over(prepared, request, stream.drafter_ids)
        block = self._options.block or request.score_block
        for index, spec in enumerate(self.specs):
            if index in self._arm_walks:
                arms = self._arm_walks[index].walk(request, trace, coins, score_coins, block)
                self._count_arms(request, stream, index, arms)
            elif spec.name == Fixed.name:
                fixed = (spec.drafter,)
                self._walk(request, stream, index, fixed, _over(prepared, request, fixed), block)
            else:
                self._walk(request, stream, index, stream.drafter_ids, over_pool, block)
        if self._started_walks:
            self._evidence.learn(request.stream, stream.drafter_ids, over_pool)
        rounds = request.rounds
        seconds = sum(
            float(values.sum(dtype=np.float64))
            for values in (rounds.draft_seconds, rounds.verify_seconds, rounds.score_seconds)
        )
        self.logged.add(np.array([request.num_tokens, rounds.first_position.size, seconds]))

    def _prepared(self, request: RequestTrace, trace: WindowTrace, coins: Coins) -> PreparedTrace:
        depth = request.num_speculative_tokens
        wanted = self._options.num_speculative_tokens
        return prepare(
            trace, coins, num_speculative_tokens=depth if wanted is None else min(wanted, depth)
        )

    def _walk(
        self,
        request: RequestTrace,
        stream: _Stream,
        index: int,
        drafter_ids: tuple[str, ...],
        prepared: PreparedTrace,
        block: int,
    ) -> None:
        walker = stream.walkers.get(index)
        depth = prepared.num_speculative_tokens
        if walker is None:
            walker = Walker(
                self.specs[index],
                len(drafter_ids),
                drafter_ids=drafter_ids,
                num_speculative_tokens=depth,
            )
            stream.walkers[index] = walker
        walker.change_pool(drafter_ids)
        if index in self._started_walks:
            walked = self._started_walks[index].walk(
                request.stream,
                drafter_ids,
                walker,
                prepared,
                prompt_token_ids=request.prompt_token_ids.tolist(),
                block=block,
            )
        else:
            walked = walker.walk(prepared, block=block)
        numbers = [self._drafter_to_number.get(one, 0) for one in drafter_ids]
        self._count(
            request,
            stream,
            index,
            ArmRounds(
                position=walked.position,
                length=walked.length,
                drafter=walked.drafter,
                budget=np.full(walked.position.size, depth),
                num_scored=len(prepared.loss_to_losses["length"]),
            ),
            np.array(numbers, dtype=np.int64),
            depth,
        )

    def _count_arms(
        self, request: RequestTrace, stream: _Stream, index: int, rounds: ArmRounds
    ) -> None:
        pool = self._arm_walks[index].pool
        numbers = [
            self._drafter_to_number.setdefault(one, len(self._drafter_to_number))
            for one in pool.drafter_ids
        ]
        self._count(request, stream, index, rounds, np.array(numbers), pool.num_speculative_tokens)

    def _count(
        self,
        request: RequestTrace,
        stream: _Stream,
        index: int,
        rounds: ArmRounds,
        numbers: NDArray[np.int64],
        depth: int,
    ) -> None:
        by_draft = np.zeros(depth + 1)
        by_drafter = np.zeros(len(self._drafter_to_number))
        num_positions = request.end_position - request.first_position
        num_idle, num_switches, last = count_rounds(
            rounds.position,
            rounds.drafter,
            rounds.budget,
            numbers,
            num_positions,
            stream.last.get(index, -1),
            by_draft,
            by_drafter,
        )
        stream.last[index] = last
        num_tokens = int(rounds.length.sum())
        skipped = num_positions - num_tokens
        counts = np.zeros(NUM_COUNTS)
        counts[TOKENS], counts[ROUNDS] = num_tokens, len(rounds.position)
        counts[IDLE], counts[SKIPPED], counts[SWITCHES] = num_idle, skipped, num_switches
        counts[ESTIMATED] = skipped if request.is_deterministic else num_positions
        counts[WINDOWS] = rounds.num_scored
        weights = score_weights(request)
        weight = None if weights is None else weights[rounds.position]
        counts[WEIGHTED_TOKENS] = num_tokens if weight is None else weight @ rounds.length
        counts[WEIGHTED_ROUNDS] = counts[ROUNDS] if weight is None else weight.sum()
        sums = self.sums[index]
        sums.by_draft.add(by_draft)
        sums.by_drafter.add(by_drafter)
        sums.counts.add(counts)


def score_weights(request: RequestTrace) -> NDArray[np.float64] | None:
    """Return one over the chance that a window at each position was scored, (P,).

    None where everything was scored. Scoring is drawn without looking at the text, so rounds
    weighed like this stand for those that begin where nothing was scored.
    """
    rounds = request.rounds
    if (rounds.score_probability == 1.0).all():
        return None
    weights = np.ones(request.end_position - request.first_position)
    for first, count, chance in zip(
        rounds.first_position - request.first_position,
        rounds.num_emitted_tokens,
        rounds.score_probability,
        strict=True,
    ):
        weights[first : first + count] = 1.0 / chance
    scored = np.zeros(weights.size, dtype=np.bool_)
    starts = request.windows.start - request.first_position
    scored[starts[(starts >= 0) & (starts < weights.size)]] = True
    # The prompt's own pass and the last token are there whatever was scored.
    return np.where(scored, weights, 1.0)


def parsed(text: str) -> PolicySpec:
    """Read a policy's specification.

    Raises:
        ReplayError: If it is not one.
    """
    try:
        return parse_policy(text)
    except ValueError as error:
        raise ReplayError(f"cannot re-run {text}: {error}") from error


def chooses_by_time(spec: PolicySpec) -> bool:
    """Tell whether a policy chooses (drafter, K), so that costs must be known before."""
    return spec.objective == "seconds"


def starts_mixed(spec: PolicySpec) -> bool:
    """Tell whether a policy's requests start from what experts say, the prompt included."""
    return spec.scope == "both"


def _given(pool: ArmPool | None, spec: PolicySpec) -> ArmPool:
    if pool is None:
        raise ReplayError(f"cannot re-run {spec}: the costs of the log are not known yet")
    return pool


def _over(
    prepared: PreparedTrace, request: RequestTrace, drafter_ids: tuple[str, ...]
) -> PreparedTrace:
    """Return the request over another pool; those that it does not know sleep."""
    if drafter_ids == request.drafter_ids:
        return prepared
    known = {drafter_id: place for place, drafter_id in enumerate(request.drafter_ids)}
    return prepared.of_drafters([known.get(drafter_id, -1) for drafter_id in drafter_ids])
