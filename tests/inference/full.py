"""Numbers of cases: few in every run, all of them when asked for."""

from __future__ import annotations

import os

VARIABLE = "DRAFTLOOP_TEST_FULL"
"""Set it to 1 for the full numbers of the server's tests; they take some minutes."""


def num_cases(short: int, full: int) -> int:
    """Return how many cases a test goes through."""
    return full if os.environ.get(VARIABLE) else short
