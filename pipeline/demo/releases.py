"""The releases of a demo run: what is on trial now, and what became of every version."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from learner.ports import ReleaseBoard
from learner.release_desk import ON_TRIAL
from pipeline.releases.release_history import ReleaseHistory
from schemas.events import ReleaseState

LOOK_SECONDS = 0.5
STATES = tuple(state.value for state in ReleaseState)


class Trials:
    """What stands beside the live versions, looked up on the board now and then.

    Args:
        board: The releases.
    """

    def __init__(self, board: ReleaseBoard) -> None:
        self._board = board
        self._next_look = 0.0
        self._drafter_to_trial: dict[str, str] = {}

    def now(self) -> Mapping[str, str]:
        """Return per drafter the version on trial and its state, like ``v7 canary``."""
        if time.monotonic() >= self._next_look:
            self._drafter_to_trial = {
                one.drafter_id: f"v{one.version} {one.state.value}"
                for one in self._board.read_beside()
                if one.state in ON_TRIAL
            }
            self._next_look = time.monotonic() + LOOK_SECONDS
        return self._drafter_to_trial


class ReleaseReport:
    """Counts the steps that the releases of a run took.

    Args:
        history: Of the run.
    """

    def __init__(self, history: ReleaseHistory) -> None:
        self._drafter_to_steps = {one: history.steps(one) for one in history.drafter_ids()}

    def results(self) -> dict[str, Any]:
        """Return per drafter how many steps led to each state, and what is live, as JSON types."""
        return {
            drafter_id: {
                "num_steps": self._counts(drafter_id),
                "live_version": self._live(drafter_id),
            }
            for drafter_id in self._drafter_to_steps
        }

    def show(self, console: Console) -> None:
        """Print the counts as a table, of the states that any drafter reached."""
        table = Table(
            title="Releases: steps to each state", title_justify="left", box=box.SIMPLE_HEAD
        )
        table.add_column("drafter", no_wrap=True)
        drafter_to_counts = {one: self._counts(one) for one in self._drafter_to_steps}
        reached = [one for one in STATES if any(c[one] for c in drafter_to_counts.values())]
        for state in (*reached, "live now"):
            table.add_column(state.replace("_", " "), justify="right")
        for drafter_id, counts in drafter_to_counts.items():
            row = [str(counts[state]) for state in reached]
            table.add_row(drafter_id, *row, f"v{self._live(drafter_id)}")
        console.print(table)

    def _counts(self, drafter_id: str) -> dict[str, int]:
        counts = Counter(step.state for step in self._drafter_to_steps[drafter_id])
        return {state: counts[state] for state in STATES}

    def _live(self, drafter_id: str) -> int | None:
        steps = self._drafter_to_steps[drafter_id]
        live = [step.version for step in steps if step.state == ReleaseState.LIVE.value]
        return live[-1] if live else None
