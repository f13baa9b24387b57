"""Online gradient descent in its practical form: AdamW on float32 master weights, guarded.

OnlineSPEC (arXiv 2603.12617) states the update as w <- proj(w - eta grad f(w)) for the
cross-entropy f to the target at verified positions. Delayed gradients are applied in the order of
their arrival (Wan et al. 2024, "DOGD"). The guards are ours: nothing that is not finite, and no
step that is longer than the bound, ever reaches the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Weights = Mapping[str, torch.Tensor]
"""Parameters by name."""

Loss = Callable[[Weights], torch.Tensor]
"""Scalar loss of given weights on one batch."""

_STEP, _MEAN, _SQUARE, _WEIGHT = "step", "exp_avg", "exp_avg_sq", "weight"


class UpdateRefusedError(ValueError):
    """A step was refused; weights and optimizer are what they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineGradientSettings:
    """Step size and guards.

    Attributes:
        learning_rate: AdamW's, > 0.
        betas: Decay of its two moments.
        max_gradient_norm: Longer gradients are scaled down to this, > 0.
        max_step_norm: A step that would move the weights further (Euclidean) is refused, > 0.
    """

    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    max_step_norm: float = 25.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step: loss before it, gradient norm before clipping, and how far the weights moved."""

    loss: float
    gradient_norm: float
    step_norm: float


class OnlineGradient:
    """Moves one drafter's master weights.

    Args:
        weights: Initial parameters; copied to float32.
        settings: Step size and guards.
    """

    def __init__(self, weights: Weights, settings: OnlineGradientSettings) -> None:
        self._settings = settings
        # The gradient's norm is a sum over parameters; files do not keep their order, and another
        # order is another last bit.
        self._weights = {
            name: torch.nn.Parameter(weights[name].detach().float().clone())
            for name in sorted(weights)
        }
        self._optimizer = torch.optim.AdamW(
            list(self._weights.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=0.0,
        )

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Master weights, float32, detached (they move with the next step)."""
        return {name: parameter.detach() for name, parameter in self._weights.items()}

    def step(self, loss: Loss) -> StepReport:
        """Take one step on ``loss``.

        Raises:
            UpdateRefusedError: If the loss, the gradient or a new weight is not finite, or the
                step is too long; nothing has changed then.
        """
        value, gradient_norm = self._gradient(loss)
        before = self.state()
        self._optimizer.step()
        moved = self._distance(before)
        if not moved <= self._settings.max_step_norm:
            self._restore(before)
            raise UpdateRefusedError(
                f"step of norm {moved}, expected at most {self._settings.max_step_norm}"
            )
        return StepReport(loss=value, gradient_norm=gradient_norm, step_norm=moved)

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that ``from_state`` needs, as copies: weights and moments by name."""
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._weights.items():
            tensors[f"{_WEIGHT}.{name}"] = parameter.detach().clone()
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value.detach().clone()
        return tensors

    @classmethod
    def from_state(
        cls, tensors: Mapping[str, torch.Tensor], settings: OnlineGradientSettings
    ) -> OnlineGradient:
        """Continue bit for bit from ``state``, with the step size of ``settings``.

        Raises:
            ValueError: If moments are missing for some weight.
        """
        prefix = f"{_WEIGHT}."
        names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
        update = cls({name: tensors[prefix + name] for name in names}, settings)
        update._restore(tensors)
        return update

    def _gradient(self, loss: Loss) -> tuple[float, float]:
        self._optimizer.zero_grad(set_to_none=True)
        value = loss(self._weights)
        if not torch.isfinite(value):
            raise UpdateRefusedError(f"loss {float(value.detach())}, expected a finite number")
        torch.autograd.backward(value)
        norm = torch.nn.utils.clip_grad_norm_(
            list(self._weights.values()), self._settings.max_gradient_norm
        )
        if not torch.isfinite(norm):
            self._optimizer.zero_grad(set_to_none=True)
            raise UpdateRefusedError(f"gradient of norm {float(norm)}, expected a finite number")
        return float(value.detach()), float(norm)

    def _distance(self, before: Mapping[str, torch.Tensor]) -> float:
        squares = [
            (parameter.detach() - before[f"{_WEIGHT}.{name}"]).square().sum()
            for name, parameter in self._weights.items()
        ]
        return float(torch.stack(squares).sum().sqrt())

    def _restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._weights.items():
            parameter.data.copy_(tensors[f"{_WEIGHT}.{name}"])
            keys = [key for key in (_STEP, _MEAN, _SQUARE) if f"{key}.{name}" in tensors]
            if keys and len(keys) != 3:
                raise ValueError(f"moments of {name}: found {keys}, expected all three")
            self._optimizer.state[parameter] = {
                key: tensors[f"{key}.{name}"].clone() for key in keys
            }
