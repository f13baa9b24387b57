"""Tokens per second: the default policy over arms against the best fixed (drafter, K) in hindsight.

Seconds are in target passes of one row. Both walk the same windows with the same coins; only the
policy pays for scoring. The comparator may be no speculation. Beside them stands what the default
policy takes that counts tokens alone: always four drafted, every window scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.arms import NO_SPECULATION, ArmCosts
from learner.priced_walk import PricedTrace, PricedWalker, prepare_priced
from learner.scoring_schedule import ScheduleSettings
from learner.selection import DEFAULT_POLICY, parse_policy
from learner.selection.compiled import compiled
from learner.walk import Coins, Walker, WindowTrace, prepare
from pipeline.bench.selection import Interval
from pipeline.bench.synthetic import SyntheticPool, synthetic_requests

CURVE_TO_SLOPE: Mapping[str, float] = {
    "batch 1": 0.005,
    "batch 4": 0.03,
    "batch 16": 0.15,
    "batch 64": 0.45,
}
"""What one more row adds to a verification: nearly nothing while memory is the limit."""

SCORE_BLOCK = 8
TOKENS_BY_DEFAULT = 4
"""K of a worker that does not count seconds."""

NUM_DOMAINS = 4
USELESS_RATE = 0.02
DEFAULT_SETTINGS = ScheduleSettings()


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterKind:
    """What a drafter costs, in target passes, and how good it is.

    Attributes:
        draft_seconds: Per drafted token.
        score_seconds: Per scored window.
        rates: Lowest and highest hit rate in a domain.
        home_rates: Likewise in the one domain it was made for; None = it has none.
    """

    draft_seconds: float
    score_seconds: float
    rates: tuple[float, float]
    home_rates: tuple[float, float] | None = None


LOOKUP = DrafterKind(draft_seconds=0.0, score_seconds=0.0005, rates=(0.05, 0.65))
HEAD = DrafterKind(
    draft_seconds=0.035, score_seconds=0.012, rates=(0.3, 0.55), home_rates=(0.75, 0.85)
)
BIG_HEAD = DrafterKind(draft_seconds=0.08, score_seconds=0.018, rates=(0.55, 0.7))
SMALL_LM = DrafterKind(draft_seconds=0.25, score_seconds=0.03, rates=(0.7, 0.82))

POOL = (LOOKUP, LOOKUP, HEAD, HEAD, HEAD, HEAD, BIG_HEAD, SMALL_LM)
"""N = 8. Scoring a window of all of them costs a tenth of a target pass."""

Traces = Sequence[WindowTrace]
MakeTraces = Callable[[np.random.Generator], Traces]


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRun:
    """One seed on one curve.

    Attributes:
        num_tokens: Emitted.
        fixed_seconds: Of every arm alone, (A,), without scoring.
        seconds: Of the policy, without scoring.
        score_seconds: Of its scoring.
        scored: Share of the positions whose windows were scored.
        best_arm: Name of the best arm in hindsight.
        seconds_by_tokens: Of the default policy that counts tokens alone, scoring included.
    """

    num_tokens: int
    fixed_seconds: NDArray[np.float64]
    seconds: float
    score_seconds: float
    scored: float
    best_arm: str
    seconds_by_tokens: float = math.nan

    @property
    def ratio(self) -> float:
        """Tokens per second against the best fixed arm."""
        return float(self.fixed_seconds.min()) / (self.seconds + self.score_seconds)

    @property
    def loss_against_none(self) -> float:
        """Share of the speed of no speculation that was lost; negative if it was faster."""
        none = float(self.fixed_seconds[NO_SPECULATION])
        return 1.0 - none / (self.seconds + self.score_seconds)


def pool_costs(kinds: Sequence[DrafterKind], slope: float, max_tokens: int) -> ArmCosts:
    """Return the costs of a pool where one more row adds ``slope`` passes to a verification."""
    return ArmCosts(
        draft_seconds=np.array([kind.draft_seconds for kind in kinds]),
        verify_seconds=1.0 + slope * np.arange(max_tokens + 1, dtype=np.float64),
        score_seconds=np.array([kind.score_seconds for kind in kinds]),
    )


def hit_rates(kinds: Sequence[DrafterKind], generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw the rates of a pool, (D, N); those with a home get one domain each, in turn."""
    rates = np.stack([generator.uniform(*kind.rates, NUM_DOMAINS) for kind in kinds], axis=1)
    at_home = [index for index, kind in enumerate(kinds) if kind.home_rates is not None]
    for turn, index in enumerate(at_home):
        home = kinds[index].home_rates
        if home is not None:
            rates[turn % NUM_DOMAINS, index] = generator.uniform(*home)
    return rates


