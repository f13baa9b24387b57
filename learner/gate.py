"""The gate: is one version of a drafter better than another on the same verified windows?

Both versions are scored on windows that neither was trained on: the newer one was published
before they were verified. Windows of one request hang together, so a request is one observation:
the difference is a ratio of sums over requests with a cluster-robust Student interval (Cochran,
*Sampling Techniques*, section 6.3). Looking after every request would find a difference sooner
or later where there is none. Looks are therefore few, at 1, 2, 4, ... times the least number of
requests, and the ``j``-th spends ``error / (j (j + 1))`` of the error, which sums to ``error``.

A version that is better on average may be worse for somebody. Every stream with enough requests is
therefore compared for itself at the same looks. They share the look's error equally (Bonferroni),
and one stream in which the version is surely worse refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from schemas.events import CostModel, GateEvidence, StreamComparison

MAX_TOLD_STREAMS = 8
"""Streams that the evidence of a release names."""


class Decision(StrEnum):
    """What the evidence allows."""

    PROMOTE = "promote"
    WAIT = "wait"
    REFUSE = "refuse"


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSettings:
    """When a version is good enough.

    Attributes:
        error: Chance in (0, 0.5] that a version which is no better is promoted, that one which is
            no worse is refused, and that one which is no worse in any stream is refused for one.
        min_requests: Requests before the first look, >= 3.
        max_requests: Most requests after which a version that is still undecided may be replaced
            by a newer one; it begins with ``min_requests`` and doubles.
        min_gain: Difference in mean acceptance length that must be exceeded, >= 0. Versions that
            are as good on average differ from request to request: next to no gain is not worth
            what some requests lose.
        max_stream_loss: Difference in mean acceptance length that may surely be lost in a stream of
            at least ``min_requests`` requests, >= 0.
        canary_share: Share of the requests that a canary serves, in [0, 1); 0 = no canary.
        min_canary_requests: Requests that a canary serves before it goes live, >= 1.
        max_failed_requests: Requests in which a live version may fail before it is rolled back; a
            version under trial may not fail at all.
    """

    error: float = 0.05
    min_requests: int = 4
    max_requests: int = 128
    min_gain: float = 0.02
    max_stream_loss: float = 0.0
    canary_share: float = 0.5
    min_canary_requests: int = 2
    max_failed_requests: int = 1

    def __post_init__(self) -> None:
        if not 0.0 < self.error <= 0.5:
            raise ValueError(f"error={self.error}, expected (0, 0.5]")
        if not 3 <= self.min_requests <= self.max_requests:
            raise ValueError(
                f"min_requests={self.min_requests}, expected 3..max_requests={self.max_requests}"
            )
        if not 0.0 <= self.canary_share < 1.0:
            raise ValueError(f"canary_share={self.canary_share}, expected [0, 1)")


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedSums:
    """Windows per request and the sums of their acceptance lengths, each shape (R,).

    ``streams`` are those of the requests; empty = not known.
    """

    num_windows: NDArray[np.int64]
    new_lengths: NDArray[np.float64]
    old_lengths: NDArray[np.float64]
    streams: Sequence[str] = ()

    def of(self, chosen: Sequence[int]) -> PairedSums:
        """Return those of some requests, without their streams."""
        rows = list(chosen)
        return PairedSums(
            num_windows=self.num_windows[rows],
            new_lengths=self.new_lengths[rows],
            old_lengths=self.old_lengths[rows],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A decision with its numbers."""

    decision: Decision
    evidence: GateEvidence
    reason: str


