"""Ensemble of step sizes: experts on a geometric grid, weighed by what they lose before learning.

OnlineSPEC (arXiv 2603.12617), ensemble variant, after Ader (Zhang, Lu, Zhou 2018). Every expert
runs the online gradient at its own rate. Meta weights follow Hedge with fixed share on the
prequential loss: what every expert loses *before* any of them learns from it (the reference scores
the training loss after, which favours the largest rate). That is the loss of a step's batch where
batches are new, or of what ``weigh`` is told where they are drawn from a memory. Served is the
average of the parameters under the meta weights, or the best expert.

What can be shared. The gradients of N experts are taken at N points, so an exact step costs N
forwards and N backwards (``backward="each"``). With ``backward="shared"`` one gradient, at the
served average, moves all experts: for convex losses Ader's regret bound holds with one backward
instead of N, and ``losses="surrogate"`` then scores the experts by that gradient too, without a
forward of their own. Without convexity a shared gradient lets experts that are not served drift,
so "each" is the default. Every step reports its forwards and backwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings
from learner.updates.rule import (
    WEIGHT,
    Gradient,
    Loss,
    StepReport,
    UpdateRefusedError,
    Weights,
    difference,
    guarded_gradient,
    inner_product,
    with_prefix,
    without_prefix,
)

_EXPERT, _PROBABILITIES = "expert", "meta.probabilities"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnsembleSettings:
    """Experts and how they are weighed.

    Attributes:
        gradient: Guards of every expert, and the learning rate in the middle of the grid.
        num_experts: N, >= 1.
        grid_ratio: Each rate is so many times the one before, > 1.
        meta_rate: Hedge's rate on losses in [0, 1], > 0.
        share: Share of the meta weights that returns to all alike after every step, (0, 1).
        loss_scale: Loss beyond the best expert's that counts as 1, in nats, > 0.
        serve: The ``average`` of the parameters, or the ``best`` expert.
        backward: One backward for ``each`` expert, or one ``shared`` by all.
        losses: ``measured``, or ``surrogate`` from a shared gradient.
        restarts: An expert whose loss counts as 1 goes on from the best one's state. Without it a
            rate that is too large is lost for good, and its share spoils the average.
    """

    gradient: OnlineGradientSettings = field(default_factory=OnlineGradientSettings)
    num_experts: int = 3
    grid_ratio: float = 3.0
    meta_rate: float = 8.0
    share: float = 0.01
    loss_scale: float = 1.0
    serve: Literal["average", "best"] = "average"
    backward: Literal["each", "shared"] = "each"
    losses: Literal["measured", "surrogate"] = "measured"
    restarts: bool = True

    def __post_init__(self) -> None:
        for name, above in (
            ("num_experts", 0.0),
            ("grid_ratio", 1.0),
            ("meta_rate", 0.0),
            ("loss_scale", 0.0),
        ):
            if not above < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}, expected above {above}, finite")
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"share={self.share} outside (0, 1)")
        if self.losses == "surrogate" and self.backward == "each":
            raise ValueError("losses='surrogate' needs a gradient that is shared: backward='each'")

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """One per expert, ascending."""
        middle = (self.num_experts - 1) / 2
        rate = self.gradient.learning_rate
        return tuple(rate * self.grid_ratio ** (i - middle) for i in range(self.num_experts))


class Ensemble:
    """Runs N online gradients and serves what the meta weights make of them.

    Args:
        weights: Initial parameters of every expert; copied to float32.
        settings: Experts and meta weights.
    """

    name: ClassVar[str] = "ensemble"
    version: ClassVar[int] = 1

    def __init__(self, weights: Weights, settings: EnsembleSettings) -> None:
        self._settings = settings
        self._experts = [OnlineGradient(weights, one) for one in _expert_settings(settings)]
        self._probabilities = np.full(settings.num_experts, 1.0 / settings.num_experts)
        self._served = self._serve()
        self._weighs_apart = False
        self.num_restarts = 0

    @property
    def settings(self) -> EnsembleSettings:
        """Experts and meta weights."""
        return self._settings

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The served weights: the masters are the experts'."""
        return dict(self._served)

    @property
    def served_weights(self) -> dict[str, torch.Tensor]:
        """Average of the experts, or the best one; float32, detached."""
        return dict(self._served)

    @property
    def expert_weights(self) -> tuple[dict[str, torch.Tensor], ...]:
        """Master weights of every expert."""
        return tuple(expert.weights for expert in self._experts)

    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Meta weights, shape (N,)."""
        return self._probabilities.copy()

    def step(self, loss: Loss, *, delay_updates: float = 0.0) -> StepReport:
        """Score every expert, then move it, then weigh anew.

        Raises:
            UpdateRefusedError: If no expert could move; nothing has changed then.
        """
        before = self.probabilities
        if self._settings.backward == "shared":
            found, values = self._shared(loss)
        else:
            found, values = self._each(loss)
        moved = self._apply(found, delay_updates)
        if not self._weighs_apart:
            self._weigh(values)
        self._served = self._serve()
        is_scored = np.isfinite(values)
        weights = before[is_scored] / before[is_scored].sum()
        num_shared = 1 if self._settings.backward == "shared" else 0
        return StepReport(
            loss=float(weights @ values[is_scored]),
            gradient_norm=max(one.norm for one in found if one is not None),
            step_norm=moved,
            step_size=float(before @ np.array([e.step_size for e in self._experts])),
            num_forwards=num_shared + (self._settings.losses == "measured") * len(self._experts),
            num_backwards=num_shared or len(self._experts),
        )

    def weigh(self, loss: Loss) -> None:
        """Weigh the experts by what each loses on examples that none has learned from.

        From then on steps weigh no more. Their batches may hold examples that were learned from
        before, on which the largest rate looks best: it knows them by heart.
        """
        with torch.no_grad():
            values = np.array([float(loss(expert.weights)) for expert in self._experts])
        if np.isfinite(values).any():
            self._weighs_apart = True
            self._weigh(values)

    def state(self) -> dict[str, torch.Tensor]:
        """Return all that ``from_state`` needs, as copies."""
        tensors = {_PROBABILITIES: torch.from_numpy(self.probabilities)}
        for index, expert in enumerate(self._experts):
            tensors |= with_prefix(f"{_EXPERT}.{index}.", expert.state())
        return tensors

    @classmethod
    def from_state(
        cls, tensors: Mapping[str, torch.Tensor], settings: EnsembleSettings
    ) -> Ensemble:
        """Continue bit for bit from ``state``.

        With another number of experts, all begin anew from the average of those that were.
        """
        probabilities = tensors[_PROBABILITIES].cpu().numpy()
        states = [without_prefix(f"{_EXPERT}.{i}.", tensors) for i in range(len(probabilities))]
        if len(states) != settings.num_experts:
            experts = [without_prefix(WEIGHT, state) for state in states]
            return cls(_average(experts, probabilities), settings)
        update = cls(without_prefix(WEIGHT, states[0]), settings)
        update._experts = [
            OnlineGradient.from_state(state, one)
            for state, one in zip(states, _expert_settings(settings), strict=True)
        ]
        update._probabilities = probabilities.copy()
        update._served = update._serve()
        return update

    def _each(self, loss: Loss) -> tuple[list[Gradient | None], NDArray[np.float64]]:
        """Return every expert's gradient at its own weights, None where refused, and its loss."""
        found: list[Gradient | None] = []
        message = ""
        for expert in self._experts:
            try:
                found.append(self._gradient(loss, expert.weights))
            except UpdateRefusedError as error:
                found.append(None)
                message = message or str(error)
        if all(one is None for one in found):
            raise UpdateRefusedError(message)
        return found, np.array([math.inf if one is None else one.loss for one in found])

    def _shared(self, loss: Loss) -> tuple[list[Gradient | None], NDArray[np.float64]]:
        """Return the gradient at the served weights for all, and every expert's loss."""
        shared = self._gradient(loss, self._served)
        if self._settings.losses == "measured":
            with torch.no_grad():
                values = [float(loss(expert.weights)) for expert in self._experts]
        else:
            values = [
                shared.loss + inner_product(shared.tensors, difference(e.weights, self._served))
                for e in self._experts
            ]
        if not np.isfinite(values).any():
            raise UpdateRefusedError(f"losses {values}, expected a finite one")
        return [shared] * len(self._experts), np.array(values)

    def _gradient(self, loss: Loss, weights: Weights) -> Gradient:
        return guarded_gradient(loss, weights, max_norm=self._settings.gradient.max_gradient_norm)

    def _apply(self, found: Sequence[Gradient | None], delay_updates: float) -> float:
        """Move the experts and return the longest step; those that refuse stay where they are."""
        steps: list[float] = []
        message = ""
        for expert, one in zip(self._experts, found, strict=True):
            if one is None:
                continue
            try:
                steps.append(expert.apply(one.tensors, delay_updates=delay_updates))
            except UpdateRefusedError as error:
                message = message or str(error)
        if not steps:
            raise UpdateRefusedError(message)
        return max(steps)

    def _weigh(self, values: NDArray[np.float64]) -> None:
        losses = self._meta_losses(values)
        self._probabilities = fixed_share(
            self._probabilities, losses, rate=self._settings.meta_rate, share=self._settings.share
        )
        self._restart(losses)

    def _meta_losses(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return losses in [0, 1]: what each lost beyond the best, in units of the scale."""
        beyond = (values - np.nanmin(values)) / self._settings.loss_scale
        return np.where(np.isfinite(beyond), np.minimum(beyond, 1.0), 1.0)

    def _restart(self, losses: NDArray[np.float64]) -> None:
        if not self._settings.restarts:
            return
        best = self._experts[int(losses.argmin())]
        for index, loss in enumerate(losses):
            if loss >= 1.0:
                self._experts[index].restore(best.state())
                self.num_restarts += 1

    def _serve(self) -> dict[str, torch.Tensor]:
        probabilities = self.probabilities
        if self._settings.serve == "best":
            best = self._experts[int(probabilities.argmax())].weights
            return with_prefix("", best)
        return _average(self.expert_weights, probabilities)


def fixed_share(
    probabilities: NDArray[np.float64], losses: NDArray[np.float64], *, rate: float, share: float
) -> NDArray[np.float64]:
    """Multiply by exp(-rate x loss), normalise, and give ``share`` back to all alike.

    Herbster and Warmuth (1998), section 5. The share keeps every weight above share / N and the
    smallest loss is 0, so nothing can underflow (C1). Regret to the best expert over T steps:
    (ln N + (T - 1) ln(1 / (1 - share))) / rate + rate T / 8.
    """
    weights = probabilities * np.exp(-rate * (losses - losses.min()))
    return np.asarray((1.0 - share) * weights / weights.sum() + share / len(weights))


def _average(
    experts: Sequence[Weights], probabilities: NDArray[np.float64]
) -> dict[str, torch.Tensor]:
    weights = [float(one) for one in probabilities]
    # Float64 sums: equal experts average to themselves, to the last bit of float32.
    return {
        name: sum(
            (p * expert[name].double() for p, expert in zip(weights, experts, strict=True)),
            torch.zeros((), dtype=torch.float64),
        ).float()
        for name in experts[0]
    }


def _expert_settings(settings: EnsembleSettings) -> list[OnlineGradientSettings]:
    return [replace(settings.gradient, learning_rate=rate) for rate in settings.learning_rates]
