"""Online gradient descent, projected as in theory or with AdamW as in practice, and guarded.

OnlineSPEC (arXiv 2603.12617) states the update as w <- proj(w - eta grad f(w)) for the
cross-entropy f to the target at verified positions: the ``projected`` form. Delayed gradients are
applied in the order of their arrival, with a step size for the delay that has accumulated (Wan et
al. 2024, "DOGD"; McMahan and Streeter 2014). The ``adamw`` form replaces the plain step by AdamW's.
The guards are ours: nothing that is not finite, and no step that is longer than the bound, ever
reaches the weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from learner.updates.rule import (
    WEIGHT,
    Loss,
    StepReport,
    UpdateRefusedError,
    Weights,
    euclidean_norm,
    guarded_gradient,
    projected_to_ball,
    with_prefix,
    without_prefix,
)

Form = Literal["adamw", "projected"]
StepSize = Literal["constant", "average_delay", "accumulated_delay"]

_STEP, _MEAN, _SQUARE = "step", "exp_avg", "exp_avg_sq"
_CENTRE, _SCHEDULE = "centre.", "schedule"
_EPSILON = 1e-8

_FUSED_DEVICES = ("cpu", "cuda")
"""Where the fused optimizer is used; torch refuses it on devices that it does not know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OnlineGradientSettings:
    """Step size and guards.

    Attributes:
        form: ``adamw``, or ``projected`` for the plain step of theory.
        learning_rate: Step size, > 0.
        step_size: ``constant``; ``average_delay`` divides by the root of the mean of 1 + delay,
            the step for a known horizon; ``accumulated_delay`` by the root of its sum, the step
            for an unknown horizon, which stops tracking in the end.
        betas: Decay of AdamW's two moments, [0, 1); the first is a momentum.
        max_gradient_norm: Longer gradients are scaled down to this, > 0.
        max_step_norm: A step that would move the weights further (Euclidean) is refused, > 0.
        radius: Weights stay this close to where they began (Euclidean), > 0; None = no bound.
    """

    form: Form = "adamw"
    learning_rate: float = 1e-3
    step_size: StepSize = "constant"
    betas: tuple[float, float] = (0.9, 0.95)
    max_gradient_norm: float = 1.0
    max_step_norm: float = 25.0
    radius: float | None = None

    def __post_init__(self) -> None:
        for name in ("learning_rate", "max_gradient_norm", "radius"):
            value = getattr(self, name)
            if value is not None and not value > 0.0:
                raise ValueError(f"{name}={value}, expected > 0")
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas={self.betas} outside [0, 1)")


