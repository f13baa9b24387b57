"""What rounds with one or another version of a drafter took, as its events measured them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from schemas.events import VerificationEvent

LEAST_DRAFTED = 64
"""Drafted tokens of a version before its seconds tell anything."""

NOISE = 0.05
"""Differences of the seconds of a round below this share are no differences."""


@dataclass(slots=True)
class RoundCosts:
    """Sums of seconds per version.

    Attributes:
        version_to_drafting: Per version (seconds of drafting, drafted tokens) in its own place.
        num_rounds, round_seconds: Of all rounds with a draft.
        num_draft_tokens, other_seconds: Drafted in them; verifying and scoring them.
    """

    version_to_drafting: dict[int, tuple[float, int]] = field(default_factory=dict)
    num_rounds: int = 0
    round_seconds: float = 0.0
    num_draft_tokens: int = 0
    other_seconds: float = 0.0

    def add(self, event: VerificationEvent, version_to_place: Mapping[int, int]) -> None:
        """Measure the rounds that the versions at these places drafted in."""
        rounds = event.rounds
        others = rounds.verify_seconds + rounds.score_seconds
        for version, place in version_to_place.items():
            chosen = (rounds.drafter_index == place) & (rounds.num_draft_tokens > 0)
            seconds = float(rounds.draft_seconds[chosen].sum(dtype=float))
            drafted = int(rounds.num_draft_tokens[chosen].sum())
            before = self.version_to_drafting.get(version, (0.0, 0))
            self.version_to_drafting[version] = (before[0] + seconds, before[1] + drafted)
            self.num_rounds += int(chosen.sum())
            self.num_draft_tokens += drafted
            self.other_seconds += float(others[chosen].sum(dtype=float))
            self.round_seconds += seconds + float(others[chosen].sum(dtype=float))

    @property
    def mean_round_seconds(self) -> float:
        """Seconds of a round; NaN before the first."""
        return self.round_seconds / self.num_rounds if self.num_rounds else float("nan")

    def ratio(self, new: int, old: int) -> float:
        """Return the seconds of a round with one version over those with another.

        NaN until both have drafted enough; 1 if they differ by no more than noise.
        """
        known = [self.version_to_drafting.get(version, (0.0, 0)) for version in (new, old)]
        if min(drafted for _, drafted in known) < LEAST_DRAFTED:
            return float("nan")
        per_round = self.num_draft_tokens / self.num_rounds
        rest = self.other_seconds / self.num_rounds
        seconds = [per_round * drafting / drafted + rest for drafting, drafted in known]
        found = seconds[0] / seconds[1] if seconds[1] > 0.0 else float("nan")
        return 1.0 if abs(found - 1.0) <= NOISE else found
