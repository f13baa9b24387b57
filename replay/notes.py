"""Sentences on what is partial, missing or estimated in a log, and why."""

from __future__ import annotations

import math
from collections.abc import Iterator

from replay.reader import LogSummary
from replay.regret import ComparableRounds
from replay.summary import CalibrationRow, OffPolicyRow, PolicyRow
from replay.trace import Trace


def missing_parts(log: LogSummary, trace: Trace) -> Iterator[str]:
    """Yield what makes the log partial."""
    if log.num_unreadable_files:
        files = "file" if log.num_unreadable_files == 1 else "files"
        yield f"Partial: {log.num_unreadable_files} unreadable {files} (listed under Log)."
    num_cut = int((~trace.request_is_complete).sum())
    if num_cut:
        yield (
            f"Partial: {num_cut} of {trace.request_is_complete.size} requests are incomplete "
            "(still running, dropped, or the log was cut)."
        )


def missing_comparisons(trace: Trace, rounds: ComparableRounds) -> Iterator[str]:
    """Yield what cannot be compared, and why."""
    if trace.rounds.request.size == 0:
        yield "No rounds: nothing was verified, so there is nothing to compare."
    elif not trace.drafter_ids:
        yield "No drafters: every round wrote one token; there is nothing to compare."
    elif not trace.num_windows:
        yield (
            "No scoring: the log holds no windows, so drafters that were not played and regret "
            "are unknown. Turn scoring on in the worker."
        )
    elif rounds.num_left_out:
        yield (
            f"Regret leaves out {rounds.num_left_out} of {trace.rounds.request.size} rounds whose "
            "window is not in the log."
        )
    if len(trace.drafter_ids) == 1 and rounds.num_rounds:
        yield "One drafter only: all comparators are that drafter."
    for drafter_id, count in zip(trace.drafter_ids, rounds.num_unscored, strict=True):
        if count:
            yield (
                f"{drafter_id} was not scored in {count} of {rounds.num_rounds} compared rounds; "
                "there it counts as no drafter."
            )


def alarms(rows: tuple[CalibrationRow, ...]) -> Iterator[str]:
    """Yield the drafters whose scores are wrong, at the level where it shows most."""
    worst: dict[str, CalibrationRow] = {}
    for row in rows:
        if row.is_off and row.ratio is not None:
            before = worst.get(row.drafter_id)
            if before is None or _distance(row) > _distance(before):
                worst[row.drafter_id] = row
    for row in worst.values():
        yield (
            f"Alarm: {row.drafter_id} is accepted {row.ratio:.2f} times as often at level "
            f"{row.level} as its scores say; what is computed from its scores is off by as much."
        )


def _distance(row: CalibrationRow) -> float:
    return abs(row.realised - row.predicted) / math.sqrt(max(row.realised + row.predicted, 1.0))


def mixtures(log: LogSummary) -> Iterator[str]:
    """Yield what the log mixes."""
    if len(log.num_speculative_tokens) > 1:
        depths = ", ".join(map(str, log.num_speculative_tokens))
        yield f"Mixed K ({depths}): lengths are in tokens, losses relative to each K."
    if len(log.schema_versions) > 1:
        versions = ", ".join(map(str, log.schema_versions))
        yield (
            f"Mixed schema versions ({versions}): what older events lack is read as its default "
            "(docs/events.md)."
        )


def refusals(rows: tuple[OffPolicyRow, ...]) -> Iterator[str]:
    """Yield why a policy could not be estimated from what was played."""
    for row in rows:
        if row.refusal is not None:
            yield f"{row.policy} cannot be estimated: {row.refusal}."


def estimates(policies: tuple[PolicyRow, ...]) -> Iterator[str]:
    """Yield what of the re-runs is an estimate, and how far it can be off."""
    for row in policies:
        if row.mean_acceptance_length is None:
            yield f"{row.policy}: there is no window to walk on, so it has no length."
        elif row.num_skipped_tokens:
            share = row.num_skipped_tokens / (row.num_tokens + row.num_skipped_tokens)
            yield (
                f"{row.policy}: {share:.1%} of the tokens have no window and are passed over; "
                f"whatever happened there, its length lies in {row.lowest_length:.3f} to "
                f"{row.highest_length:.3f}."
            )
        if row.mean_acceptance_length is not None and row.seconds is None:
            yield f"{row.policy}: it drafts with drafters whose cost the log never measured."
