"""The comparators that a report shows, by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learner.shared_prior import domain_of
from replay import comparators
from replay.regret import ComparableRounds

CLAIRVOYANT = "clairvoyant (ceiling)"
SWITCHES_SHOWN = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, eq=False)
class Hindsight:
    """The comparators of some rounds.

    Attributes:
        switching_losses: Loss of the best sequence with at most S switches, for S = 0, 1, ....
        name_to_sequence: Comparators by name, in the order of the table, each int16 (T,).
    """

    switching_losses: NDArray[np.float64]
    name_to_sequence: dict[str, NDArray[np.int16]]


def hindsight(
    rounds: ComparableRounds, max_switches: int, streams: Sequence[str]
) -> Hindsight | None:
    """Find all comparators of a report; None without rounds or drafters to compare.

    ``streams`` names the streams that ``rounds.stream`` indexes.
    """
    if 0 in rounds.lengths.shape:
        return None
    losses = rounds.losses
    limit = min(max_switches, rounds.num_rounds - 1)
    shown = [0, *(count for count in SWITCHES_SHOWN if count <= limit)]
    switching = comparators.best_switching(losses, limit)
    best, *others = switching.sequences(shown)
    found = {switching_name(0): best}
    if np.ptp(rounds.stream):
        found["best per stream"] = comparators.best_per_group(losses, rounds.stream)
        names = sorted({domain_of(stream) for stream in streams})
        domain = np.array([names.index(domain_of(stream)) for stream in streams])
        if 1 < len(names) < len(streams):
            found["best per domain"] = comparators.best_per_group(losses, domain[rounds.stream])
    found["best per request"] = comparators.best_per_group(losses, rounds.request)
    found |= {switching_name(count): row for count, row in zip(shown[1:], others, strict=True)}
    found[CLAIRVOYANT] = comparators.clairvoyant(losses)
    return Hindsight(switching.total_losses, found)


def switching_name(num_switches: int) -> str:
    """Return the name of the best sequence with at most so many switches."""
    if num_switches == 0:
        return "best fixed drafter"
    return f"best with at most {num_switches} switch{'' if num_switches == 1 else 'es'}"
