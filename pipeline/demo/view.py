"""The live view of the demo: one table that changes in place, or one line per request in a log."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline.demo.releases import Trials
from pipeline.demo.traffic import TrafficStatistics

BAR_CELLS = 20


class DemoView:
    """Shows phase, speed, acceptance length, selection and releases.

    Args:
        console: Where to show it; not a terminal = one line per request.
        statistics: What to show.

    Attributes:
        trials: Per drafter the version on trial, asked at every update; None = there are none.
    """

    def __init__(self, console: Console, statistics: TrafficStatistics) -> None:
        self.trials: Trials | None = None
        self._console = console
        self._statistics = statistics
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._note = ""
        self._next_line = 0.0

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.stop()

    def say(self, note: str) -> None:
        """Show what is being done now."""
        self._note = note
        if self._console.is_terminal:
            self.update()
        else:
            self._console.print(note, highlight=False)

    def update(self) -> None:
        """Show the present numbers."""
        if self._console.is_terminal:
            self._live.update(self._panel())
        elif time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + 5.0
            self._console.print(self._line(), highlight=False, soft_wrap=True)

    def _panel(self) -> Group:
        statistics = self._statistics
        table = Table(box=box.SIMPLE_HEAD)
        for name, side in (
            ("drafter", "left"),
            ("version", "right"),
            ("acceptance length", "right"),
            ("published probability", "right"),
            ("played lately", "left"),
        ):
            table.add_column(name, justify=side)  # type: ignore[arg-type]
        trials = self._trials()
        if trials is not None:
            table.add_column("on trial")
        for name in statistics.drafter_ids:
            share = statistics.selection_share(name)
            bar = "█" * round(share * BAR_CELLS)
            length = statistics.phases[-1].recent(name)
            table.add_row(
                name,
                str(statistics.versions.get(name, 0) or "–"),
                "–" if length is None else f"{length:.2f}",
                f"{statistics.priors.get(name, 0.0):.2f}",
                f"{bar:<{BAR_CELLS}} {share:4.0%}",
                *([trials.get(name, "")] if trials is not None else ()),
            )
        return Group(Text(self._headline(), style="bold"), table, Text(self._note, style="dim"))

    def _trials(self) -> Mapping[str, str] | None:
        return None if self.trials is None else self.trials.now()

    def _headline(self) -> str:
        if not self._statistics.phases:
            return "starting"
        phase = self._statistics.phases[-1]
        speed = phase.num_tokens / max(phase.seconds, 1e-9)
        return (
            f"phase {len(self._statistics.phases)}: {phase.name}   {phase.num_tokens:,} tokens   "
            f"{speed:.1f} tokens/s   {phase.num_tokens / max(phase.num_rounds, 1):.2f} tokens/round"
        )

    def _line(self) -> str:
        statistics = self._statistics
        parts = [self._headline()]
        for name in statistics.drafter_ids:
            length = statistics.phases[-1].recent(name)
            if length is not None:
                share = statistics.selection_share(name)
                version = statistics.versions.get(name, 0)
                parts.append(f"{name} v{version} {length:.2f} ({share:.0%})")
        parts += [f"{name} {trial}" for name, trial in (self._trials() or {}).items()]
        return " | ".join(parts)
