"""What a run's events say about its drafters, request by request, while it happens."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Console
from rich.table import Table

from learner.measures import expected_acceptance_length, walked_acceptance_length
from learner.trial import is_shadow
from schemas.events import VerificationEvent

RECENT_REQUESTS = 8
"""Requests of the mean that the demo reports."""


@dataclass(slots=True)
class PhaseStatistics:
    """One phase: per request, the walked mean acceptance length of every drafter."""

    name: str
    num_tokens: int = 0
    num_rounds: int = 0
    seconds: float = 0.0
    drafter_to_lengths: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    drafter_to_rounds: Counter[str] = field(default_factory=Counter)

    def recent(self, drafter_id: str) -> float | None:
        """Return the mean over the last requests, or None before the first."""
        lengths = self.drafter_to_lengths[drafter_id][-RECENT_REQUESTS:]
        return float(np.mean(lengths)) if lengths else None


class TrafficStatistics:
    """Follows the events of one worker.

    Attributes:
        phases: Finished phases and the present one.
        drafter_ids: Order of the pool.
        versions: Weights version per drafter.
        priors: Probability per drafter that the newest request's selection started from.
    """

    def __init__(self) -> None:
        self.phases: list[PhaseStatistics] = []
        self.drafter_ids: tuple[str, ...] = ()
        self.versions: dict[str, int] = {}
        self.priors: dict[str, float] = {}
        self._windows: list[tuple[NDArray[np.int32], NDArray[np.float64]]] = []
        self._recent_rounds: list[str] = []

    def begin_phase(self, name: str) -> None:
        """Count what follows under ``name``."""
        self.phases.append(PhaseStatistics(name=name))

    def add(self, event: VerificationEvent) -> None:
        """Take the next event of the worker."""
        phase = self.phases[-1]
        ids = event.drafter_ids
        # A version on trial stands beside its drafter: it is scored, and never plays there.
        own = [place for place, one in enumerate(ids) if not is_shadow(one)]
        self.drafter_ids = tuple(ids[place] for place in own)
        self.versions = {d.drafter_id: d.weights_version for d in event.drafters}
        self.priors = dict(zip(ids, event.prior_probabilities.tolist(), strict=True))
        phase.num_tokens += event.num_positions
        phase.num_rounds += len(event.rounds.first_position)
        rounds = event.rounds
        for seconds in (rounds.draft_seconds, rounds.verify_seconds, rounds.score_seconds):
            phase.seconds += float(seconds.sum())
        played = [ids[i] for i in rounds.drafter_index if i >= 0]
        phase.drafter_to_rounds.update(played)
        self._recent_rounds = (self._recent_rounds + played)[-200:]
        windows = event.windows
        lengths = expected_acceptance_length(
            windows.acceptance_probability,
            windows.realised_acceptance,
            num_levels=windows.num_levels,
        )
        self._windows.append((windows.start, lengths[:, own]))
        if event.is_final:
            self._finish_request(phase)

    def selection_share(self, drafter_id: str) -> float:
        """Return the share of the recent rounds that a drafter played, in [0, 1]."""
        return self._recent_rounds.count(drafter_id) / max(len(self._recent_rounds), 1)

    def results(self) -> list[dict[str, Any]]:
        """Return every phase as JSON types."""
        return [
            {
                "domain": phase.name,
                "num_tokens": phase.num_tokens,
                "num_rounds": phase.num_rounds,
                "mean_acceptance_length": phase.num_tokens / max(phase.num_rounds, 1),
                "tokens_per_second": phase.num_tokens / max(phase.seconds, 1e-9),
                "drafter_to_first_request": {
                    name: lengths[0] for name, lengths in phase.drafter_to_lengths.items()
                },
                "drafter_to_last_requests": {
                    name: phase.recent(name) for name in phase.drafter_to_lengths
                },
                "drafter_to_rounds": dict(phase.drafter_to_rounds),
            }
            for phase in self.phases
        ]

    def show(self, console: Console) -> None:
        """Print per phase and drafter where it began and where it ended."""
        table = Table(
            title="Mean acceptance length per drafter: first request, last requests",
            title_justify="left",
            box=box.SIMPLE_HEAD,
        )
        table.add_column("drafter")
        for phase in self.phases:
            table.add_column(f"{phase.name}\n{phase.num_tokens:,} tokens", justify="right")
        for name in self.drafter_ids:
            cells = []
            for phase in self.phases:
                lengths = phase.drafter_to_lengths[name]
                cells.append(
                    f"{lengths[0]:.2f} → {np.mean(lengths[-RECENT_REQUESTS:]):.2f}"
                    if lengths
                    else "–"
                )
            table.add_row(name, *cells)
        console.print(table)

    def _finish_request(self, phase: PhaseStatistics) -> None:
        starts = np.concatenate([start for start, _ in self._windows])
        lengths = np.concatenate([length for _, length in self._windows])
        self._windows = []
        for index, name in enumerate(self.drafter_ids):
            walked = walked_acceptance_length(starts, lengths[:, index])
            if walked is not None:
                phase.drafter_to_lengths[name].append(walked)
