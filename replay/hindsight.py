"""The comparators that a report shows, by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from replay import comparators
from replay.regret import ComparableRounds

CLAIRVOYANT = "clairvoyant (ceiling)"
SWITCHES_SHOWN = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True, eq=False)
class Hindsight:
    """The comparators of some rounds.

    Attributes:
        switching: The best switching sequences.
        name_to_sequence: Comparators by name, in the order of the table, each of shape (T,).
    """

    switching: comparators.SwitchingComparators
    name_to_sequence: dict[str, NDArray[np.int64]]


def hindsight(rounds: ComparableRounds, max_switches: int) -> Hindsight | None:
    """Find all comparators of a report; None without rounds or drafters to compare."""
    if 0 in rounds.losses.shape:
        return None
    limit = min(max_switches, rounds.num_rounds - 1)
    switching = comparators.best_switching(rounds.losses, limit)
    found = {switching_name(0): switching.sequence(0)}
    if np.unique(rounds.stream).size > 1:
        found["best per stream"] = comparators.best_per_group(rounds.losses, rounds.stream)
    found["best per request"] = comparators.best_per_group(rounds.losses, rounds.request)
    for num_switches in SWITCHES_SHOWN:
        if num_switches <= limit:
            found[switching_name(num_switches)] = switching.sequence(num_switches)
    found[CLAIRVOYANT] = comparators.clairvoyant(rounds.losses)
    return Hindsight(switching, found)


def switching_name(num_switches: int) -> str:
    """Return the name of the best sequence with at most so many switches."""
    if num_switches == 0:
        return "best fixed drafter"
    return f"best with at most {num_switches} switch{'' if num_switches == 1 else 'es'}"
