"""What goes wrong in drafting costs drafts, never an answer: counted, told once, switched off."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

MOST_IN_A_ROW = 3
"""Failures one after the other that switch something off."""

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Guard:
    """Runs parts of a step, and keeps what they raise away from the engine.

    Args:
        note: Told the kind of every failure.

    Attributes:
        kind_to_failures: How often each part failed.
    """

    def __init__(self, note: Callable[[str], None] = lambda _: None) -> None:
        self._note = note
        self.kind_to_failures: Counter[str] = Counter()
        self._in_a_row: Counter[str] = Counter()
        self._told: set[tuple[str, str]] = set()

    def run(self, kind: str, work: Callable[[], T], otherwise: T) -> T:
        """Return what ``work`` returns, or ``otherwise`` if it raises or is switched off.

        Args:
            kind: What it is, as it is counted and told.
            work: Any part of a step.
            otherwise: What to go on with.
        """
        if self.is_off(kind):
            return otherwise
        try:
            result = work()
        except Exception as error:
            self._failed(kind, error)
            return otherwise
        self._in_a_row[kind] = 0
        return result

    def is_off(self, kind: str) -> bool:
        """Tell whether a part is switched off."""
        return self._in_a_row[kind] >= MOST_IN_A_ROW

    def switch_on(self, kind: str) -> None:
        """Try a part again: there is a new release of it."""
        self._in_a_row[kind] = 0

    def _failed(self, kind: str, error: Exception) -> None:
        self.kind_to_failures[kind] += 1
        self._in_a_row[kind] += 1
        self._note(kind)
        mark = (kind, type(error).__name__)
        if mark not in self._told:
            self._told.add(mark)
            logger.warning(
                "%s failed, this step goes on without it: %s: %s",
                kind,
                mark[1],
                error,
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )
        if self.is_off(kind):
            logger.error(
                "%s failed %d times in a row and is off until its next release", kind, MOST_IN_A_ROW
            )
