"""The selection benchmark: every policy on the same windows, and ratios paired by seed.

A seed makes one pool, one set of requests and one set of coins; all policies walk exactly those.
Ratios are formed per seed and given as their mean with a 95 % t-interval over the seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy.stats import t as student_t

from learner.selection import DEFAULT_POLICY, parse_policy
from pipeline.bench.bayes_filter import BayesFilter
from pipeline.bench.streams import (
    SelectionStream,
    play,
    play_choices,
    play_each,
    play_parts,
    selection_stream,
)
from pipeline.bench.synthetic import Shift, SyntheticPool, synthetic_pool, synthetic_requests

NUM_SEEDS = 5
NUM_REQUESTS = 60
NUM_TOKENS = 600
POOL_SIZES = (2, 4, 8, 16, 22, 32)

HEDGESPEC = "normal_hedge"
PUBLISHED_BANDITS = ("ucbspec", "exp3spec")
TUNED_BANDITS = (
    "ucb:width=0.1",
    "ucb",
    "ucb:width=0.5",
    "ucb:width=1.0",
    "metasd_ucb",
    "ucb:width=0.1,scope=stream",
    "ucb:scope=stream",
    "metasd_ucb:scope=stream",
    "exp3spec:scope=stream",
)
POLICIES = (
    DEFAULT_POLICY,
    f"{DEFAULT_POLICY}:choice=sample",
    f"{DEFAULT_POLICY}:choice=sticky",
    f"{DEFAULT_POLICY}:loss=length",
    HEDGESPEC,
    "normal_hedge:loss=first",
    "normal_hedge:scope=stream",
    "hedge",
    "hedge:loss=first",
    "follow_the_leader",
    "follow_the_leader:loss=first",
    "discounted_follow_the_leader",
    "fixed_share",
    "mixing_past_posteriors",
    "ada_normal_hedge",
    "squint",
    *PUBLISHED_BANDITS,
    *TUNED_BANDITS,
)

Lengths = Mapping[str, float]
"""Mean acceptance length of every policy and comparator on one stream."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float] | NDArray[np.float64]) -> Interval:
        """Return the t-interval of one value per seed; a single seed has no width."""
        sample = np.asarray(values, dtype=np.float64)
        mean = float(sample.mean())
        if len(sample) < 2:
            return cls(mean, mean, mean)
        half = float(
            student_t.ppf(0.975, len(sample) - 1) * sample.std(ddof=1) / np.sqrt(len(sample))
        )
        return cls(mean, mean - half, mean + half)

    def keys(self, name: str) -> dict[str, float]:
        """Return the three flat JSON keys."""
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


def ratio(runs: Sequence[Lengths], ours: str, theirs: str) -> Interval:
    """Return the mean of the paired ratios of two entries."""
    return Interval.of([run[ours] / run[theirs] for run in runs])


def played_lengths(stream: SelectionStream, policies: Sequence[str]) -> dict[str, float]:
    """Return the mean acceptance length of every policy on a stream."""
    return {name: play(stream, parse_policy(name)).mean_acceptance_length for name in policies}


def hindsight_lengths(stream: SelectionStream) -> dict[str, float]:
    """Return what the best fixed choices would have had: single, per domain, per request."""
    rounds = play_each(stream)
    tokens = stream.num_tokens
    found = {
        "random": tokens / rounds.mean(axis=1).sum(),
        "best single": tokens / rounds.sum(axis=0).min(),
        "best per request": tokens / rounds.min(axis=1).sum(),
    }
    by_group = [rounds[stream.groups == group].sum(axis=0) for group in np.unique(stream.groups)]
    found["best per domain"] = tokens / np.min(by_group, axis=1).sum()
    return {name: float(value) for name, value in found.items()}


def run_synthetic(
    *,
    seeds: Sequence[int] = tuple(range(NUM_SEEDS)),
    pool_sizes: Sequence[int] = POOL_SIZES,
    num_requests: int = NUM_REQUESTS,
    num_tokens: int = NUM_TOKENS,
    policies: Sequence[str] = POLICIES,
    console: Console,
) -> dict[str, Any]:
    """Run all policies on synthetic streams that stay and that shift inside requests.

    Returns:
        The flat keys of the benchmark and the whole table under ``table``.
    """
    jobs = [(size, shift, seed) for size in pool_sizes for shift in _SHIFTS for seed in seeds]
    runs: dict[tuple[int, Shift], list[Lengths]] = {}
    for size, shift, seed in track(jobs, "synthetic streams", console=console):
        # Dice of their own, so that pools of all sizes see the same traffic.
        of_pool, of_traffic = np.random.default_rng([seed, _SHIFTS.index(shift)]).spawn(2)
        pool = synthetic_pool(size, of_pool)
        found = _synthetic_lengths(pool, shift, num_requests, num_tokens, policies, of_traffic)
        runs.setdefault((size, shift), []).append(found)
    return {**_synthetic_keys(runs), "table": _table(runs)}


