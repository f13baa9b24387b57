"""Optimistic online gradient: an anchor that learns, and a hint that is applied before serving.

OnlineSPEC (arXiv 2603.12617), optimistic variant, after Rakhlin and Sridharan (2013). With the
anchor a, the hint h (the last gradient; zero at first) and the delay d:

    serve    w = proj(a - eta (1 + d) h)
    learn    g = gradient at the served w;   a <- proj(a - eta g);   h <- g

The hint stands for the gradients that are missing when w serves: the round's own, and the d that
are still on their way (Flaspohler et al. 2021: delay is optimism, so the hint has to cover it).
This is not momentum, which goes on the way it went when the gradient turns; the hint is taken back.
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
    euclidean_norm,
    guarded_gradient,
    with_prefix,
    without_prefix,
)

_HINT, _DELAY = "hint.", "delay_updates"


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimisticSettings:
    """A hint over the online gradient.

    Attributes:
        gradient: Step size and guards of anchor and hint; AdamW's first decay is replaced by
            ``momentum``, for a hint is no second momentum.
        momentum: Of AdamW's form, [0, 1).
        hint_decay: Share of the earlier hint that is kept, [0, 1); 0 = the last gradient.
        hint_scale: Factor on the hint, >= 0; 0 = the online gradient.
        max_delay_updates: Delay beyond which the hint grows no more, >= 0.
    """

    gradient: OnlineGradientSettings = field(default_factory=OnlineGradientSettings)
    momentum: float = 0.0
    hint_decay: float = 0.0
    hint_scale: float = 1.0
    max_delay_updates: float = 16.0

    def __post_init__(self) -> None:
        for name, below in (("momentum", 1.0), ("hint_decay", 1.0)):
            if not 0.0 <= getattr(self, name) < below:
                raise ValueError(f"{name}={getattr(self, name)} outside [0, {below})")
        for name in ("hint_scale", "max_delay_updates"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)}, expected >= 0 and finite")


class OptimisticGradient:
    """Learns at an anchor and serves what the hint makes of it.

    Args:
        weights: Initial parameters; copied to float32.
        settings: Hint, step size and guards.
    """

    name: ClassVar[str] = "optimistic"
    version: ClassVar[int] = 1

    def __init__(self, weights: Weights, settings: OptimisticSettings) -> None:
        self._settings = settings
        self._anchor = OnlineGradient(weights, _anchor_settings(settings))
        self._hint = {k: torch.zeros_like(v) for k, v in self._anchor.weights.items()}
        self._delay_updates = 0.0
        self._played = self._play()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The anchor, float32, detached."""
        return self._anchor.weights

    @property
    def served_weights(self) -> dict[str, torch.Tensor]:
        """The anchor after the hint, float32, detached."""
        return dict(self._played)

    @property
    def hint(self) -> dict[str, torch.Tensor]:
        """The gradient expected next."""
        return dict(self._hint)

    @property
    def applied_hint(self) -> dict[str, torch.Tensor]:
        """The hint times what it stands for: as served, unless clipped or projected."""
        return {name: self._hint_factor() * tensor for name, tensor in self._hint.items()}

    def step(self, loss: Loss, *, delay_updates: float = 0.0) -> StepReport:
        """Take one step with the gradient at the served weights; see ``UpdateRule.step``."""
        settings = self._settings
        found = guarded_gradient(loss, self._played, max_norm=settings.gradient.max_gradient_norm)
        moved = self._anchor.apply(found.tensors, delay_updates=delay_updates)
        kept = settings.hint_decay
        self._hint = {
            name: kept * old + (1.0 - kept) * found.tensors[name]
            for name, old in self._hint.items()
        }
        self._delay_updates = delay_updates
        self._played = self._play()
        return StepReport(
            loss=found.loss,
            gradient_norm=found.norm,
            step_norm=moved,
            step_size=self._anchor.step_size,
        )

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that ``from_state`` needs, as copies; the anchor's is an online gradient's."""
        delay = torch.tensor(self._delay_updates, dtype=torch.float64)
        return self._anchor.state() | with_prefix(_HINT, self._hint) | {_DELAY: delay}

    @classmethod
    def from_state(
        cls, tensors: Mapping[str, torch.Tensor], settings: OptimisticSettings
    ) -> OptimisticGradient:
        """Continue bit for bit from ``state``."""
        anchor = OnlineGradient.from_state(tensors, _anchor_settings(settings))
        update = cls(anchor.weights, settings)
        update._anchor = anchor
        update._hint = with_prefix("", without_prefix(_HINT, tensors))
        update._delay_updates = float(tensors[_DELAY])
        update._played = update._play()
        return update

    def _play(self) -> dict[str, torch.Tensor]:
        ahead = self._anchor.displacement(self._hint)
        scale = self._hint_factor()
        length, longest = scale * euclidean_norm(ahead), self._settings.gradient.max_step_norm
        # A hint is a guess: it moves the served weights no further than a step may.
        if length > longest:
            scale *= longest / length
        return self._anchor.project(
            {name: tensor - scale * ahead[name] for name, tensor in self._anchor.weights.items()}
        )

    def _hint_factor(self) -> float:
        missing = 1.0 + min(self._delay_updates, self._settings.max_delay_updates)
        return self._settings.hint_scale * missing


def _anchor_settings(settings: OptimisticSettings) -> OnlineGradientSettings:
    betas = (settings.momentum, settings.gradient.betas[1])
    return replace(settings.gradient, betas=betas)
