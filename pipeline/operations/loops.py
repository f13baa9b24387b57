"""The loops of a service: when each last moved, and what it cannot reach.

A loop that stands still is dead, and a restart helps; one that waits for the broker is alive, and
a restart does not. So the first makes a service unhealthy, and the second only not ready.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "draftloop_"
MOST_STILL_SECONDS = 120.0


class Loop:
    """One loop.

    Args:
        name: As metrics and messages call it.
        clock: Monotonic seconds.

    Attributes:
        lacks: What it cannot reach just now, in a line; empty = nothing.
        num_outages: How often it has met that.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self._clock = clock
        self._moved_seconds = clock()
        self.lacks = ""
        self.num_outages = 0

    @property
    def still_seconds(self) -> float:
        """Seconds since it last moved."""
        return self._clock() - self._moved_seconds

    def move(self) -> None:
        """Note that it goes round; called at least once per turn."""
        self._moved_seconds = self._clock()

    def miss(self, what: str) -> None:
        """Note an outage; it is alive, and waits."""
        self.lacks = what
        self.num_outages += 1
        self.move()

    def recover(self) -> None:
        """Note that it lacks nothing any more."""
        self.lacks = ""

    def moving(self, stop: Callable[[], bool]) -> Callable[[], bool]:
        """Return ``stop`` as a loop asks it that moves whenever it does."""

        def ask() -> bool:
            self.move()
            return stop()

        return ask


class Loops(Collector):
    """The loops of one process, as its page and Prometheus see them.

    Args:
        most_still_seconds: Longest time between two turns of a loop that is well.
    """

    def __init__(self, most_still_seconds: float = MOST_STILL_SECONDS) -> None:
        self._most_still_seconds = most_still_seconds
        self._loops: list[Loop] = []
        self._watched: dict[str, Callable[[], float]] = {}

    def loop(self, name: str) -> Loop:
        """Return the loop of this name, a new one if there is none."""
        for known in self._loops:
            if known.name == name:
                return known
        self._loops.append(Loop(name))
        return self._loops[-1]

    def watch(self, name: str, still_seconds: Callable[[], float]) -> None:
        """Watch another one, which says itself for how long it has stood still."""
        self._watched[name] = still_seconds

    def still(self) -> str:
        """Return which loops stand still and for how long; empty if none does."""
        return "; ".join(
            f"{name} stands still for {seconds:.0f} s, at most {self._most_still_seconds:.0f}"
            for name, seconds in self._name_to_still_seconds().items()
            if seconds > self._most_still_seconds
        )

    def lacking(self) -> str:
        """Return what the loops cannot reach; empty if nothing."""
        return "; ".join(f"{one.name}: {one.lacks}" for one in self._loops if one.lacks)

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics."""
        still = GaugeMetricFamily(
            PREFIX + "seconds_since_last_poll", "Since the loop went round.", labels=("loop",)
        )
        for name, seconds in self._name_to_still_seconds().items():
            still.add_metric((name,), seconds)
        yield still
        degraded = GaugeMetricFamily(
            PREFIX + "degraded", "1 while the loop waits for log or disk.", labels=("loop",)
        )
        outages = CounterMetricFamily(
            PREFIX + "outages", "Steps that met no log or a full disk.", labels=("loop",)
        )
        for one in self._loops:
            degraded.add_metric((one.name,), float(bool(one.lacks)))
            outages.add_metric((one.name,), one.num_outages)
        yield from (degraded, outages)

    def describe(self) -> Iterable[Metric]:
        """Yield nothing: the names need no value to be known."""
        return ()

    def _name_to_still_seconds(self) -> dict[str, float]:
        own = {one.name: one.still_seconds for one in self._loops}
        return own | {name: seconds() for name, seconds in self._watched.items()}
