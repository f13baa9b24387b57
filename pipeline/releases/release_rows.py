"""What the gate decided, for the report: the steps of releases that came with evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.releases.release_history import FOLDER, ReleaseHistory, ReleaseStep
from replay.summary import ReleaseRow

MAX_STEPS = 50
"""Newest steps of a drafter that are looked through."""

_NUMBERS = (
    *("num_windows", "new_acceptance_length", "old_acceptance_length"),
    *("difference_low", "difference_high"),
)


def release_rows(log: Path) -> tuple[ReleaseRow, ...]:
    """Return the newest decisions of the gate in a data folder, all streams first, then each.

    Args:
        log: The data folder; anything else has no releases.
    """
    if not (log / FOLDER).is_dir():
        return ()
    history = ReleaseHistory(str(log))
    return tuple(
        row
        for drafter_id in history.drafter_ids()
        for step in history.steps(drafter_id, last=MAX_STEPS)
        for row in _rows(drafter_id, step)
    )


def _rows(drafter_id: str, step: ReleaseStep) -> Iterator[ReleaseRow]:
    evidence = step.evidence
    if evidence is None or not evidence["num_windows"]:
        return
    yield _row(drafter_id, step, evidence, stream=None)
    for one in evidence.get("streams", ()):
        yield _row(drafter_id, step, one, stream=one["stream"])


def _row(
    drafter_id: str, step: ReleaseStep, numbers: Mapping[str, Any], *, stream: str | None
) -> ReleaseRow:
    return ReleaseRow(
        drafter_id=drafter_id,
        version=step.version,
        state=step.state,
        produced_at=step.produced_at,
        stream=stream,
        num_streams=numbers.get("num_streams"),
        num_requests=numbers.get("num_requests"),
        **{name: numbers[name] for name in _NUMBERS},
    )
