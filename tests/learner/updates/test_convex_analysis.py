"""Measured dynamic regret stays under the bounds, with and without delay, and nothing is free."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from learner.updates import convex_analysis as analysis
from learner.updates.convex_analysis import Minimiser, Play
from learner.updates.ensemble import Ensemble, EnsembleSettings
from learner.updates.momentum import MomentumGradient, MomentumSettings
from learner.updates.online_gradient import OnlineGradient, OnlineGradientSettings, StepSize
from learner.updates.optimistic import OptimisticGradient, OptimisticSettings
from learner.updates.rule import Loss, UpdateRule, Weights, difference, euclidean_norm

NUM_TOKENS, NUM_FEATURES, BATCH, ROUNDS = 4, 3, 6, 80
RADIUS = 4.0
START = {"matrix": torch.zeros((NUM_TOKENS, NUM_FEATURES))}


@dataclass(frozen=True)
class Stream:
    """Losses whose minimisers are known: the targets are what those minimisers say."""

    losses: Sequence[Loss]
    minimisers: Sequence[Minimiser]
    gradient_norm: float

    @property
    def comparators(self) -> list[Weights]:
        """The minimisers' weights."""
        return [one.weights for one in self.minimisers]


def stream(kind: str, seed: int = 0) -> Stream:
    """Return a stream whose target stays, drifts, or switches every 20 rounds."""
    rng = np.random.default_rng(seed)
    first, second = rng.standard_normal((2, NUM_TOKENS, NUM_FEATURES))
    losses, minimisers, longest = [], [], 0.0
    for now in range(ROUNDS):
        share = {"stationary": 0.0, "drift": now / ROUNDS, "switch": (now // 20) % 2}[kind]
        matrix = (1.0 - share) * first + share * second
        matrix *= min(1.0, 0.95 * RADIUS / np.linalg.norm(matrix))
        features = torch.from_numpy(rng.uniform(-1.0, 1.0, (BATCH, NUM_FEATURES)))
        probs = (features @ torch.from_numpy(matrix).T).softmax(-1)
        loss = analysis.softmax_loss(features, probs)
        weights = {"matrix": torch.from_numpy(matrix)}
        losses.append(loss)
        minimisers.append(Minimiser(weights=weights, value=float(loss(weights)), gap=0.0))
        longest = max(longest, math.sqrt(2.0) * float(features.norm(dim=-1).max()))
    return Stream(losses, minimisers, longest)


def gradient_settings(
    rate: float, *, step_size: StepSize = "constant", radius: float | None = RADIUS
) -> OnlineGradientSettings:
    """Return plain projected steps without clipping."""
    return OnlineGradientSettings(
        form="projected",
        learning_rate=rate,
        step_size=step_size,
        max_gradient_norm=math.inf,
        max_step_norm=math.inf,
        radius=radius,
    )


def delays(kind: str) -> list[int] | None:
    """Return how many rounds each feedback takes."""
    rng = np.random.default_rng(7)
    if kind == "none":
        return None
    if kind == "random":
        return [int(one) for one in rng.integers(0, 12, ROUNDS)]
    return [int(kind)] * ROUNDS


@pytest.mark.parametrize("kind", ["stationary", "drift", "switch"])
@pytest.mark.parametrize(
    ("late", "step_size"),
    [
        (late, step_size)
        for late in ("none", "4", "16", "random")
        for step_size in ("constant", "average_delay", "accumulated_delay")
        # The average of random delays may fall; then the step size grows, which no bound covers.
        if (late, step_size) != ("random", "average_delay")
    ],
)
def test_the_online_gradient_keeps_its_bound(kind: str, late: str, step_size: StepSize) -> None:
    given = stream(kind)
    rule = OnlineGradient(START, gradient_settings(0.5, step_size=step_size))
    game = analysis.play(rule, given.losses, delays=delays(late), radius=RADIUS)
    regret = analysis.dynamic_regret(game, given.minimisers)
    assert 0.0 < regret <= analysis.online_gradient_bound(game, given.comparators)


@pytest.mark.parametrize("kind", ["stationary", "drift", "switch"])
def test_the_optimist_keeps_its_bound_in_the_ball(kind: str) -> None:
    given = stream(kind)
    rule = OptimisticGradient(START, OptimisticSettings(gradient=gradient_settings(0.5)))
    game = analysis.play(rule, given.losses, radius=RADIUS)
    regret = analysis.dynamic_regret(game, given.minimisers)
    assert 0.0 < regret <= analysis.optimistic_bound(game, given.comparators)


@pytest.mark.parametrize("kind", ["stationary", "drift", "switch"])
@pytest.mark.parametrize("late", ["4", "16", "random"])
def test_the_optimist_keeps_its_bound_when_feedback_is_late(kind: str, late: str) -> None:
    given = stream(kind)
    settings = OptimisticSettings(gradient=gradient_settings(0.1, radius=None))
    game = analysis.play(OptimisticGradient(START, settings), given.losses, delays=delays(late))
    assert max(game.num_missing) >= 4
    regret = analysis.dynamic_regret(game, given.minimisers)
    assert 0.0 < regret <= analysis.optimistic_bound(game, given.comparators)


@pytest.mark.parametrize("kind", ["stationary", "drift", "switch"])
def test_the_ensemble_keeps_its_bound_without_knowing_the_path(kind: str) -> None:
    given = stream(kind)
    settings = EnsembleSettings(
        gradient=gradient_settings(0.5),
        num_experts=4,
        grid_ratio=3.0,
        share=1e-6,
        loss_scale=given.gradient_norm * 2.0 * RADIUS,
        meta_rate=math.sqrt(8.0 * math.log(4.0) / ROUNDS),
        restarts=False,
    )
    game = analysis.play(Ensemble(START, settings), given.losses, radius=RADIUS)
    regret = analysis.dynamic_regret(game, given.minimisers)
    bound = analysis.ensemble_bound(
        settings,
        diameter=2.0 * RADIUS,
        walked=analysis.path_length(given.comparators),
        gradient_norm=given.gradient_norm,
        num_rounds=ROUNDS,
    )
    assert 0.0 < regret <= bound


def test_a_rule_that_climbs_breaks_the_bound() -> None:
    """The bound can fail, so that keeping it says something."""
    given = stream("stationary")
    rule = OnlineGradient(START, gradient_settings(2.0))
    climbing = [lambda w, loss=loss: -loss(w) for loss in given.losses]
    game = analysis.play(rule, climbing, radius=RADIUS)
    losses = [float(f(w)) for f, w in zip(given.losses, game.served, strict=True)]
    regret = analysis.dynamic_regret(replace(game, losses=losses), given.minimisers)
    gentle = replace(game, reports=[replace(one, step_size=0.5) for one in game.reports])
    assert regret > analysis.online_gradient_bound(gentle, given.comparators)


def test_late_feedback_costs_regret_and_the_bound_says_so() -> None:
    given = stream("switch")
    games = [
        analysis.play(
            OnlineGradient(START, gradient_settings(0.5)),
            given.losses,
            delays=delays(late),
            radius=RADIUS,
        )
        for late in ("none", "4", "16")
    ]
    regrets = [analysis.dynamic_regret(game, given.minimisers) for game in games]
    bounds = [analysis.online_gradient_bound(game, given.comparators) for game in games]
    assert regrets == sorted(regrets)
    assert bounds == sorted(bounds)


def test_feedback_arrives_when_it_is_due_and_in_that_order() -> None:
    given = stream("stationary")
    late = [0] * ROUNDS
    late[:4] = [3, 0, 5, 1]
    game = analysis.play(
        OnlineGradient(START, gradient_settings(0.1)), given.losses, delays=late, radius=RADIUS
    )
    assert list(game.arrivals[:5]) == [1, 0, 3, 4, 5]
    assert list(game.updates_before[:6]) == [0, 0, 1, 1, 2, 4]
    assert game.num_missing[:6] == [0, 1, 1, 2, 2, 1]
    assert sorted(game.arrivals) == list(range(ROUNDS))


def test_without_delay_gradients_and_losses_are_the_same_feedback() -> None:
    given = stream("drift")
    games: list[Play] = [
        analysis.play(
            OnlineGradient(START, gradient_settings(0.3)), given.losses, delays=late, radius=RADIUS
        )
        for late in (None, [0] * ROUNDS)
    ]
    assert games[0].losses == pytest.approx(games[1].losses, abs=1e-6)


def test_hints_that_are_right_leave_no_error() -> None:
    """The same linear loss every round: all but the first hint are exact, delay or not."""
    slope = torch.full((NUM_TOKENS, NUM_FEATURES), 0.01)
    losses: list[Loss] = [lambda w: (w["matrix"] * slope).sum()] * 30
    settings = OptimisticSettings(gradient=gradient_settings(0.1, radius=None))
    once = analysis.play(OptimisticGradient(START, settings), losses)
    norm = float(slope.norm())
    assert analysis.hint_error(once) == pytest.approx(norm**2)
    late = analysis.play(OptimisticGradient(START, settings), losses, delays=[3] * 30)
    # Nothing has arrived until round 3: 1, 2, 3 and 4 gradients are missing, and no hint. Then the
    # delay of what arrives, counted in updates, grows from 0 to 3, and the hint with it.
    missed = (1, 2, 3, 4, 3, 2, 1)
    assert analysis.hint_error(late) == pytest.approx(sum((x * norm) ** 2 for x in missed))


@pytest.mark.parametrize("radius", [0.5, 3.0])
def test_minimisers_are_found_to_their_gap(radius: float) -> None:
    """Against the known minimiser where the ball holds it, and against every direction if not."""
    features = torch.eye(NUM_FEATURES, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    matrix = torch.randn((NUM_TOKENS, NUM_FEATURES), generator=generator, dtype=torch.float64)
    matrix = matrix / matrix.norm()
    loss = analysis.softmax_loss(features, (features @ matrix.T).softmax(-1))
    smoothness = analysis.softmax_smoothness(features)
    found = analysis.minimiser(loss, START, radius=radius, smoothness=smoothness)
    away = euclidean_norm(found.weights)
    assert 0.0 <= found.gap <= 1e-6
    assert away <= radius + 1e-9
    best = float(loss({"matrix": matrix}))
    if radius > 1.0:
        assert best - 1e-9 <= found.value <= best + found.gap
    else:
        assert away == pytest.approx(radius)
        for _ in range(50):
            step = torch.randn(matrix.shape, generator=generator, dtype=torch.float64)
            other = found.weights["matrix"] + 0.05 * step
            other = other * min(1.0, radius / float(other.norm()))
            assert float(loss({"matrix": other})) >= found.value - found.gap


def test_a_search_that_starts_near_the_end_is_short() -> None:
    features = torch.eye(NUM_FEATURES, dtype=torch.float64)
    calls = 0
    inner = analysis.softmax_loss(features, torch.full((NUM_FEATURES, NUM_TOKENS), 0.25))

    def loss(weights: Weights) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return inner(weights)

    away = {"matrix": torch.eye(NUM_TOKENS, NUM_FEATURES)}
    smoothness = analysis.softmax_smoothness(features)
    far = analysis.minimiser(loss, START, radius=3.0, smoothness=smoothness, start=away)
    from_far, calls = calls, 0
    again = analysis.minimiser(loss, START, radius=3.0, smoothness=smoothness, start=far.weights)
    assert calls <= 2 < from_far
    assert again.value <= far.value


def test_the_path_is_as_long_as_its_steps() -> None:
    points = [{"x": torch.tensor([float(x), 0.0])} for x in (0, 3, 3, -1)]
    assert analysis.path_length(points) == pytest.approx(7.0)
    assert analysis.path_length(points[:1]) == 0.0
    assert euclidean_norm(difference(points[1], points[0])) == 3.0


def test_the_meta_bound_is_that_of_hedge_without_a_share() -> None:
    rate = math.sqrt(8.0 * math.log(3.0) / 100.0)
    found = analysis.meta_bound(num_experts=3, num_rounds=100, rate=rate, share=1e-12)
    assert found == pytest.approx(math.sqrt(100.0 * math.log(3.0) / 2.0))


def test_no_drafter_is_accepted_less_than_its_divergence_allows() -> None:
    """Random targets and drafters; levels accept independently at the round's rate."""
    rng = np.random.default_rng(1)
    scale = rng.uniform(0.0, 1.5, (400, 1))
    p = rng.dirichlet(np.ones(8), 400)
    q = p * np.exp(scale * rng.standard_normal((400, 8)))
    q /= q.sum(1, keepdims=True)
    divergence = float((p * np.log(p / q)).sum(1).mean())
    rate = np.minimum(p, q).sum(1)
    length = sum(rate**level for level in range(5)).mean()
    floor = analysis.acceptance_length_floor(divergence, 4)
    assert 1.0 < floor <= length
    assert analysis.acceptance_length_floor(0.0, 4) == 5.0
    assert analysis.acceptance_length_floor(99.0, 4) == 1.0


def test_invalid_games_are_refused() -> None:
    given = stream("stationary")
    game = analysis.play(OnlineGradient(START, gradient_settings(0.1)), given.losses[:3])
    with pytest.raises(ValueError, match="radius is None"):
        analysis.online_gradient_bound(game, given.comparators[:3])
    with pytest.raises(ValueError, match="there are none"):
        analysis.optimistic_bound(game, given.comparators[:3])


@pytest.mark.parametrize(("kind", "late"), [("drift", "none"), ("switch", "none"), ("switch", "4")])
def test_optimism_loses_less_than_the_gradient_and_momentum_more(kind: str, late: str) -> None:
    """At one step size, which for late feedback is that of the average delay."""
    regrets = {"optimistic": 0.0, "online_gradient": 0.0, "momentum": 0.0}
    gradient = gradient_settings(1.5, step_size="average_delay")
    for seed in range(3):
        given = stream(kind, seed)
        rules: tuple[UpdateRule, ...] = (
            OptimisticGradient(START, OptimisticSettings(gradient=gradient)),
            OnlineGradient(START, gradient),
            MomentumGradient(START, MomentumSettings(gradient=gradient)),
        )
        for rule in rules:
            game = analysis.play(rule, given.losses, delays=delays(late), radius=RADIUS)
            regrets[rule.name] += analysis.dynamic_regret(game, given.minimisers)
    assert regrets["optimistic"] < 0.97 * regrets["online_gradient"]
    assert regrets["online_gradient"] < 0.9 * regrets["momentum"]
