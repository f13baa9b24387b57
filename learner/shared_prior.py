"""What a stream's domain, and all streams together, say about drafters before a request.

A stream is named ``tenant.domain``: its domain is what follows the last separator, so that
``acme.support`` and ``globex.support`` share one. A stream's evidence is shrunk towards that of the
other streams of its domain, and theirs towards that of all other domains. Every stream is published
by its one owner, and evidence is sums: whoever reads the published policies adds them up. So
aggregates need no owner of their own, and no event counts twice in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from learner.prior import PriorSettings, StreamPrior, floored, log_softmax

_SEPARATORS = re.compile(r"[/:.]")

_DEFAULT_SETTINGS = PriorSettings()

Evidence = dict[str, NDArray[np.float64]]
"""Per drafter id its (excess loss, windows), both decayed sums."""


def domain_of(stream: str) -> str:
    """Return the domain of a stream: what follows its last ``/``, ``:`` or ``.``, or all of it."""
    return _SEPARATORS.split(stream)[-1] or stream


class SharedPrior:
    """The evidence of all streams, added up by domain and in all.

    Args:
        settings: How evidence becomes a prior.
    """

    def __init__(self, settings: PriorSettings = _DEFAULT_SETTINGS) -> None:
        self._settings = settings
        self._stream_to_evidence: dict[str, Evidence] = {}
        self._domain_to_sums: dict[str, Evidence] = {}
        self._sums: Evidence = {}

    def update(self, stream: str, drafter_ids: Sequence[str], known: StreamPrior) -> None:
        """Take a stream's newest evidence in place of what it had before.

        Args:
            stream: Its name.
            drafter_ids: The drafters that ``known`` is about, (N,).
            known: Its evidence.
        """
        rows = np.column_stack([known.excess_loss, known.num_windows])
        newest = dict(zip(drafter_ids, rows, strict=True))
        before = self._stream_to_evidence.get(stream, {})
        self._stream_to_evidence[stream] = newest
        of_domain = self._domain_to_sums.setdefault(domain_of(stream), {})
        for sums in (of_domain, self._sums):
            _add(sums, newest, 1.0)
            _add(sums, before, -1.0)

    def of(self, stream: str, drafter_ids: Sequence[str]) -> NDArray[np.float64]:
        """Return the prior of a stream over a pool, (N,), sum 1, each > 0.

        A drafter without evidence counts as an average one; uniform if nobody knows any of them.
        """
        everybody, domain, own = (
            _rows(level, drafter_ids)
            for level in (
                self._sums,
                self._domain_to_sums.get(domain_of(stream), {}),
                self._stream_to_evidence.get(stream, {}),
            )
        )
        # Each stream counts at one level only.
        elsewhere = self._shrunk(everybody - domain, np.zeros(len(drafter_ids)))
        mean = self._shrunk(domain - own, self._settings.from_other_domains * elsewhere)
        mean = self._shrunk(own, mean)
        weights = np.exp(log_softmax(-self._settings.strength * mean))
        return floored(weights, self._settings.floor)

    def _shrunk(
        self, evidence: NDArray[np.float64], towards: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return the mean excess loss of some evidence (N, 2), shrunk towards another, (N,)."""
        shrink = self._settings.shrink_windows
        # Sums that were taken off again may leave a rounding error below 0.
        windows = np.maximum(evidence[:, 1], 0.0)
        return np.asarray((evidence[:, 0] + shrink * towards) / (windows + shrink))


def _add(sums: Evidence, evidence: Mapping[str, NDArray[np.float64]], sign: float) -> None:
    for drafter_id, values in evidence.items():
        sums[drafter_id] = sums.get(drafter_id, np.zeros(2)) + sign * values


def _rows(evidence: Evidence, drafter_ids: Sequence[str]) -> NDArray[np.float64]:
    nothing = np.zeros(2)
    return np.array([evidence.get(drafter_id, nothing) for drafter_id in drafter_ids])
