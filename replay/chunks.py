"""Windows added up over chunks, so that a log of any length can be drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from learner.selection.compiled import compiled

FINE, MEDIUM, COARSE = 4, 16, 64
FINE_UNTIL, MEDIUM_UNTIL = 2**18, 2**21


def chunk_size(num_windows_before: int) -> int:
    """Return windows per chunk: few while the log is short, more as it grows."""
    if num_windows_before < FINE_UNTIL:
        return FINE
    return MEDIUM if num_windows_before < MEDIUM_UNTIL else COARSE


@compiled
def sum_chunks(
    exact: NDArray[np.float64],
    published: NDArray[np.float64],
    size: int,
    num_scored: NDArray[np.int32],
    exact_sums: NDArray[np.float64],
    published_sums: NDArray[np.float64],
) -> None:
    """Add lengths (W, N) that are not NaN up over chunks of ``size`` rows; outputs (C, N)."""
    for window in range(exact.shape[0]):
        chunk = window // size
        for drafter in range(exact.shape[1]):
            if not np.isnan(exact[window, drafter]):
                num_scored[chunk, drafter] += 1
                exact_sums[chunk, drafter] += exact[window, drafter]
                published_sums[chunk, drafter] += published[window, drafter]