def paired_evidence(sums: PairedSums, *, error: float) -> GateEvidence:
    """Compare two versions on the same windows.

    Args:
        sums: At least one request; every request has at least one window.
        error: Chance that the interval misses the difference, per side.

    Returns:
        Mean lengths per window and the interval of their difference; NaN below 2 requests.
    """
    total = int(sums.num_windows.sum())
    new, old = float(sums.new_lengths.sum()) / total, float(sums.old_lengths.sum()) / total
    difference, size = new - old, len(sums.num_windows)
    half = float("nan")
    if size > 1:
        rest = sums.new_lengths - sums.old_lengths - difference * sums.num_windows
        spread = float(np.sqrt(size / (size - 1) * np.sum(rest**2))) / total
        half = float(stdtrit(size - 1, 1.0 - error)) * spread
    return GateEvidence(
        num_windows=total,
        new_acceptance_length=new,
        old_acceptance_length=old,
        difference_low=difference - half,
        difference_high=difference + half,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedStreams:
    """Two versions compared stream by stream.

    Attributes:
        told: What a release says of them, at most ``MAX_TOLD_STREAMS`` and the rest together.
        worst: The stream in which the newer version surely loses most; None = in none.
    """

    told: tuple[StreamComparison, ...] = ()
    worst: StreamComparison | None = None


def compared_streams(
    sums: PairedSums, *, error: float, min_requests: int, max_loss: float = 0.0
) -> ComparedStreams:
    """Compare two versions within every stream.

    Args:
        sums: With the streams of the requests, or nothing is compared.
        error: Chance that the interval of any stream misses its difference, per side.
        min_requests: Streams with fewer are told, but not judged.
        max_loss: Difference that a stream may surely lose.
    """
    stream_to_rows: dict[str, list[int]] = {}
    for row, stream in enumerate(sums.streams):
        stream_to_rows.setdefault(stream, []).append(row)
    judged_streams = {s for s, rows in stream_to_rows.items() if len(rows) >= min_requests}
    share = error / max(len(judged_streams), 1)
    found = [
        _comparison(sums.of(rows), share, stream=stream) for stream, rows in stream_to_rows.items()
    ]
    is_worse = {
        one.stream
        for one in found
        if one.stream in judged_streams and one.difference_high < -max_loss
    }
    found.sort(key=lambda one: (one.stream not in is_worse, -one.num_windows))
    named, others = found[:MAX_TOLD_STREAMS], found[MAX_TOLD_STREAMS:]
    rows = [row for one in others for row in stream_to_rows[one.stream]]
    rest = [_comparison(sums.of(rows), share, num_streams=len(others))] if others else []
    worst = min(
        (one for one in found if one.stream in is_worse),
        key=lambda one: one.difference_high,
        default=None,
    )
    return ComparedStreams(told=(*named, *rest), worst=worst)


def _comparison(
    sums: PairedSums, error: float, *, stream: str = "", num_streams: int = 1
) -> StreamComparison:
    evidence = paired_evidence(sums, error=error)
    return StreamComparison(
        stream=stream,
        num_streams=num_streams,
        num_requests=len(sums.num_windows),
        num_windows=evidence.num_windows,
        new_acceptance_length=evidence.new_acceptance_length,
        old_acceptance_length=evidence.old_acceptance_length,
        difference_low=evidence.difference_low,
        difference_high=evidence.difference_high,
    )


def num_looks(num_requests: int, min_requests: int) -> int:
    """Return how many looks are due after so many requests."""
    looks = 0
    while min_requests * 2**looks <= num_requests:
        looks += 1
    return looks


def judged(
    sums: PairedSums, settings: GateSettings, *, look: int, cost_ratio: float = 1.0
) -> Verdict:
    """Judge a newer version at its ``look``-th look, 1 for the first.

    Args:
        sums: Of the requests so far.
        settings: When it is good enough.
        look: Its share of the error shrinks with it.
        cost_ratio: Seconds of a round with the newer version over the older one's: its acceptance
            length must grow by more than that. NaN counts as 1: the same architecture costs the
            same.
    """
    error = settings.error / (look * (look + 1))
    streams = compared_streams(
        sums, error=error, min_requests=settings.min_requests, max_loss=settings.max_stream_loss
    )
    evidence = replace(paired_evidence(sums, error=error), streams=streams.told)
    old, low = evidence.old_acceptance_length, evidence.difference_low
    if not np.isfinite([old, evidence.new_acceptance_length]).all():
        return Verdict(
            decision=Decision.REFUSE, evidence=evidence, reason="acceptance is not finite"
        )
    extra_cost = max(cost_ratio - 1.0, 0.0) if np.isfinite(cost_ratio) else 0.0
    needed = settings.min_gain + old * extra_cost
    numbers = (
        f"{evidence.new_acceptance_length:.3f} against {old:.3f} tokens per verification, "
        f"difference {low:+.3f}..{evidence.difference_high:+.3f} over "
        f"{len(sums.num_windows)} requests, needed {needed:+.3f}"
    )
    if evidence.difference_high < 0.0:
        return Verdict(decision=Decision.REFUSE, evidence=evidence, reason=f"worse: {numbers}")
    if streams.worst is not None:
        reason = f"{_worse_in(streams.worst)}; in all: {numbers}"
        return Verdict(decision=Decision.REFUSE, evidence=evidence, reason=reason)
    if low > needed:
        return Verdict(decision=Decision.PROMOTE, evidence=evidence, reason=f"better: {numbers}")
    return Verdict(decision=Decision.WAIT, evidence=evidence, reason=f"undecided: {numbers}")


def _worse_in(one: StreamComparison) -> str:
    return (
        f"worse in stream {one.stream}: {one.new_acceptance_length:.3f} against "
        f"{one.old_acceptance_length:.3f} tokens per verification, difference "
        f"{one.difference_low:+.3f}..{one.difference_high:+.3f} over {one.num_requests} requests"
    )


def round_seconds(cost: CostModel, drafter_index: int, num_speculative_tokens: int) -> float:
    """Return what a round of K drafted tokens costs; NaN where a part was never measured."""
    levels = len(cost.verify_seconds) - 1
    verify = cost.verify_seconds[min(num_speculative_tokens, levels)]
    return float(num_speculative_tokens * cost.draft_seconds[drafter_index] + verify)


def break_even_verifications(
    *, update_seconds: float, round_seconds: float, old_length: float, new_length: float
) -> float:
    """Return after how many verifications an update has paid for its own seconds.

    ``S > C_update / (round_seconds * (new / old - 1))``, from the break-even of OnlineSPEC's table
    with training counted; infinite if it gained nothing.
    """
    gain = new_length / old_length - 1.0
    return update_seconds / (round_seconds * gain) if gain > 0.0 else float("inf")
