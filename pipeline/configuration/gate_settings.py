"""Settings of the gate that new weights pass before they go live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from pipeline.configuration.pool_settings import Section

if TYPE_CHECKING:
    from learner.gate import GateSettings


class GateSection(Section):
    """When a new version of a drafter's weights is good enough to go live."""

    enabled: bool = True
    """Compare every new version with the live one first; off = every version goes live."""
    error: float = Field(default=0.05, gt=0, le=0.5)
    """Chance that a version which is no better is let in."""
    min_requests: int = Field(default=4, ge=3)
    """Requests compared before the first decision; the next come at 2, 4, ... times as many."""
    max_requests: int = Field(default=128, ge=3)
    """Requests after which an undecided version gives way to a newer one at the latest."""
    min_gain: float = Field(default=0.02, ge=0, le=64)
    """Tokens per verification that a version must certainly gain."""
    max_stream_loss: float = Field(default=0.0, ge=0, le=64)
    """Tokens per verification that a version may certainly lose in one stream."""
    canary_share: float = Field(default=0.5, ge=0, lt=1)
    """Share of the requests that a version serves before it serves all; 0 = no canary."""
    min_canary_requests: int = Field(default=2, ge=1)
    """Requests that a canary serves before it goes live."""
    max_failed_requests: int = Field(default=1, ge=0)
    """Requests in which live weights may fail before the previous ones come back."""

    @model_validator(mode="after")
    def _counts_agree(self) -> Self:
        if self.min_requests > self.max_requests:
            raise ValueError(
                f"gate.min_requests = {self.min_requests}: expected at most gate.max_requests = "
                f"{self.max_requests}"
            )
        return self

    def settings(self) -> GateSettings | None:
        """Return them as the learner takes them; None = no gate."""
        # Imported here: the command line starts without scipy.
        from learner.gate import GateSettings

        if not self.enabled:
            return None
        return GateSettings(**self.model_dump(exclude={"enabled"}))