class OnlineGradient:
    """Moves one drafter's master weights.

    Args:
        weights: Initial parameters; copied to float32.
        settings: Step size and guards.
    """

    name: ClassVar[str] = "online_gradient"
    version: ClassVar[int] = 1

    def __init__(self, weights: Weights, settings: OnlineGradientSettings) -> None:
        self._settings = settings
        # The gradient's norm is a sum over parameters; files do not keep their order, and another
        # order is another last bit.
        self._weights = {
            name: torch.nn.Parameter(weights[name].detach().float().clone())
            for name in sorted(weights)
        }
        self._centre = {} if settings.radius is None else with_prefix("", self.weights)
        self._total_delay = 0.0
        self._num_steps = 0
        self._optimizer = torch.optim.AdamW(
            list(self._weights.values()),
            lr=settings.learning_rate,
            betas=settings.betas,
            eps=_EPSILON,
            weight_decay=0.0,
            fused=all(one.device.type in _FUSED_DEVICES for one in self._weights.values()),
        )
        self._before: dict[str, torch.Tensor] = {}
        self._spare: dict[str, torch.Tensor] = {}

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Master weights, float32, detached (they move with the next step)."""
        return {name: parameter.detach() for name, parameter in self._weights.items()}

    @property
    def served_weights(self) -> dict[str, torch.Tensor]:
        """The master weights."""
        return self.weights

    @property
    def step_size(self) -> float:
        """Learning rate of the step taken last, or of the first if there was none."""
        settings, total = self._settings, max(self._total_delay, 1.0)
        match settings.step_size:
            case "constant":
                return settings.learning_rate
            case "average_delay":
                return settings.learning_rate / math.sqrt(total / max(self._num_steps, 1))
            case "accumulated_delay":
                return settings.learning_rate / math.sqrt(total)

    def step(self, loss: Loss, *, delay_updates: float = 0.0) -> StepReport:
        """Take one step on ``loss``.

        Raises:
            UpdateRefusedError: If the loss, the gradient or a new weight is not finite, or the
                step is too long; nothing has changed then.
        """
        gradient = guarded_gradient(loss, self._weights, max_norm=self._settings.max_gradient_norm)
        moved = self.apply(gradient.tensors, delay_updates=delay_updates)
        return StepReport(
            loss=gradient.loss,
            gradient_norm=gradient.norm,
            step_norm=moved,
            step_size=self.step_size,
        )

    def apply(self, gradient: Weights, *, delay_updates: float = 0.0) -> float:
        """Take one step along a gradient found elsewhere, and return how far the weights moved.

        Raises:
            UpdateRefusedError: If the step is too long or not finite; nothing has changed then.
        """
        before = self._remembered()
        self._total_delay += 1.0 + delay_updates
        self._num_steps += 1
        self._move(gradient)
        moved = self._distance(before)
        if not moved <= self._settings.max_step_norm:
            self.restore(before)
            raise UpdateRefusedError(
                f"step of norm {moved}, expected at most {self._settings.max_step_norm}"
            )
        return moved

    def project(self, weights: Weights) -> dict[str, torch.Tensor]:
        """Return the nearest weights that the radius allows."""
        return projected_to_ball(weights, self._centre, self._settings.radius)

    def displacement(self, direction: Weights) -> dict[str, torch.Tensor]:
        """Return what a step along ``direction`` subtracts, without taking it.

        AdamW's form divides by the root of the second moment; before its first step that is
        unknown, and the displacement zero.
        """
        if self._settings.form == "projected":
            return {name: self.step_size * direction[name] for name in self._weights}
        return {name: self._scaled(name, direction[name]) for name in self._weights}

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that ``from_state`` needs, as copies: weights and moments by name."""
        return {name: tensor.clone() for name, tensor in self._tensors().items()} | with_prefix(
            _CENTRE, self._centre
        )

    @classmethod
    def from_state(
        cls, tensors: Mapping[str, torch.Tensor], settings: OnlineGradientSettings
    ) -> OnlineGradient:
        """Continue bit for bit from ``state``, with the step size of ``settings``.

        Raises:
            ValueError: If moments are missing for some weight.
        """
        update = cls(without_prefix(WEIGHT, tensors), settings)
        update.restore(tensors)
        return update

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on bit for bit from a state, with this one's own step size.

        Raises:
            ValueError: If moments are missing for some weight.
        """
        for name, parameter in self._weights.items():
            parameter.data.copy_(tensors[f"{WEIGHT}{name}"])
            keys = [key for key in (_STEP, _MEAN, _SQUARE) if f"{key}.{name}" in tensors]
            if keys and len(keys) != 3:
                raise ValueError(f"moments of {name}: found {keys}, expected all three")
            self._optimizer.state[parameter] = {
                key: tensors[f"{key}.{name}"].clone() for key in keys
            }
        if self._settings.radius is not None and f"{_CENTRE}{next(iter(self._weights))}" in tensors:
            self._centre = with_prefix("", without_prefix(_CENTRE, tensors))
        if _SCHEDULE in tensors:
            total, steps = tensors[_SCHEDULE].tolist()
            self._total_delay, self._num_steps = total, int(steps)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Return all that a step changes, as it is: the next step writes into it."""
        tensors = {f"{WEIGHT}{name}": tensor for name, tensor in self.weights.items()}
        for name, parameter in self._weights.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value.detach()
        if self._settings.step_size != "constant":
            tensors[_SCHEDULE] = torch.tensor(
                [self._total_delay, self._num_steps], dtype=torch.float64
            )
        return tensors

    def _remembered(self) -> dict[str, torch.Tensor]:
        """Copy what a step changes into buffers that are kept from step to step.

        Fresh memory for it, three times the weights, took a tenth of a head's step.
        """
        tensors = self._tensors()
        for name, tensor in tensors.items():
            if name not in self._before:
                self._before[name] = torch.empty_like(tensor)
            self._before[name].copy_(tensor)
        return {name: self._before[name] for name in tensors}

    def _distance(self, before: Weights) -> float:
        """Return how far the weights are from what they were (Euclidean)."""
        away = {}
        for name, tensor in self.weights.items():
            if name not in self._spare:
                self._spare[name] = torch.empty_like(tensor)
            away[name] = torch.sub(tensor, before[f"{WEIGHT}{name}"], out=self._spare[name])
        return euclidean_norm(away)

    def _move(self, gradient: Weights) -> None:
        if self._settings.form == "adamw":
            for group in self._optimizer.param_groups:
                group["lr"] = self.step_size
            for name, parameter in self._weights.items():
                parameter.grad = gradient[name]
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        else:
            for name, parameter in self._weights.items():
                parameter.data.sub_(gradient[name], alpha=self.step_size)
        if self._settings.radius is not None:
            for name, tensor in self.project(self.weights).items():
                self._weights[name].data.copy_(tensor)

    def _scaled(self, name: str, direction: torch.Tensor) -> torch.Tensor:
        moments = self._optimizer.state.get(self._weights[name], {})
        if not moments:
            return torch.zeros_like(direction)
        correction = 1.0 - self._settings.betas[1] ** float(moments[_STEP])
        root: torch.Tensor = (moments[_SQUARE] / correction).sqrt()
        return self.step_size * direction / (root + _EPSILON)
