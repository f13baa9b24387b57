"""Heavy-ball momentum at matched effective step: what the reference calls optimism.

Kept to compare with. The reference implementation of OnlineSPEC runs plain SGD with momentum 0.9
under the name of the optimistic update, at the same learning rate, which also multiplies the step
by up to ten. Here the velocity is an average, so that under a constant gradient a step is as long
as that of the online gradient, and the comparison is of the rules and not of their step sizes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.rule import (
    Loss,
    StepReport,
    Weights,
    guarded_gradient,
    with_prefix,
    without_prefix,
)

_VELOCITY = "velocity."


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentumSettings:
    """Momentum over the online gradient.

    Attributes:
        gradient: Step size and guards; AdamW's first decay is replaced by ``momentum``.
        momentum: Share of the velocity that is kept, [0, 1).
    """

    gradient: OnlineGradientSettings = field(default_factory=OnlineGradientSettings)
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} outside [0, 1)")


class MomentumGradient:
    """Steps along an average of gradients.

    In AdamW's form that average is its first moment; in the projected form it is kept here.

    Args:
        weights: Initial parameters; copied to float32.
        settings: Momentum, step size and guards.
    """

    name: ClassVar[str] = "momentum"
    version: ClassVar[int] = 1

    def __init__(self, weights: Weights, settings: MomentumSettings) -> None:
        self._settings = settings
        self._base = OnlineGradient(weights, _base_settings(settings))
        self._velocity = {k: torch.zeros_like(v) for k, v in self._base.weights.items()}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Master weights, float32, detached."""
        return self._base.weights

    @property
    def served_weights(self) -> dict[str, torch.Tensor]:
        """The master weights."""
        return self._base.weights

    def step(self, loss: Loss, *, delay_updates: float = 0.0) -> StepReport:
        """Take one step; see ``OnlineGradient.step``."""
        settings = self._settings
        if settings.gradient.form == "adamw":
            return self._base.step(loss, delay_updates=delay_updates)
        found = guarded_gradient(loss, self.weights, max_norm=settings.gradient.max_gradient_norm)
        kept = settings.momentum
        velocity = {
            name: kept * old + (1.0 - kept) * found.tensors[name]
            for name, old in self._velocity.items()
        }
        moved = self._base.apply(velocity, delay_updates=delay_updates)
        self._velocity = velocity
        return StepReport(
            loss=found.loss,
            gradient_norm=found.norm,
            step_norm=moved,
            step_size=self._base.step_size,
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that ``from_state`` needs, as copies."""
        return self._base.state() | with_prefix(_VELOCITY, self._velocity)

    @classmethod
    def from_state(
        cls, tensors: Mapping[str, torch.Tensor], settings: MomentumSettings
    ) -> MomentumGradient:
        """Continue bit for bit from ``state``."""
        base = OnlineGradient.from_state(tensors, _base_settings(settings))
        update = cls(base.weights, settings)
        update._base = base
        update._velocity = with_prefix("", without_prefix(_VELOCITY, tensors))
        return update


def _base_settings(settings: MomentumSettings) -> OnlineGradientSettings:
    betas = (settings.momentum, settings.gradient.betas[1])
    return replace(settings.gradient, betas=betas)