def traffic(
    rates: NDArray[np.float64],
    generator: np.random.Generator,
    *,
    num_requests: int,
    num_tokens: int,
) -> Traces:
    """Return requests of which every other one changes its domain inside."""
    pool = SyntheticPool(rates, np.full_like(rates, np.nan))
    halves = [
        synthetic_requests(
            pool, generator, num_requests=num_requests, num_tokens=num_tokens, shift=shift
        )
        for shift in ("none", "inside")
    ]
    return [next(halves[index % 2]).trace for index in range(num_requests)]


@compiled
def count_rounds(
    accepted: NDArray[np.int16],
    is_idle: NDArray[np.bool_],
    max_tokens: int,
    rounds: NDArray[np.int64],
) -> None:
    """Add to ``rounds`` (A,) what every arm alone takes for a request, as ``walk`` counts them.

    An arm whose drafter is asleep emits one token.
    """
    num_positions, num_drafters = accepted.shape
    for arm in range(rounds.size):
        drafter = (arm - 1) // max_tokens
        most = (arm - 1) % max_tokens + 1
        position = 0
        while position < num_positions:
            length = 1
            has_window = False
            for other in range(num_drafters):
                has_window |= accepted[position, other] >= 0
            if has_window or is_idle[position]:
                rounds[arm] += 1
            if has_window and arm > 0:
                length += max(min(int(accepted[position, drafter]), most), 0)
            position += length


def fixed_seconds(requests: Sequence[PricedTrace], costs: ArmCosts) -> NDArray[np.float64]:
    """Return the seconds that every arm alone takes for the requests, (A,)."""
    arms = costs.arms
    rounds = np.zeros(len(arms), dtype=np.int64)
    for request in requests:
        count_rounds(request.accepted, request.is_idle, arms.max_speculative_tokens, rounds)
    return np.asarray(rounds * costs.seconds())


def run_policy(
    requests: Sequence[PricedTrace],
    costs: ArmCosts,
    *,
    policy: str = DEFAULT_POLICY,
    settings: ScheduleSettings = DEFAULT_SETTINGS,
    drafter_ids: Sequence[str] | None = None,
) -> CostRun:
    """Walk the requests with a policy over arms, beside every fixed arm."""
    walker = PricedWalker(parse_policy(policy), costs, settings=settings, block=SCORE_BLOCK)
    walked = [walker.walk(request) for request in requests]
    fixed = fixed_seconds(requests, costs)
    num_tokens = int(sum(int(w.length.sum()) for w in walked))
    ids = drafter_ids or [str(index) for index in range(costs.arms.num_drafters)]
    return CostRun(
        num_tokens=num_tokens,
        fixed_seconds=fixed,
        seconds=float(sum(w.seconds.sum() for w in walked)),
        score_seconds=float(sum(w.score_seconds.sum() for w in walked)),
        scored=sum(int(w.num_scored.sum()) for w in walked) / num_tokens,
        best_arm=costs.arms.names(ids)[int(fixed.argmin())],
    )


def prepared(traces: Traces, generator: np.random.Generator) -> list[PricedTrace]:
    """Toss every request's coins and lay it out."""
    return [
        prepare_priced(
            trace,
            Coins.toss(generator, trace.num_positions, trace.num_speculative_tokens),
            generator.random(trace.num_positions),
        )
        for trace in traces
    ]


@dataclass(frozen=True, slots=True)
class RoundsByTokens:
    """What a policy that counts tokens alone plays, whatever it costs.

    Attributes:
        num_tokens: Emitted; every one's window is scored.
        num_rounds: Rounds of each drafter, (N,).
        num_speculative_tokens: K of every round.
    """

    num_tokens: int
    num_rounds: NDArray[np.int64]
    num_speculative_tokens: int

    @classmethod
    def of(cls, traces: Traces, generator: np.random.Generator) -> RoundsByTokens:
        """Walk the requests with the default policy."""
        num_drafters = traces[0].realised_acceptance.shape[2]
        depth = min(TOKENS_BY_DEFAULT, traces[0].num_speculative_tokens)
        walker = Walker(parse_policy(DEFAULT_POLICY), num_drafters)
        num_tokens, num_rounds = 0, np.zeros(num_drafters, dtype=np.int64)
        for trace in traces:
            coins = Coins.toss(generator, trace.num_positions, trace.num_speculative_tokens)
            walked = walker.walk(prepare(trace, coins, num_speculative_tokens=depth))
            num_tokens += walked.num_tokens
            num_rounds += np.bincount(walked.drafter, minlength=num_drafters)
        return cls(num_tokens, num_rounds, depth)

    def seconds(self, costs: ArmCosts) -> float:
        """Return what these rounds and the scoring of every window cost."""
        depth = self.num_speculative_tokens
        of_round = depth * costs.draft_seconds + costs.verify_seconds[depth]
        return float(self.num_rounds @ of_round + self.num_tokens * costs.score_seconds.sum())


