"""The table of policies: what each would have done, against what was logged."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from learner.selection.fixed import Fixed
from learner.selection.registry import PolicySpec
from replay.block_sums import block_bootstrap_statistic
from replay.cost import MeasuredCost
from replay.regret import Interval
from replay.summary import PolicyRow
from replay.walks import (
    ESTIMATED,
    IDLE,
    ROUNDS,
    SKIPPED,
    SWITCHES,
    TOKENS,
    WEIGHTED_ROUNDS,
    WEIGHTED_TOKENS,
    WINDOWS,
    PolicySums,
    PolicyWalks,
)


def policy_rows(
    walks: PolicyWalks, cost: MeasuredCost, generator: np.random.Generator
) -> Iterator[PolicyRow]:
    """Yield a row per policy; ``cost`` numbers drafters as ``walks`` does."""
    for spec, sums in zip(walks.specs, walks.sums, strict=True):
        seconds = policy_seconds(spec, sums, cost)
        yield _policy_row(spec, sums, walks, seconds, generator)


def policy_seconds(
    spec: PolicySpec, sums: PolicySums, cost: MeasuredCost
) -> NDArray[np.float64] | None:
    """Return the seconds of each block of requests, (B,); None if a cost was never measured.

    A policy that learns from windows pays for scoring them, a fixed one or a bandit does not.
    """
    by_draft, by_drafter = sums.by_draft.rows, sums.by_drafter.rows
    draft = np.where(by_drafter > 0, by_drafter * cost.draft_seconds[: by_drafter.shape[1]], 0.0)
    verify = np.where(by_draft > 0, by_draft * cost.verify_seconds[: by_draft.shape[1]], 0.0)
    seconds = np.asarray(draft.sum(axis=1) + verify.sum(axis=1))
    if _reads_windows(spec):
        windows = sums.counts.rows[:, WINDOWS]
        seconds += np.where(windows > 0, windows * cost.score_seconds, 0.0)
    return seconds if np.isfinite(seconds).all() else None


def _reads_windows(spec: PolicySpec) -> bool:
    return spec.name != Fixed.name and not spec.build(2).learns_rounds


def _policy_row(
    spec: PolicySpec,
    sums: PolicySums,
    walks: PolicyWalks,
    seconds: NDArray[np.float64] | None,
    generator: np.random.Generator,
) -> PolicyRow:
    total = sums.counts.total
    tokens, rounds, skipped = total[TOKENS], total[ROUNDS], total[SKIPPED]
    depth = max(sums.by_draft.rows.shape[1] - 1, 1)
    weighted = total[WEIGHTED_TOKENS], total[WEIGHTED_ROUNDS]
    columns = [WEIGHTED_TOKENS, WEIGHTED_ROUNDS]
    length = _ratio_to_logged(sums.counts.rows[:, columns], walks, 1, generator)
    speed = None
    if seconds is not None:
        own = np.column_stack([sums.counts.rows[:, TOKENS], seconds])
        speed = _ratio_to_logged(own, walks, 2, generator)
    total_seconds = None if seconds is None else float(seconds.sum())
    every = tokens + skipped
    return PolicyRow(
        policy=str(spec),
        num_speculative_tokens=sums.by_draft.rows.shape[1] - 1,
        num_requests=walks.num_requests,
        num_rounds=int(rounds),
        num_tokens=int(tokens),
        num_idle_rounds=int(total[IDLE]),
        num_skipped_tokens=int(skipped),
        num_switches=int(total[SWITCHES]),
        mean_acceptance_length=float(weighted[0] / weighted[1]) if weighted[1] else None,
        lowest_length=float(every / (rounds + skipped)) if every else None,
        highest_length=float(every / (rounds + skipped / (depth + 1))) if every else None,
        ratio=length.value if length else None,
        ratio_low=_end(length, "low"),
        ratio_high=_end(length, "high"),
        seconds=total_seconds,
        tokens_per_second=float(tokens / total_seconds) if total_seconds else None,
        speed_ratio=speed.value if speed else None,
        speed_ratio_low=_end(speed, "low"),
        speed_ratio_high=_end(speed, "high"),
        estimated_share=float(total[ESTIMATED] / every) if every else None,
    )


def _end(interval: Interval | None, name: str) -> float | None:
    """Return an end of the interval; None where there are too few requests for one."""
    value = None if interval is None else float(getattr(interval, name))
    return value if value is None or np.isfinite(value) else None


def _ratio_to_logged(
    own: NDArray[np.float64], walks: PolicyWalks, logged_cost: int, generator: np.random.Generator
) -> Interval | None:
    """Compare own (tokens, cost), (B, 2), with the logged tokens and cost, as a ratio of ratios."""
    rows = np.column_stack([own, walks.logged.rows[:, [0, logged_cost]]])

    def statistic(sums: NDArray[np.float64]) -> NDArray[np.float64]:
        tokens, cost, logged_tokens, logged = np.moveaxis(sums, -1, 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray((tokens / cost) / (logged_tokens / logged))

    value = float(statistic(rows.sum(axis=0))) if len(rows) else np.nan
    if not np.isfinite(value):
        return None
    found = block_bootstrap_statistic(rows, statistic, generator)
    return found or Interval(value=value, low=np.nan, high=np.nan)
