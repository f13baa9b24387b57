"""The figures of the learning benchmark from its runs: flat keys and table rows, with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from learner.gate import break_even_verifications
from pipeline.bench.learning.costs import RoundSeconds
from pipeline.bench.learning.intervals import (
    Columns,
    Estimate,
    Figure,
    estimate,
    lowest_window,
    over_seeds,
    ratio,
)
from pipeline.bench.learning.plan import (
    AT_ONCE,
    ENSEMBLE,
    FIXED_STEPS,
    FORGETFUL,
    FORGETFUL_GATED,
    GATED,
    GRADIENT,
    OPTIMISTIC,
    SPAWNING,
    STATIC,
    RunSpec,
    fixed_step,
)
from pipeline.bench.learning.run import NOT_COMPARED, RunResult
from pipeline.bench.learning.streams import HOME, Stream

WINDOW = 20
"""Requests of a window of the poisoned stream."""

SECOND_VISIT_STARTS = 32
"""Requests with which the second visit to A starts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """All runs that were made, beside the static head on the same streams.

    Attributes:
        results: By what was run.
        streams: By seed and name.
        static: Verifications of the static head for every request, by seed and name.
        costs: Of a round.
    """

    results: Mapping[RunSpec, RunResult]
    streams: Mapping[tuple[int, str], Stream]
    static: Mapping[tuple[int, str], NDArray[np.int64]]
    costs: RoundSeconds

    def of(self, stream: str, policy: str, order: str = AT_ONCE) -> list[RunSpec]:
        """Return the runs of one policy on one stream, by seed."""
        wanted = (stream, policy, order)
        found = [one for one in self.results if (one.stream, one.policy, one.order) == wanted]
        return sorted(found, key=lambda one: one.seed)

    def static_rounds(self, spec: RunSpec) -> NDArray[np.int64]:
        """Return the static head's verifications on the stream of a run."""
        return self.static[spec.seed, spec.stream]

    def after_switch(self, spec: RunSpec) -> slice:
        """Return the requests after the first switch; all where there is none."""
        stream = self.streams[spec.seed, spec.stream]
        is_never = stream.switch == len(stream.domains)
        return slice(0 if is_never or spec.stream == "gradual" else stream.switch, None)

    def paired(
        self,
        specs: Sequence[RunSpec],
        columns: Callable[[RunSpec], Sequence[Any]],
        figure: Figure,
        *,
        is_ratio: bool = True,
    ) -> Estimate:
        """Return a figure of sums over requests, bootstrapped."""
        seeds: list[Columns] = [
            np.stack([np.asarray(one, dtype=np.float64) for one in columns(spec)], axis=1)
            for spec in specs
        ]
        return estimate(seeds, figure, is_ratio=is_ratio)

    def against(self, ours: Sequence[RunSpec], theirs: Mapping[int, RunSpec]) -> Estimate:
        """Return the ratio of acceptance lengths of two sets of runs on the same requests."""

        def columns(spec: RunSpec) -> Sequence[Any]:
            part = self.after_switch(spec)
            other = self.results[theirs[spec.seed]]
            return other.num_rounds[part], self.results[spec].num_rounds[part]

        return self.paired([one for one in ours if one.seed in theirs], columns, ratio)


def flat_keys(runs: Runs) -> dict[str, float]:
    """Return all keys whose runs are there."""
    makers: Sequence[Callable[[Runs], Mapping[str, Estimate]]] = (
        _against_static,
        _second_visit,
        _time_included,
        _ensemble,
        _delay_share,
        _optimistic,
        _poison,
    )
    keys: dict[str, float] = {}
    for make in makers:
        for name, found in make(runs).items():
            keys |= found.keys(name)
    return keys


def vs_static(runs: Runs, specs: Sequence[RunSpec], *, after_switch: bool) -> Estimate:
    """Return the ratio to the static head's acceptance length."""

    def columns(spec: RunSpec) -> Sequence[Any]:
        part = runs.after_switch(spec) if after_switch else slice(None)
        return runs.static_rounds(spec)[part], runs.results[spec].num_rounds[part]

    return runs.paired(specs, columns, ratio)


def _against_static(runs: Runs) -> dict[str, Estimate]:
    found: dict[str, Estimate] = {}
    if abrupt := runs.of("abrupt", GRADIENT):
        found["abrupt_after_switch_vs_static"] = vs_static(runs, abrupt, after_switch=True)
    if stationary := runs.of("stationary", GRADIENT):
        found["stationary_vs_static"] = vs_static(runs, stationary, after_switch=False)
    return found