def cost_runs(
    make_traces: MakeTraces,
    kinds: Sequence[DrafterKind],
    seeds: Sequence[int],
    *,
    settings: ScheduleSettings = DEFAULT_SETTINGS,
) -> dict[str, list[CostRun]]:
    """Run every curve on the same requests, seed by seed; ``make_traces`` gets the seed's dice."""
    runs: dict[str, list[CostRun]] = {curve: [] for curve in CURVE_TO_SLOPE}
    for seed in seeds:
        generator = np.random.default_rng([seed, len(kinds)])
        traces = make_traces(generator)
        requests = prepared(traces, generator)
        by_tokens = RoundsByTokens.of(traces, generator)
        max_tokens = requests[0].probability.shape[2]
        for curve, slope in CURVE_TO_SLOPE.items():
            costs = pool_costs(kinds, slope, max_tokens)
            run = run_policy(requests, costs, settings=settings)
            runs[curve].append(replace(run, seconds_by_tokens=by_tokens.seconds(costs)))
    return runs


def cost_keys(
    runs: Mapping[str, Sequence[CostRun]], useless: Mapping[str, Sequence[CostRun]]
) -> dict[str, float]:
    """Return the flat keys: the worst curve of each, with its interval over seeds."""
    ratios = [Interval.of([run.ratio for run in found]) for found in runs.values()]
    losses = [Interval.of([run.loss_against_none for run in found]) for found in useless.values()]
    worst_ratio = min(ratios, key=lambda interval: interval.mean)
    worst_loss = max(losses, key=lambda interval: interval.mean)
    return worst_ratio.keys("cost_vs_best_fixed_arm") | worst_loss.keys("useless_pool_loss")


def cost_table(runs: Mapping[str, Sequence[CostRun]], *, stream: str) -> list[dict[str, Any]]:
    """Return one row per curve: ratio, speeds in tokens per pass, share scored, best arms."""
    return [
        {
            "stream": stream,
            "curve": curve,
            **Interval.of([run.ratio for run in found]).keys("cost_vs_best_fixed_arm"),
            **Interval.of([run.loss_against_none for run in found]).keys("loss_against_none"),
            "tokens_per_pass": _mean(r.num_tokens / (r.seconds + r.score_seconds) for r in found),
            "tokens_per_pass_without_scoring": _mean(r.num_tokens / r.seconds for r in found),
            "tokens_per_pass_best_fixed": _mean(
                r.num_tokens / r.fixed_seconds.min() for r in found
            ),
            "tokens_per_pass_by_tokens": _mean(r.num_tokens / r.seconds_by_tokens for r in found),
            "share_scored": _mean(r.scored for r in found),
            "best_fixed": [run.best_arm for run in found],
        }
        for curve, found in runs.items()
    ]


def _mean(values: Any) -> float:
    return float(np.mean([float(value) for value in values]))


def cost_rows(
    seeds: Sequence[int],
    *,
    num_requests: int = 60,
    num_tokens: int = 600,
    kinds: Sequence[DrafterKind] = POOL,
    settings: ScheduleSettings = DEFAULT_SETTINGS,
) -> dict[str, Any]:
    """Run the cost benchmark on simulated traffic.

    Three streams: requests of four domains, some of which change inside; one domain for ever,
    where nothing can be gained by switching and scoring only costs; and a useless pool.

    Returns:
        ``cost_vs_best_fixed_arm`` (of the first stream) and ``useless_pool_loss``, each the worst
        of the four curves with its 95 % interval, and all streams and curves under ``cost_table``.
    """
    size = {"num_requests": num_requests, "num_tokens": num_tokens}

    def mixed(generator: np.random.Generator) -> Traces:
        return traffic(hit_rates(kinds, generator), generator, **size)

    def one_domain(generator: np.random.Generator) -> Traces:
        return traffic(hit_rates(kinds, generator)[:1], generator, **size)

    runs = cost_runs(mixed, kinds, seeds, settings=settings)
    useless = cost_runs(
        lambda generator: traffic(useless_rates(len(kinds), generator), generator, **size),
        kinds,
        seeds,
        settings=settings,
    )
    table = [
        *cost_table(runs, stream="four domains"),
        *cost_table(cost_runs(one_domain, kinds, seeds, settings=settings), stream="one domain"),
        *cost_table(useless, stream="useless pool"),
    ]
    return {**cost_keys(runs, useless), "cost_table": table}


def useless_rates(num_drafters: int, generator: np.random.Generator) -> NDArray[np.float64]:
    """Draw hit rates of drafters that all but never hit, (D, N)."""
    return generator.uniform(1e-4, USELESS_RATE, (NUM_DOMAINS, num_drafters))
