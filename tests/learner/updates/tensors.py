"""Small weights and losses for the tests of update rules."""

from __future__ import annotations

from collections.abc import Callable

import torch

from learner.updates.rule import Weights


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Return two parameters."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn((4, 3), generator=generator),
        "gain": torch.ones(3),
    }


def distance_to(target: float) -> Callable[[Weights], torch.Tensor]:
    """Return a loss that is smallest where all weights are ``target``."""

    def loss(found: Weights) -> torch.Tensor:
        squares = [(tensor - target).square().sum() for tensor in found.values()]
        return torch.stack(squares).sum()

    return loss


def slope(value: float) -> Callable[[Weights], torch.Tensor]:
    """Return a linear loss whose gradient is ``value`` in every coordinate of ``x``."""
    return lambda found: value * found["x"].sum()


def not_a_number(found: Weights) -> torch.Tensor:
    """Return a loss that is not a number."""
    return next(iter(found.values())).sum() * float("nan")


def same(left: Weights, right: Weights) -> bool:
    """Return whether two sets of tensors are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)