def second_visit(runs: Runs, specs: Sequence[RunSpec]) -> Estimate:
    """Return how the second visit to A starts against the head as the first visit left it."""

    def columns(spec: RunSpec) -> Sequence[Any]:
        result, stream = runs.results[spec], runs.streams[spec.seed, spec.stream]
        is_back = np.array(stream.domains) == HOME
        is_back &= result.snapshot_rounds != NOT_COMPARED
        part = np.flatnonzero(is_back)[:SECOND_VISIT_STARTS]
        return result.snapshot_rounds[part], result.num_rounds[part]

    return runs.paired(specs, columns, ratio)


def _second_visit(runs: Runs) -> dict[str, Estimate]:
    specs = runs.of("recurring", SPAWNING)
    return {"recurring_second_visit": second_visit(runs, specs)} if specs else {}


def time_included(runs: Runs, specs: Sequence[RunSpec]) -> Estimate:
    """Return the ratio of tokens per second to the static head, learning counted in full."""
    seconds = runs.costs.round_seconds

    def columns(spec: RunSpec) -> Sequence[Any]:
        part, result = runs.after_switch(spec), runs.results[spec]
        learning = result.learning_seconds[part].copy()
        # What arrives when the stream has ended was learned too.
        learning[-1] += result.facts["last_learning_seconds"]
        spent = result.num_rounds[part] * seconds + learning
        return runs.static_rounds(spec)[part] * seconds, spent

    return runs.paired(specs, columns, ratio)


def _time_included(runs: Runs) -> dict[str, Estimate]:
    specs = runs.of("abrupt", GRADIENT)
    return {"time_included_vs_static": time_included(runs, specs)} if specs else {}


def best_fixed(runs: Runs, stream: str) -> dict[int, RunSpec]:
    """Return per seed the run of the step size that hindsight chooses for the stream."""
    names = [GRADIENT, *(fixed_step(rate) for rate in FIXED_STEPS)]
    by_seed: dict[int, list[RunSpec]] = defaultdict(list)
    for name in names:
        for spec in runs.of(stream, name):
            by_seed[spec.seed].append(spec)

    def total(spec: RunSpec) -> int:
        return int(runs.results[spec].num_rounds[runs.after_switch(spec)].sum())

    return {
        seed: min(specs, key=total) for seed, specs in by_seed.items() if len(specs) == len(names)
    }


def ensemble_by_stream(runs: Runs) -> dict[str, Estimate]:
    """Return the ensemble against the best fixed step, stream by stream."""
    found: dict[str, Estimate] = {}
    for stream in ("abrupt", "stationary"):
        best = best_fixed(runs, stream)
        specs = [one for one in runs.of(stream, ENSEMBLE) if one.seed in best]
        if specs:
            found[stream] = runs.against(specs, best)
    return found


def _ensemble(runs: Runs) -> dict[str, Estimate]:
    found = ensemble_by_stream(runs)
    if not found:
        return {}
    return {"ensemble_vs_best_fixed_step": min(found.values(), key=lambda one: one.value)}


