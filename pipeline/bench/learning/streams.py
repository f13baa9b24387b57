"""The streams of the learning benchmark: which request when, and when its feedback arrives."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STREAMS = ("stationary", "abrupt", "recurring", "gradual", "poison")

HOME, AWAY, ELSEWHERE = "maths", "code", "sql"
"""A, which the head was trained on, B and C, which it has never seen."""

MOST_AWAY = 0.85
"""Share of B at the end of the gradual stream."""

POISON_SHARE = 0.1
"""Share of the poisoned stream whose labels are shuffled, in one burst in its middle."""

COPIED_SHARE = 0.2
"""Share of the events that are delivered twice under ``duplicates``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Q requests in the order in which they are served.

    Attributes:
        name: One of ``STREAMS``.
        domains: Of every request.
        indices: Of every request, into the traces of its domain.
        visits: Number of the stay in a domain that each request belongs to, from 0.
        is_poisoned: Whether the labels of its feedback are shuffled, (Q,).
    """

    name: str
    domains: tuple[str, ...]
    indices: tuple[int, ...]
    visits: tuple[int, ...]
    is_poisoned: NDArray[np.bool_]

    @property
    def switch(self) -> int:
        """The first request of another domain than the first's; Q if there is none."""
        away = [t for t, domain in enumerate(self.domains) if domain != self.domains[0]]
        return away[0] if away else len(self.domains)


def stream(
    name: str, num_requests: int, domain_to_size: Mapping[str, int], rng: np.random.Generator
) -> Stream:
    """Draw a stream; no request comes twice.

    Args:
        name: One of ``STREAMS``.
        num_requests: Q.
        domain_to_size: Traces that there are of each domain.
        rng: Draws the order.

    Raises:
        ValueError: If the name is unknown, or a domain has too few traces.
    """
    visits = _domains(name, num_requests, domain_to_size, rng)
    domains = [domain for domain, _ in visits]
    waiting = {domain: rng.permutation(size).tolist() for domain, size in domain_to_size.items()}
    for domain in set(domains):
        wanted = domains.count(domain)
        if wanted > domain_to_size[domain]:
            raise ValueError(
                f"stream {name}: {wanted} requests of {domain}, there are {domain_to_size[domain]}"
            )
    is_poisoned = np.zeros(num_requests, dtype=np.bool_)
    if name == "poison":
        burst = round(POISON_SHARE * num_requests)
        is_poisoned[num_requests // 2 : num_requests // 2 + burst] = True
    return Stream(
        name=name,
        domains=tuple(domains),
        indices=tuple(waiting[domain].pop() for domain in domains),
        visits=tuple(visit for _, visit in visits),
        is_poisoned=is_poisoned,
    )


def _domains(
    name: str, size: int, domain_to_size: Mapping[str, int], rng: np.random.Generator
) -> list[tuple[str, int]]:
    """Return domain and visit of every request."""
    match name:
        case "stationary" | "poison":
            return [(HOME, 0)] * size
        case "abrupt":
            away = min(size // 2, domain_to_size[AWAY])
            return [(HOME, 0)] * (size - away) + [(AWAY, 1)] * away
        case "recurring":
            quarter = min(size // 4, domain_to_size[AWAY], domain_to_size[ELSEWHERE])
            home = (size - 2 * quarter) // 2
            sizes = (home, quarter, size - 2 * quarter - home, quarter)
            order = (HOME, AWAY, HOME, ELSEWHERE)
            return [
                (domain, visit)
                for visit, (domain, count) in enumerate(zip(order, sizes, strict=True))
                for _ in range(count)
            ]
        case "gradual":
            chance = np.linspace(0.0, MOST_AWAY, size)
            is_away = (rng.random(size) < chance).tolist()
            return [(AWAY if one else HOME, 0) for one in is_away]
    raise ValueError(f"unknown stream {name!r}, expected one of: {', '.join(STREAMS)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrivals:
    """When the feedback of Q requests reaches the learner.

    Attributes:
        due: Per request, the requests whose feedback arrives before it is served, in order; one
            more element holds those that arrive after the last.
        workers: Worker that serves each request.
    """

    due: Sequence[Sequence[int]]
    workers: Sequence[int]


def arrivals(order: str, sizes: Sequence[int], rng: np.random.Generator) -> Arrivals:
    """Return when feedback arrives.

    Args:
        order: ``delay:<updates>``, ``workers:<number>``, or ``duplicates``: four workers, feedback
            that is late by up to eight requests and overtaken by that of other workers, and one
            event in five delivered twice.
        sizes: Tokens of every request, (Q,): how long serving it takes.
        rng: Draws times.

    Raises:
        ValueError: If the order is unknown.
    """
    kind, _, number = order.partition(":")
    if kind == "delay":
        late = int(number)
        due = [[t - 1 - late] if t > late else [] for t in range(len(sizes))]
        rest = list(range(max(len(sizes) - 1 - late, 0), len(sizes)))
        return Arrivals(due=[*due, rest], workers=[0] * len(sizes))
    if kind == "workers":
        return _of_workers(int(number), sizes, rng, most_late=0.0, copied=0.0)
    if kind == "duplicates":
        mean = float(np.mean(sizes))
        return _of_workers(4, sizes, rng, most_late=8.0 * mean, copied=COPIED_SHARE)
    raise ValueError(f"unknown order {order!r}, expected delay:0, workers:2 or duplicates")


def _of_workers(
    num_workers: int,
    sizes: Sequence[int],
    rng: np.random.Generator,
    *,
    most_late: float,
    copied: float,
) -> Arrivals:
    """Let each worker take the next request when it is free; its events arrive in its order."""
    free = [(0.0, worker) for worker in range(num_workers)]
    starts, workers, told = [], [], [0.0] * num_workers
    deliveries: list[tuple[float, int]] = []
    for index, size in enumerate(sizes):
        start, worker = heapq.heappop(free)
        end = start + size * float(rng.uniform(0.75, 1.25))
        heapq.heappush(free, (end, worker))
        starts.append(start)
        workers.append(worker)
        told[worker] = max(told[worker], end + most_late * float(rng.random()))
        deliveries.append((told[worker], index))
        if rng.random() < copied:
            deliveries.append((told[worker] + most_late * float(rng.random()), index))
    deliveries.sort()
    due: list[list[int]] = []
    taken = 0
    for start in [*starts, float("inf")]:
        before = taken
        while taken < len(deliveries) and deliveries[taken][0] <= start:
            taken += 1
        due.append([index for _, index in deliveries[before:taken]])
    return Arrivals(due=due, workers=workers)
