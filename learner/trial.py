"""A trial: two versions of one drafter side by side in the events, and what they gave so far.

While a version is on trial, workers score two versions of the drafter: one in the drafter's own
place, the other in the place named ``shadow_id``, which selection never wakes. Which is which, the
versions in the event tell, so a canary, whose requests have the two change places, feeds the same
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from learner.feedback import is_learned
from learner.gate import Decision, GateSettings, PairedSums, Verdict, judged, num_looks
from learner.measures import expected_acceptance_length
from learner.round_costs import RoundCosts
from schemas.events import GateEvidence, VerificationEvent

SHADOW = "@shadow"
"""Ends the id of the place beside a drafter."""

NUM_TOLD_STREAMS = 5
"""Streams that the reason of a release names."""

NOTHING_COMPARED = GateEvidence(
    num_windows=0,
    new_acceptance_length=float("nan"),
    old_acceptance_length=float("nan"),
    difference_low=float("nan"),
    difference_high=float("nan"),
)


def shadow_id(drafter_id: str) -> str:
    """Return the id of the place beside a drafter."""
    return drafter_id + SHADOW


def is_shadow(drafter_id: str) -> bool:
    """Tell whether an id is that of a place beside a drafter."""
    return drafter_id.endswith(SHADOW)


def place_of(event: VerificationEvent, drafter_id: str, version: int) -> int | None:
    """Return where a version of a drafter stands in an event, in its own place or beside it."""
    for place, one in enumerate(event.drafters):
        if one.weights_version == version and one.drafter_id in (drafter_id, shadow_id(drafter_id)):
            return place
    return None


def has_failed(event: VerificationEvent, place: int) -> bool:
    """Tell whether a drafter gave no usable answer somewhere in an event.

    In its own place it then sits out rounds; beside it, windows stay unscored that others have.
    """
    if not is_shadow(event.drafters[place].drafter_id):
        awake = event.num_awake_rounds
        return bool(len(awake)) and int(awake[place]) < len(event.rounds.first_position)
    scored = ~np.isnan(event.windows.acceptance_probability[:, 0, :])
    return bool((scored.any(axis=1) & ~scored[:, place]).any())


def window_lengths(event: VerificationEvent, places: list[int]) -> NDArray[np.float64]:
    """Return the acceptance lengths of the windows that all of ``places`` were scored on, (W, n).

    Windows that an abort or an error cut are left out, as everywhere.
    """
    windows = event.windows
    lengths = expected_acceptance_length(
        windows.acceptance_probability[:, :, places],
        windows.realised_acceptance[:, :, places],
        num_levels=windows.num_levels,
    )[is_learned(event)[: len(windows.start)]]
    return np.asarray(lengths[np.isfinite(lengths).all(axis=1)])


@dataclass(kw_only=True, slots=True)
class Trial:
    """Collects what a newer and an older version of a drafter give on the same windows.

    Attributes:
        drafter_id: Of both.
        new, old: Their weights versions.
        request_to_sums: Per request its windows and the sums of both lengths.
        canary_requests: Requests that the newer version served itself.
        failed_requests: Requests in which the newer version gave no usable answer.
        request_to_stream: Of the same requests as ``request_to_sums``.
        costs: What rounds of either took.
    """

    drafter_id: str
    new: int
    old: int
    request_to_sums: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    canary_requests: set[str] = field(default_factory=set)
    failed_requests: set[str] = field(default_factory=set)
    request_to_stream: dict[str, str] = field(default_factory=dict)
    costs: RoundCosts = field(default_factory=RoundCosts)
    num_looks: int = 0

    def add(self, event: VerificationEvent) -> None:
        """Take one event in; it may know neither of the two."""
        new = place_of(event, self.drafter_id, self.new)
        old = place_of(event, self.drafter_id, self.old)
        key = f"{event.worker_id}/{event.worker_epoch}/{event.request_id}"
        if new is not None and has_failed(event, new):
            self.failed_requests.add(key)
        if new is None or old is None or event.num_speculative_tokens == 0:
            return
        self.costs.add(event, {self.new: new, self.old: old})
        lengths = window_lengths(event, [new, old])
        if len(lengths):
            count, new_sum, old_sum = self.request_to_sums.get(key, (0, 0.0, 0.0))
            sums = lengths.sum(axis=0)
            self.request_to_sums[key] = (
                count + len(lengths),
                new_sum + float(sums[0]),
                old_sum + float(sums[1]),
            )
            self.request_to_stream[key] = event.stream
            if event.drafters[new].drafter_id == self.drafter_id:
                self.canary_requests.add(key)

    @property
    def num_requests(self) -> int:
        """Requests that both were scored in."""
        return len(self.request_to_sums)

    @property
    def cost_ratio(self) -> float:
        """Seconds of a round with the newer version over the older one's; NaN = not measured."""
        return self.costs.ratio(self.new, self.old)

    def look(self, settings: GateSettings) -> Verdict | None:
        """Judge the newer version if a look is due, else return None."""
        due = num_looks(self.num_requests, settings.min_requests)
        if due <= self.num_looks:
            return None
        self.num_looks = due
        return judged(self._sums(), settings, look=due, cost_ratio=self.cost_ratio)

    def is_worse(self, settings: GateSettings) -> Verdict | None:
        """Return the refusal if the evidence refuses it at the looks that were due, else None."""
        verdict = self.look(settings)
        return verdict if verdict and verdict.decision is Decision.REFUSE else None

    def evidence(self, settings: GateSettings) -> GateEvidence:
        """Return what is known now, whether a look is due or not."""
        if not self.request_to_sums:
            return NOTHING_COMPARED
        return judged(self._sums(), settings, look=max(self.num_looks, 1)).evidence

    def by_stream(self) -> str:
        """Say what the newer version gained per window, for the streams with the most windows."""
        sums: dict[str, NDArray[np.float64]] = {}
        for key, values in self.request_to_sums.items():
            stream = self.request_to_stream[key]
            sums[stream] = sums.get(stream, np.zeros(3)) + np.array(values)
        most = sorted(sums, key=lambda stream: -sums[stream][0])[:NUM_TOLD_STREAMS]
        told = [
            f"{stream} {(sums[stream][1] - sums[stream][2]) / sums[stream][0]:+.3f} over "
            f"{sums[stream][0]:.0f} windows"
            for stream in most
        ]
        rest = len(sums) - len(most)
        return ", ".join([*told, f"{rest} more"] if rest else told)

    def _sums(self) -> PairedSums:
        counts, new, old = zip(*self.request_to_sums.values(), strict=True)
        return PairedSums(
            num_windows=np.array(counts),
            new_lengths=np.array(new),
            old_lengths=np.array(old),
            streams=[self.request_to_stream[key] for key in self.request_to_sums],
        )
