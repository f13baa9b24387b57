"""One table row of the theory: what a rule lost on a convex stream, and what it was allowed to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from learner.updates.convex_analysis import (
    Minimiser,
    Play,
    dynamic_regret,
    ensemble_bound,
    hint_error,
    minimiser,
    online_gradient_bound,
    optimistic_bound,
    path_length,
    play,
    regret_uncertainty,
)
from learner.updates.ensemble import Ensemble
from learner.updates.online_gradient import OnlineGradient
from learner.updates.rule import Loss, UpdateRule, Weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RegretReport:
    """A rule on a stream of T convex losses.

    Attributes:
        rule: Its name.
        num_rounds: T.
        loss: Sum over rounds of what was served.
        regret: Beyond the minimisers of every round.
        regret_uncertainty: By how much the regret may be larger, for minimisers are known to a
            certified gap only.
        path_length: Of the minimisers, Euclidean.
        hint_error: Of an optimistic rule, else None.
        bound: On the regret; None where no theorem covers the rule and the delays.
    """

    rule: str
    num_rounds: int
    loss: float
    regret: float
    regret_uncertainty: float
    path_length: float
    hint_error: float | None
    bound: float | None

    @property
    def keeps_bound(self) -> bool | None:
        """Whether the largest regret it may have had is under the bound; None without a bound."""
        if self.bound is None:
            return None
        return self.regret + self.regret_uncertainty <= self.bound


def stream_minimisers(
    losses: Sequence[Loss],
    centre: Weights,
    *,
    radius: float,
    smoothness: Sequence[float],
    tolerance: float = 1e-4,
    max_steps: int = 2000,
) -> list[Minimiser]:
    """Return the minimiser of every round, each search begun at the one before.

    Args:
        losses: Convex, one per round.
        centre: Of the ball, where the rules begin too.
        radius: Of the ball.
        smoothness: Of each loss (``convex_analysis.minimiser``).
        tolerance: Gap at which a search stops.
        max_steps: Steps after which it stops anyway.
    """
    found: list[Minimiser] = []
    for loss, smooth in zip(losses, smoothness, strict=True):
        found.append(
            minimiser(
                loss,
                centre,
                radius=radius,
                smoothness=smooth,
                start=found[-1].weights if found else None,
                tolerance=tolerance,
                max_steps=max_steps,
            )
        )
    return found


def regret_report(
    rule: UpdateRule,
    losses: Sequence[Loss],
    minimisers: Sequence[Minimiser],
    *,
    radius: float,
    delays: Sequence[int] | None = None,
    gradient_norm: float | None = None,
) -> RegretReport:
    """Play a rule and put its regret beside its bound.

    Args:
        rule: At the centre of the ball, in the ``projected`` form, without clipping, of constant
            or accumulated step size.
        losses: Convex, one per round.
        minimisers: One per round, in the ball.
        radius: Of the ball, which the rule keeps to as well.
        delays: Rounds until each feedback arrives; None = at once.
        gradient_norm: Bound on every gradient in the ball, which the ensemble's bound needs.
    """
    game = play(rule, losses, delays=delays, radius=radius)
    comparators = [one.weights for one in minimisers]
    return RegretReport(
        rule=rule.name,
        num_rounds=len(losses),
        loss=sum(game.losses),
        regret=dynamic_regret(game, minimisers),
        regret_uncertainty=regret_uncertainty(minimisers),
        path_length=path_length(comparators),
        hint_error=hint_error(game) if game.hints else None,
        bound=_bound(rule, game, comparators, radius, gradient_norm),
    )


def _bound(
    rule: UpdateRule,
    game: Play,
    comparators: Sequence[Weights],
    radius: float,
    gradient_norm: float | None,
) -> float | None:
    is_late = any(game.num_missing)
    if isinstance(rule, OnlineGradient):
        return online_gradient_bound(game, comparators)
    if game.hints:
        # Late hints are covered only where no projection binds, which a ball does not promise.
        return None if is_late else optimistic_bound(game, comparators)
    if isinstance(rule, Ensemble) and gradient_norm is not None and not is_late:
        return ensemble_bound(
            rule.settings,
            diameter=2.0 * radius,
            walked=path_length(comparators),
            gradient_norm=gradient_norm,
            num_rounds=len(game.losses),
        )
    return None
