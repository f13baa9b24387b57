"""Dynamic regret of an update rule on convex losses, beside the bounds of the theorems.

A head that is linear in its parameters has a convex cross-entropy, so everything the theory of
OnlineSPEC speaks of can be computed: the minimiser of every round, the path they walk, how far the
hints miss, and the regret. The bounds below have their constants, and take what was measured
(gradients, delays, step sizes) where the theorems take worst cases, so that they can be compared.

The game: in round t the rule serves w_t and suffers f_t(w_t). The feedback of round t arrives at
the end of round t + delay_t and is learned in the order of arrival, feedback still on its way after
the last round too. Delayed feedback is the gradient at the point that was served, so that what is
analysed is DOGD (Wan et al. 2024).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from learner.updates.ensemble import EnsembleSettings
from learner.updates.optimistic import OptimisticGradient
from learner.updates.rule import (
    Gradient,
    Loss,
    StepReport,
    UpdateRule,
    Weights,
    difference,
    euclidean_norm,
    guarded_gradient,
    inner_product,
    projected_to_ball,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Minimiser:
    """Where a convex loss is smallest in a ball, and how sure that is.

    Attributes:
        weights: The point.
        value: Loss there.
        gap: The smallest value is at least ``value - gap`` (Frank and Wolfe's certificate).
    """

    weights: dict[str, torch.Tensor]
    value: float
    gap: float


def minimiser(
    loss: Loss,
    centre: Weights,
    *,
    radius: float,
    smoothness: float,
    start: Weights | None = None,
    tolerance: float = 1e-6,
    max_steps: int = 5000,
) -> Minimiser:
    """Minimise a convex loss in the ball of ``radius`` around ``centre``, in float64.

    Nesterov's accelerated projected gradient, restarted when the loss rises.

    Args:
        loss: Convex, differentiable.
        centre: Of the ball.
        radius: Of the ball, > 0.
        smoothness: Lipschitz constant of the gradient, > 0.
        start: Where the search begins, in the ball; None = at the centre.
        tolerance: Gap at which to stop.
        max_steps: Steps after which to stop anyway; the gap then says how good it is.
    """
    centre = {name: tensor.detach().double() for name, tensor in centre.items()}
    point = {name: tensor.detach().double() for name, tensor in (start or centre).items()}
    ahead, momentum = point, 1.0
    found = _gradient(loss, point)
    for _ in range(max_steps):
        gap = inner_product(found.tensors, difference(point, centre))
        gap += radius * euclidean_norm(found.tensors)
        if gap <= tolerance:
            break
        slope = _gradient(loss, ahead).tensors
        stepped = projected_to_ball(
            {name: ahead[name] - slope[name] / smoothness for name in ahead}, centre, radius
        )
        after = _gradient(loss, stepped)
        if after.loss > found.loss and momentum > 1.0:
            ahead, momentum = point, 1.0
            continue
        faster = (1.0 + math.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
        share = (momentum - 1.0) / faster
        ahead = {name: stepped[name] + share * (stepped[name] - point[name]) for name in stepped}
        point, found, momentum = stepped, after, faster
    return Minimiser(weights=point, value=found.loss, gap=max(gap, 0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Play:
    """One game of T rounds; U updates, in the order of arrival, U = T.

    Attributes:
        served: Weights of every round.
        losses: f_t(w_t).
        gradients: Of f_t at w_t.
        arrivals: Round whose feedback each update learned.
        updates_before: Updates made before each round was served.
        reports: Of each update.
        hints: Per round what an optimistic rule took off before serving, in units of gradients;
            empty for other rules.
        radius: Of the ball that the rule stays in; None = unbounded.
    """

    served: Sequence[Weights]
    losses: Sequence[float]
    gradients: Sequence[Weights]
    arrivals: Sequence[int]
    updates_before: Sequence[int]
    reports: Sequence[StepReport]
    hints: Sequence[Weights]
    radius: float | None

    @property
    def num_missing(self) -> list[int]:
        """Per round, gradients of earlier rounds that had not arrived when it was served."""
        return [t - count for t, count in enumerate(self.updates_before)]


def play(
    rule: UpdateRule,
    losses: Sequence[Loss],
    *,
    delays: Sequence[int] | None = None,
    radius: float | None = None,
) -> Play:
    """Play the game.

    Args:
        rule: Its clipping must not bind, or its gradients are not those of the losses.
        losses: One per round.
        delays: Rounds until each feedback arrives, >= 0; None = all at once, and then the rule
            learns the loss itself.
        radius: Of the ball that the rule stays in, for the bounds.
    """
    late = [0] * len(losses) if delays is None else list(delays)
    due = sorted(range(len(losses)), key=lambda t: (t + late[t], t))
    served: list[Weights] = []
    gradients: list[Weights] = []
    values: list[float] = []
    updates_before: list[int] = []
    reports: list[StepReport] = []
    hints: list[Weights] = []
    for now, loss in enumerate(losses):
        served.append({name: tensor.clone() for name, tensor in rule.served_weights.items()})
        if isinstance(rule, OptimisticGradient):
            hints.append(rule.applied_hint)
        found = _gradient(loss, served[-1])
        gradients.append(found.tensors)
        values.append(found.loss)
        updates_before.append(len(reports))
        is_last = now == len(losses) - 1
        while len(reports) < len(due):
            arrived = due[len(reports)]
            if arrived + late[arrived] > now and not is_last:
                break
            feedback = losses[arrived] if delays is None else _linear(gradients[arrived])
            missing = len(reports) - updates_before[arrived]
            reports.append(rule.step(feedback, delay_updates=missing))
    return Play(
        served=served,
        losses=values,
        gradients=gradients,
        arrivals=due,
        updates_before=updates_before,
        reports=reports,
        hints=hints,
        radius=radius,
    )


def path_length(comparators: Sequence[Weights]) -> float:
    """Return the sum of distances between successive comparators."""
    pairs = zip(comparators[1:], comparators[:-1], strict=True)
    return sum((euclidean_norm(difference(new, old)) for new, old in pairs), 0.0)


def dynamic_regret(game: Play, minimisers: Sequence[Minimiser]) -> float:
    """Return what was lost beyond the minimiser of every round."""
    return sum(game.losses) - sum(one.value for one in minimisers)


def regret_uncertainty(minimisers: Sequence[Minimiser]) -> float:
    """Return how much larger the regret can be because minimisers are known to a tolerance."""
    return sum(one.gap for one in minimisers)


def online_gradient_bound(game: Play, comparators: Sequence[Weights]) -> float:
    """Return the bound on the regret of projected, delayed online gradient descent.

    With updates u in the order of arrival, step sizes eta_u that do not grow, comparators in that
    order, P the length of their path and D the diameter of the ball:

        D^2 / (2 eta_U) + D P / eta_U + sum_u eta_u |g_u|^2 / 2
            + sum_u |g_u| sum over the updates v between its serving and its arrival of eta_v |g_v|

    Without delay and with one step size this is (D^2 + 2 D P) / (2 eta) + eta sum |g|^2 / 2
    (Zinkevich 2003); the last term is what lateness costs (Wan et al. 2024, section 3). If
    feedback arrives out of order, P is that of the comparators in the order of arrival.

    Raises:
        ValueError: If the game was not played in a ball.
    """
    if game.radius is None:
        raise ValueError("the bound needs a ball: radius is None")
    diameter = 2.0 * game.radius
    walked = path_length([comparators[t] for t in game.arrivals])
    sizes = [report.step_size for report in game.reports]
    norms = [euclidean_norm(game.gradients[t]) for t in game.arrivals]
    strides = [size * norm for size, norm in zip(sizes, norms, strict=True)]
    total = (diameter**2 / 2.0 + diameter * walked) / sizes[-1]
    for update, arrived in enumerate(game.arrivals):
        between = sum(strides[game.updates_before[arrived] : update])
        total += norms[update] * (strides[update] / 2.0 + between)
    return total


def hint_error(game: Play) -> float:
    """Return the sum over rounds of |hint - what it stood for|^2.

    Without delay a hint stands for the round's gradient; with delay, for that and all earlier
    ones that had not arrived (Flaspohler et al. 2021, section 3).
    """
    total = 0.0
    for hint, missing in zip(game.hints, _missing_gradients(game), strict=True):
        total += euclidean_norm(difference(hint, missing)) ** 2
    return total


def optimistic_bound(game: Play, comparators: Sequence[Weights]) -> float:
    """Return the bound on the regret of the optimistic online gradient of one step size.

        (D^2 + 2 D P) / (2 eta) + eta delta / 2

    with the hint error delta (Rakhlin and Sridharan 2013, lemma 1, for moving comparators).
    Without delay D is the diameter of the ball. With delay no projection may bind; the anchor that
    had received all feedback at once stands in for the anchor that is late, and D is the largest
    distance between it and a comparator (Flaspohler et al. 2021).

    Raises:
        ValueError: If the game was not played by an optimistic rule.
    """
    if not game.hints:
        raise ValueError("the bound needs the hints of an optimistic rule: there are none")
    size = game.reports[0].step_size
    diameter = _anchor_distance(game, comparators)
    if game.radius is not None and not any(game.num_missing):
        diameter = 2.0 * game.radius
    walked = path_length(comparators)
    missed = hint_error(game)
    return (diameter**2 + 2.0 * diameter * walked) / (2.0 * size) + size * missed / 2.0


def meta_bound(*, num_experts: int, num_rounds: int, rate: float, share: float) -> float:
    """Return the bound on the regret of fixed share to one expert, in units of the loss scale.

    (ln N + (T - 1) ln(1 / (1 - share))) / rate + rate T / 8 (Herbster and Warmuth 1998).
    """
    stays = -math.log1p(-share) * (num_rounds - 1)
    return (math.log(num_experts) + stays) / rate + rate * num_rounds / 8.0


def ensemble_bound(
    settings: EnsembleSettings,
    *,
    diameter: float,
    walked: float,
    gradient_norm: float,
    num_rounds: int,
) -> float:
    """Return the bound on the regret of the ensemble that learns at once and serves the average.

    That of the best expert, (D^2 + 2 D P) / (2 eta) + eta G^2 T / 2, and of the meta weights on
    top (Zhang, Lu and Zhou 2018). It does not know the path: the grid does. Served averages lose
    no more than experts do on average, by convexity.

    Args:
        settings: Experts of constant step size; ``loss_scale`` must not clip, so >= G D.
        diameter: D of the ball.
        walked: P, path length of the comparators.
        gradient_norm: G, bound on every gradient.
        num_rounds: T.
    """
    experts = [
        (diameter**2 + 2.0 * diameter * walked) / (2.0 * rate)
        + rate * gradient_norm**2 * num_rounds / 2.0
        for rate in settings.learning_rates
    ]
    meta = meta_bound(
        num_experts=settings.num_experts,
        num_rounds=num_rounds,
        rate=settings.meta_rate,
        share=settings.share,
    )
    return min(experts) + settings.loss_scale * meta


def acceptance_length_floor(mean_divergence: float, num_speculative_tokens: int) -> float:
    """Return the mean acceptance length that a mean divergence KL(target, drafter) guarantees.

    Pinsker bounds the rejection of a round by sqrt(KL / 2); the mean of roots is at most the root
    of the mean; and 1 + b + ... + b^K is convex and grows in the acceptance b. So the mean length
    is at least that of b = 1 - sqrt(mean KL / 2). This is lemma 1 of OnlineSPEC with constants,
    under its assumption that the levels of a round accept independently at one rate; where
    minimisers reach the target the mean divergence is the regret divided by T.
    """
    rate = max(1.0 - math.sqrt(max(mean_divergence, 0.0) / 2.0), 0.0)
    return sum(rate**level for level in range(num_speculative_tokens + 1))


def softmax_loss(features: torch.Tensor, target_probs: torch.Tensor) -> Loss:
    """Return the mean cross-entropy of ``softmax(features @ matrix.T)``, convex in ``matrix``.

    Args:
        features: (B, F).
        target_probs: (B, V).
    """

    def loss(weights: Weights) -> torch.Tensor:
        matrix = weights["matrix"]
        logits = features.to(matrix.dtype) @ matrix.T
        return -(target_probs.to(matrix.dtype) * logits.log_softmax(-1)).sum(-1).mean()

    return loss


def softmax_smoothness(features: torch.Tensor) -> float:
    """Return a Lipschitz constant of the gradient of ``softmax_loss``: half the mean |feature|^2.

    The softmax's own matrix of second derivatives has no eigenvalue above 1/2.
    """
    return 0.5 * float(features.double().square().sum(-1).mean())


def _gradient(loss: Loss, weights: Weights) -> Gradient:
    return guarded_gradient(loss, weights, max_norm=math.inf)


def _linear(gradient: Weights) -> Callable[[Weights], torch.Tensor]:
    """Return the loss whose gradient is ``gradient`` everywhere."""
    return lambda found: torch.stack([(found[k] * gradient[k]).sum() for k in gradient]).sum()


def _missing_gradients(game: Play) -> list[dict[str, torch.Tensor]]:
    """Return per round the sum of its gradient and of the earlier ones that had not arrived."""
    sums: list[dict[str, torch.Tensor]] = []
    for now, count in enumerate(game.updates_before):
        absent = sorted(set(range(now + 1)) - set(game.arrivals[:count]))
        names = game.gradients[now]
        sums.append({n: torch.stack([game.gradients[t][n] for t in absent]).sum(0) for n in names})
    return sums


def _anchor_distance(game: Play, comparators: Sequence[Weights]) -> float:
    """Return the largest distance of a comparator from the anchor that nothing reaches late."""
    size, anchor = game.reports[0].step_size, dict(game.served[0])
    largest = 0.0
    for now, gradient in enumerate(game.gradients):
        near = comparators[max(now - 1, 0) : now + 1]
        anchor = {name: tensor.to(near[0][name].dtype) for name, tensor in anchor.items()}
        largest = max(largest, *(euclidean_norm(difference(anchor, one)) for one in near))
        anchor = {name: anchor[name] - size * gradient[name] for name in anchor}
    return largest
