"""Settings of the experts: what a head was good at, kept beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from pipeline.configuration.pool_settings import Section

if TYPE_CHECKING:
    from learner.spawning import SpawnSettings


class ExpertSection(Section):
    """When a head as it was is kept, and learns no more, while the head goes on learning."""

    max_experts: int = Field(default=0, ge=0, le=64)
    """Experts beside every head; 0 = none are kept. Each is scored like any drafter of the pool."""
    delta: float = Field(default=0.3, gt=0, lt=1)
    """Chance of a false alarm of the drift detector (ADWIN)."""
    hold_off_events: int = Field(default=50, ge=0, le=1_000_000)
    """Events of a stream after an alarm in which no other is raised."""
    min_fall: float = Field(default=0.2, ge=0, le=64)
    """Tokens per verification by which a stream's mean must have fallen."""

    def settings(self) -> SpawnSettings | None:
        """Return them as the learner takes them; None = no experts."""
        # Imported here: the command line starts without river.
        from learner.drift import DriftSettings
        from learner.spawning import SpawnSettings

        if not self.max_experts:
            return None
        drift = DriftSettings(
            delta=self.delta, hold_off=self.hold_off_events, min_fall=self.min_fall
        )
        return SpawnSettings(max_experts=self.max_experts, drift=drift)
