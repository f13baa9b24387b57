"""What the vLLM benchmark found: ratios of tokens per second with intervals, paired by prompts.

A unit is what one ordering served of one prompt set at one concurrency: its tokens and its
seconds, for every method the same prompts. Intervals are the 2.5 and 97.5 percentiles over
resampled units (orderings x sets), all methods resampled alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from schemas.errors import KnownError

NONE, NGRAM, SUFFIX = "none", "ngram", "suffix"
DRAFTLOOP, LEARNING = "draftloop", "draftloop-learning"
BUILT_IN = (NONE, NGRAM, SUFFIX)
NUM_RESAMPLES = 2000

Request = Mapping[str, object]


class VllmBenchError(KnownError):
    """An engine did not do its part; the message says where to look."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """One pass of one method.

    Attributes:
        method: Its name.
        ordering: Which ordering of the prompts.
        concurrency: Most requests at a time.
        requests: As ``pipeline.bench.vllm.runner`` writes them.
        counters: vLLM's and the proposer's, over the pass.
    """

    method: str
    ordering: int
    concurrency: int
    requests: Sequence[Request]
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Units:
    """Tokens and seconds of a method, each (orderings, sets)."""

    tokens: NDArray[np.float64]
    seconds: NDArray[np.float64]


def units(
    passes: Sequence[Served],
    method: str,
    concurrency: int,
    sets: Sequence[str],
    *,
    half: int | None = None,
) -> Units:
    """Return a method's units at one concurrency.

    Args:
        passes: All of them.
        method: Which.
        concurrency: Which.
        sets: Names of the prompt sets.
        half: 0 or 1 for the first or second half of each pass's requests; None = all.
    """
    mine = [one for one in passes if (one.method, one.concurrency) == (method, concurrency)]
    mine.sort(key=lambda one: one.ordering)
    shape = (len(mine), len(sets))
    found = Units(np.zeros(shape), np.zeros(shape))
    for row, served in enumerate(mine):
        requests = list(served.requests)
        if half is not None:
            middle = len(requests) // 2
            requests = requests[middle:] if half else requests[:middle]
        for column, name in enumerate(sets):
            here = [one for one in requests if one["set"] == name]
            found.tokens[row, column] = sum(len(_tokens(one)) for one in here)
            found.seconds[row, column] = _seconds(here, concurrency)
    return found


def _seconds(requests: Sequence[Request], concurrency: int) -> float:
    """Return the seconds that requests of one set took: alone their sum, together their block's."""
    name = "seconds" if concurrency == 1 else "block_seconds"
    seconds = [float(str(one[name])) for one in requests]
    return sum(seconds) if concurrency == 1 else max(seconds, default=0.0)


