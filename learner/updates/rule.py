"""The contract of update rules: a loss on a batch goes in, the weights to serve come out.

A rule holds float32 master weights. ``step`` asks it to learn one batch; ``served_weights`` are
what the next release serves, which need not be the masters; ``state`` is everything it needs to go
on bit for bit, as tensors by name, so that it fits into a safetensors file. A step that would not
be finite, or too long, is refused and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch

Weights = Mapping[str, torch.Tensor]
"""Parameters by name."""

Loss = Callable[[Weights], torch.Tensor]
"""Scalar loss of given weights on one batch."""

WEIGHT = "weight."
"""Prefix of master weights in a state."""


class UpdateRefusedError(ValueError):
    """A step was refused; weights and optimizer are what they were."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step.

    Attributes:
        loss: Of the batch before it was learned (prequential). An ensemble reports what its
            experts lost on average under their weights.
        gradient_norm: Before clipping; of an ensemble the largest.
        step_norm: How far the master weights moved (Euclidean); of an ensemble the largest.
        step_size: Learning rate that was used; of an ensemble the average under its weights.
        num_forwards, num_backwards: Evaluations that the step cost.
    """

    loss: float
    gradient_norm: float
    step_norm: float
    step_size: float = 0.0
    num_forwards: int = 1
    num_backwards: int = 1


@runtime_checkable
class WeighingRule(Protocol):
    """A rule of several experts, which weighs them by examples that it has not learned from."""

    def weigh(self, loss: Loss) -> None:
        """Weigh the experts by their loss; from then on steps weigh no more."""


class UpdateRule(Protocol):
    """Moves one drafter's weights.

    Attributes:
        name: Of the rule, in settings and artifacts.
        version: Of the layout of its state.
    """

    name: ClassVar[str]
    version: ClassVar[int]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Master weights, float32, detached."""

    @property
    def served_weights(self) -> dict[str, torch.Tensor]:
        """Weights that the next release serves, float32, detached."""

    def step(self, loss: Loss, *, delay_updates: float = 0.0) -> StepReport:
        """Learn one batch.

        Args:
            loss: Of the batch.
            delay_updates: Updates made since the weights that served the batch, >= 0.

        Raises:
            UpdateRefusedError: If the step is refused; nothing has changed then.
        """

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that continues it bit for bit, as copies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gradient:
    """A gradient that may be applied: finite, and no longer than the bound.

    Attributes:
        loss: Value at the point.
        norm: Euclidean, before clipping.
        tensors: Clipped, by name.
    """

    loss: float
    norm: float
    tensors: dict[str, torch.Tensor]


def guarded_gradient(loss: Loss, weights: Weights, *, max_norm: float) -> Gradient:
    """Return the gradient of ``loss`` at ``weights``, scaled down to ``max_norm`` if longer.

    Raises:
        UpdateRefusedError: If the loss or the gradient is not finite.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}
    value = loss(leaves)
    if not torch.isfinite(value):
        raise UpdateRefusedError(f"loss {float(value.detach())}, expected a finite number")
    found = torch.autograd.grad(value, list(leaves.values()), materialize_grads=True)
    norm = euclidean_norm(dict(zip(leaves, found, strict=True)))
    if not norm < float("inf"):
        raise UpdateRefusedError(f"gradient of norm {norm}, expected a finite number")
    scale = min(max_norm / (norm + 1e-6), 1.0)
    tensors = {
        name: tensor * scale if scale < 1.0 else tensor.contiguous()
        for name, tensor in zip(leaves, found, strict=True)
    }
    return Gradient(loss=float(value.detach()), norm=norm, tensors=tensors)


def euclidean_norm(tensors: Weights) -> float:
    """Return the norm of all tensors as one vector."""
    norms = [torch.linalg.vector_norm(tensor) for tensor in tensors.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def inner_product(left: Weights, right: Weights) -> float:
    """Return the inner product of two sets of tensors as vectors."""
    products = [(left[name] * right[name]).sum() for name in left]
    return float(torch.stack(products).sum())


def difference(left: Weights, right: Weights) -> dict[str, torch.Tensor]:
    """Return ``left - right``, by name."""
    return {name: left[name] - right[name] for name in left}


def projected_to_ball(
    weights: Weights, centre: Weights, radius: float | None
) -> dict[str, torch.Tensor]:
    """Return the nearest weights within ``radius`` of ``centre``; None = no bound."""
    if radius is None:
        return dict(weights)
    away = difference(weights, centre)
    norm = euclidean_norm(away)
    if norm <= radius:
        return dict(weights)
    return {name: centre[name] + tensor * (radius / norm) for name, tensor in away.items()}


def on_device(tensors: Weights, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the tensors on a device, by name."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def with_prefix(prefix: str, tensors: Weights) -> dict[str, torch.Tensor]:
    """Return copies under longer names."""
    return {prefix + name: tensor.detach().clone() for name, tensor in tensors.items()}


def without_prefix(prefix: str, tensors: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with ``prefix``, without it, in order of name."""
    names = sorted(name for name in tensors if name.startswith(prefix))
    return {name.removeprefix(prefix): tensors[name] for name in names}