_SHIFTS: tuple[Shift, ...] = ("none", "inside")


def _synthetic_lengths(
    pool: SyntheticPool,
    shift: Shift,
    num_requests: int,
    num_tokens: int,
    policies: Sequence[str],
    generator: np.random.Generator,
) -> Lengths:
    requests = list(
        synthetic_requests(
            pool, generator, num_requests=num_requests, num_tokens=num_tokens, shift=shift
        )
    )
    ids = [f"drafter-{index}" for index in range(pool.rates.shape[1])]
    stream = selection_stream(
        ids, [r.trace for r in requests], [r.domain for r in requests], generator
    )
    found = played_lengths(stream, policies) | hindsight_lengths(stream)
    found["generalist"] = stream.num_tokens / float(play_each(stream)[:, 0].sum())
    found["best per segment"] = play_parts(stream, pool.best_of_domain).mean_acceptance_length
    hits = [r.trace.realised_acceptance[:, 0] > 0 for r in requests]
    num_inside = sum(int(np.count_nonzero(np.diff(r.domain))) for r in requests)
    for name, knows in (("Bayes filter", False), ("Bayes filter, exact", True)):
        told = BayesFilter.of(pool, num_inside / stream.num_tokens, knows_difficulty=knows)
        found[name] = play_choices(stream, told.choices(hits)).mean_acceptance_length
    return found


def _synthetic_keys(runs: Mapping[tuple[int, Shift], Sequence[Lengths]]) -> dict[str, float]:
    keys: dict[str, float] = {}
    for size in (8, 32):
        stationary = runs.get((size, "none"))
        if stationary:
            for bandit in PUBLISHED_BANDITS:
                name = f"normal_hedge_vs_{bandit}_n{size}"
                keys |= ratio(stationary, HEDGESPEC, bandit).keys(name)
    few, many = runs.get((8, "none")), runs.get((32, "none"))
    if few and many:
        drop = [a[HEDGESPEC] - b[HEDGESPEC] for a, b in zip(few, many, strict=True)]
        keys |= Interval.of(drop).keys("normal_hedge_drop_n8_to_n32")
    if few:
        keys |= ratio(few, DEFAULT_POLICY, HEDGESPEC).keys("default_vs_normal_hedge_stationary")
    shifting = runs.get((8, "inside"))
    for name, theirs in _SHIFTING_KEYS.items():
        if shifting:
            keys |= ratio(shifting, DEFAULT_POLICY, theirs).keys(name)
    return keys


_SHIFTING_KEYS = {
    "default_vs_normal_hedge_shifting": HEDGESPEC,
    "default_vs_segment_best_shifting": "best per segment",
    "default_vs_bayes_filter_shifting": "Bayes filter",
    "default_vs_exact_bayes_filter_shifting": "Bayes filter, exact",
}


def _table(runs: Mapping[tuple[int, Shift], Sequence[Lengths]]) -> list[dict[str, Any]]:
    """Return one row per stream, pool size and policy."""
    return [
        {
            "stream": "steady" if shift == "none" else "shifting",
            "num_drafters": size,
            "policy": name,
            **Interval.of([run[name] for run in found]).keys("mean_acceptance_length"),
        }
        for (size, shift), found in runs.items()
        for name in found[0]
    ]


def show(result: Mapping[str, Any], console: Console) -> None:
    """Print the table, policies by streams, and the ratios with their intervals."""
    rows = result["table"]
    columns = list(dict.fromkeys(_column(row) for row in rows))
    cells = {(row["policy"], _column(row)): row for row in rows}
    table = Table("mean acceptance length", *columns)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        table.add_row(policy, *(_cell(cells.get((policy, column))) for column in columns))
    console.print(table)
    for key in result:
        if f"{key}_low" in result:
            low, high = result[f"{key}_low"], result[f"{key}_high"]
            console.print(f"{key}: {result[key]:.3f} [{low:.3f}, {high:.3f}]")


def _column(row: Mapping[str, Any]) -> str:
    return f"{row['stream']}\nN = {row['num_drafters']}"


def _cell(row: Mapping[str, Any] | None) -> str:
    return f"{row['mean_acceptance_length']:.2f}" if row else ""