def _tokens(request: Request) -> Sequence[int]:
    found = request["token_ids"]
    return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class Interval:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def keys(self, name: str) -> dict[str, float]:
        """Return the flat keys of JSON."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def resampled(
    statistic: Callable[[NDArray[np.int64], NDArray[np.int64]], float],
    shape: tuple[int, int],
    rng: np.random.Generator,
) -> Interval:
    """Return a statistic of units, (orderings, sets), with its interval.

    Args:
        statistic: Told which orderings and sets to use, each (units,).
        shape: Numbers of orderings and sets.
        rng: Draws the resamples.
    """
    rows, columns = (part.ravel() for part in np.indices(shape))
    size = len(rows)
    drawn = []
    for _ in range(NUM_RESAMPLES):
        pick = rng.integers(0, size, size)
        drawn.append(statistic(rows[pick], columns[pick]))
    low, high = np.nanpercentile(drawn, [2.5, 97.5])
    return Interval(statistic(rows, columns), float(low), float(high))


def speed_ratio(
    method_to_units: Mapping[str, Units],
    method: str,
    others: Sequence[str],
    rng: np.random.Generator,
) -> Interval:
    """Return a method's tokens per second over those of the best of others, on the whole mix."""

    def statistic(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> float:
        best = max(_rate(method_to_units[one], rows, columns) for one in others)
        return _rate(method_to_units[method], rows, columns) / best

    return resampled(statistic, method_to_units[method].tokens.shape, rng)


def worst_set_ratio(
    method_to_units: Mapping[str, Units],
    method: str,
    others: Sequence[str],
    rng: np.random.Generator,
) -> Interval:
    """Return the smallest ratio of any set to the best of others on that set."""
    shape = method_to_units[method].tokens.shape

    def statistic(rows: NDArray[np.int64], columns: NDArray[np.int64]) -> float:
        ratios = []
        for column in range(shape[1]):
            picked = rows[columns == column]
            if picked.size:
                here = np.full(picked.size, column)
                best = max(_rate(method_to_units[one], picked, here) for one in others)
                ratios.append(_rate(method_to_units[method], picked, here) / best)
        return min(ratios)

    return resampled(statistic, shape, rng)


def _rate(found: Units, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> float:
    seconds = found.seconds[rows, columns].sum()
    return float(found.tokens[rows, columns].sum() / seconds) if seconds > 0.0 else float("nan")


def overhead_share(passes: Sequence[Served], concurrency: int) -> Interval:
    """Return the proposer's share of the steps' time; low and high are those of single passes."""
    shares = []
    own = steps = 0.0
    for one in passes:
        if (one.method, one.concurrency) == (DRAFTLOOP, concurrency):
            mine = sum(v for k, v in one.counters.items() if k.startswith("own_seconds/"))
            whole = one.counters.get("step_seconds/", 0.0)
            own, steps = own + mine, steps + whole
            shares.append(mine / whole if whole else float("nan"))
    if not shares:
        return Interval(float("nan"), float("nan"), float("nan"))
    return Interval(own / steps if steps else float("nan"), min(shares), max(shares))


def equal_share(passes: Sequence[Served], method: str) -> float:
    """Return the share of requests whose tokens are those of vLLM without speculation."""
    texts: dict[tuple[object, ...], Sequence[int]] = {}
    for one in passes:
        if one.method == NONE:
            for request in one.requests:
                key = (one.ordering, one.concurrency, request["set"], request["index"])
                texts[key] = _tokens(request)
    found = [
        _tokens(request) == texts[key]
        for one in passes
        if one.method == method
        for request in one.requests
        if (key := (one.ordering, one.concurrency, request["set"], request["index"])) in texts
    ]
    return float(np.mean(found)) if found else float("nan")


def table(
    passes: Sequence[Served], methods: Sequence[str], sets: Sequence[str]
) -> list[dict[str, object]]:
    """Return tokens per second of every method, concurrency and set, and of all sets together."""
    rows: list[dict[str, object]] = []
    for concurrency in sorted({one.concurrency for one in passes}):
        for method in methods:
            found = units(passes, method, concurrency, sets)
            if not found.tokens.size:
                continue
            per_set = {
                name: round(float(t / s), 2) if s > 0.0 else None
                for name, t, s in zip(
                    sets, found.tokens.sum(axis=0), found.seconds.sum(axis=0), strict=True
                )
            }
            rows.append(
                {
                    "concurrency": concurrency,
                    "method": method,
                    "all": round(float(found.tokens.sum() / found.seconds.sum()), 2),
                    **per_set,
                    "equal_share": round(equal_share(passes, method), 4),
                    "parts": _parts(passes, method, concurrency),
                }
            )
    return rows


def _parts(passes: Sequence[Served], method: str, concurrency: int) -> dict[str, float]:
    """Return vLLM's and the proposer's counters, added up over the passes."""
    parts: dict[str, float] = {}
    for one in passes:
        if (one.method, one.concurrency) == (method, concurrency):
            for name, value in one.counters.items():
                parts[name] = round(parts.get(name, 0.0) + value, 4)
    return parts


def _paired(
    passes: Sequence[Served],
    methods: Sequence[str],
    concurrency: int,
    sets: Sequence[str],
    *,
    half: int | None = None,
) -> dict[str, Units]:
    """Return the units of methods in the orderings that all of them have served; {} for none."""
    here = [one for one in passes if one.concurrency == concurrency]
    served = [{one.ordering for one in here if one.method == method} for method in methods]
    common = set.intersection(*served)
    kept = [one for one in here if one.ordering in common]
    if not common:
        return {}
    return {method: units(kept, method, concurrency, sets, half=half) for method in methods}


def summary(
    passes: Sequence[Served], sets: Sequence[str], rng: np.random.Generator
) -> dict[str, float]:
    """Return the flat keys, of the concurrencies and methods that were measured."""
    found: dict[str, float] = {}
    concurrencies = sorted({one.concurrency for one in passes})
    worst = []
    for concurrency in concurrencies:
        by_method = _paired(passes, (*BUILT_IN, DRAFTLOOP), concurrency, sets)
        if not by_method:
            continue
        built_in = speed_ratio(by_method, DRAFTLOOP, BUILT_IN, rng)
        found |= built_in.keys(f"vs_best_builtin_{concurrency}")
        found |= speed_ratio(by_method, DRAFTLOOP, (NONE,), rng).keys(f"vs_none_{concurrency}")
        worst.append(worst_set_ratio(by_method, DRAFTLOOP, BUILT_IN, rng))
        found |= overhead_share(passes, concurrency).keys(f"overhead_share_{concurrency}")
    if worst:
        lowest = min(worst, key=lambda one: one.value)
        found |= lowest.keys("worst_set_vs_best_builtin")
    halves = _paired(passes, (*BUILT_IN, LEARNING), 1, sets, half=1)
    if halves:
        ratio = speed_ratio(halves, LEARNING, BUILT_IN, rng)
        found |= ratio.keys("learning_second_half_vs_best_builtin_1")
    return found