def delay_share(runs: Runs, order: str, policy: str = GRADIENT) -> Estimate | None:
    """Return which share of the gain at once is left when feedback arrives in another order.

    None if it was not run, or nothing was gained.
    """
    at_once = {one.seed: one for one in runs.of("abrupt", policy)}
    specs = [one for one in runs.of("abrupt", policy, order) if one.seed in at_once]
    gained = vs_static(runs, specs, after_switch=True).value if specs else 1.0
    if gained <= 1.0:
        return None

    def columns(spec: RunSpec) -> Sequence[Any]:
        part = runs.after_switch(spec)
        prompt = runs.results[at_once[spec.seed]]
        rounds = (runs.results[spec].num_rounds[part], prompt.num_rounds[part])
        return (*rounds, runs.static_rounds(spec)[part])

    def share(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        late, prompt, static = (1.0 / sums[..., i] for i in range(3))
        gain = prompt - static
        return np.where(gain > 0.0, (late - static) / np.where(gain > 0.0, gain, 1.0), np.nan)

    return runs.paired(specs, columns, share, is_ratio=False)


def _delay_share(runs: Runs) -> dict[str, Estimate]:
    found = delay_share(runs, "delay:16")
    return {} if found is None else {"delay16_share_of_gain": found}


def _optimistic(runs: Runs) -> dict[str, Estimate]:
    specs = runs.of("gradual", OPTIMISTIC)
    plain = {one.seed: one for one in runs.of("gradual", GRADIENT)}
    if not specs or not plain:
        return {}
    return {"optimistic_vs_gradient_gradual": runs.against(specs, plain)}


def lowest_windows(runs: Runs, specs: Sequence[RunSpec]) -> Estimate:
    """Return the lowest window of any seed against the static head."""
    lowest = [
        lowest_window(runs.results[spec].num_rounds, runs.static_rounds(spec), width=WINDOW)
        for spec in specs
    ]
    return over_seeds(lowest, np.min)


def _poison(runs: Runs) -> dict[str, Estimate]:
    """Return the lowest windows with the gate and without, each of the learner it is worse for."""
    found: dict[str, Estimate] = {}
    for name, policies in (
        ("poison_lowest_window_vs_static", (GATED, FORGETFUL_GATED)),
        ("poison_lowest_window_gate_off", (GRADIENT, FORGETFUL)),
    ):
        specs = [runs.of("poison", policy) for policy in policies]
        lowest = [lowest_windows(runs, some) for some in specs if some]
        if lowest:
            found[name] = min(lowest, key=lambda one: one.value)
    return found


def run_rows(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per stream, policy and order, the static head's first."""
    places = {(one.stream, one.policy, one.order) for one in runs.results}
    rows = [_static_row(runs, stream) for stream in sorted({stream for stream, _, _ in places})]
    return rows + [_row(runs, *place) for place in sorted(places)]


def _static_row(runs: Runs, stream: str) -> dict[str, Any]:
    specs = [one for one in runs.results if one.stream == stream]
    seeds = {one.seed: one for one in specs}.values()
    return {
        "stream": stream,
        "policy": STATIC,
        "order": "",
        "num_seeds": len(seeds),
        **_length(runs, list(seeds), runs.static_rounds),
    }


def _row(runs: Runs, stream: str, policy: str, order: str) -> dict[str, Any]:
    specs = runs.of(stream, policy, order)
    results = [runs.results[spec] for spec in specs]
    row: dict[str, Any] = {
        "stream": stream,
        "policy": policy,
        "order": order,
        "num_seeds": len(specs),
        **_length(runs, specs, lambda spec: runs.results[spec].num_rounds),
        **vs_static(runs, specs, after_switch=False).keys("vs_static"),
        **vs_static(runs, specs, after_switch=True).keys("after_switch_vs_static"),
        **time_included(runs, specs).keys("time_included_vs_static"),
        **lowest_windows(runs, specs).keys("lowest_window_vs_static"),
        "update_seconds": _mean(one.learning_seconds.mean() for one in results),
        "break_even_verifications": _break_even(runs, specs),
    }
    for name in results[0].facts:
        row[name] = _mean(one.facts[name] for one in results)
    if stream == "recurring":
        row |= second_visit(runs, specs).keys("second_visit")
    if stream == "abrupt" and order != AT_ONCE:
        found = delay_share(runs, order, policy)
        row |= {} if found is None else found.keys("share_of_gain")
    return row


def _length(
    runs: Runs, specs: Sequence[RunSpec], rounds: Callable[[RunSpec], NDArray[np.int64]]
) -> dict[str, float]:
    def columns(spec: RunSpec) -> Sequence[Any]:
        return runs.results[spec].num_tokens, rounds(spec)

    return runs.paired(specs, columns, ratio).keys("mean_acceptance_length")


def _break_even(runs: Runs, specs: Sequence[RunSpec]) -> float | None:
    """Return the verifications after which an update has paid for itself; None = never."""
    ratios, seconds, tokens, rounds = vs_static(runs, specs, after_switch=True), [], 0, 0
    for spec in specs:
        part, result = runs.after_switch(spec), runs.results[spec]
        seconds.append(float(result.learning_seconds[part].mean()))
        tokens += int(result.num_tokens[part].sum())
        rounds += int(runs.static_rounds(spec)[part].sum())
    found = break_even_verifications(
        update_seconds=_mean(seconds),
        round_seconds=runs.costs.round_seconds,
        old_length=tokens / rounds,
        new_length=tokens / rounds * ratios.value,
    )
    return found if np.isfinite(found) else None


def _mean(values: Any) -> float:
    return float(np.mean([float(value) for value in values]))
