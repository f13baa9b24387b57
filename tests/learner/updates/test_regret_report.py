"""A row of the table: every number is what it says, and no bound is claimed that does not hold."""

from __future__ import annotations

import math

import pytest
import torch

from learner.updates.convex_analysis import path_length, softmax_smoothness
from learner.updates.ensemble import Ensemble, EnsembleSettings
from learner.updates.momentum import MomentumGradient, MomentumSettings
from learner.updates.online_gradient import OnlineGradient
from learner.updates.optimistic import OptimisticGradient, OptimisticSettings
from learner.updates.regret_report import RegretReport, regret_report, stream_minimisers
from learner.updates.rule import UpdateRule, difference, euclidean_norm
from tests.learner.updates.test_convex_analysis import (
    RADIUS,
    ROUNDS,
    START,
    delays,
    gradient_settings,
    stream,
)

GIVEN = stream("switch")


def rule_of(name: str) -> UpdateRule:
    """Return a rule at the centre of the ball."""
    gradient = gradient_settings(0.5)
    if name == "optimistic":
        return OptimisticGradient(START, OptimisticSettings(gradient=gradient))
    if name == "momentum":
        return MomentumGradient(START, MomentumSettings(gradient=gradient))
    if name == "ensemble":
        scale = GIVEN.gradient_norm * 2.0 * RADIUS
        settings = EnsembleSettings(gradient=gradient, loss_scale=scale, restarts=False)
        return Ensemble(START, settings)
    return OnlineGradient(START, gradient)


def report_of(name: str, late: str) -> RegretReport:
    """Return the row of a rule on the switching stream."""
    return regret_report(
        rule_of(name),
        GIVEN.losses,
        GIVEN.minimisers,
        radius=RADIUS,
        delays=delays(late),
        gradient_norm=GIVEN.gradient_norm,
    )


@pytest.mark.parametrize(
    ("name", "late", "has_bound"),
    [
        ("online_gradient", "none", True),
        ("online_gradient", "4", True),
        ("optimistic", "none", True),
        ("optimistic", "4", False),
        ("ensemble", "none", True),
        ("ensemble", "4", False),
        ("momentum", "none", False),
    ],
)
def test_bounds_are_given_where_a_theorem_covers_the_game(
    name: str, late: str, has_bound: bool
) -> None:
    report = report_of(name, late)
    assert (report.rule, report.num_rounds) == (name, ROUNDS)
    assert report.keeps_bound is (True if has_bound else None)
    assert report.loss == pytest.approx(report.regret + sum(one.value for one in GIVEN.minimisers))
    assert report.path_length == pytest.approx(path_length(GIVEN.comparators))
    assert (report.hint_error is not None) == (name == "optimistic")


def test_what_is_not_known_of_the_minimisers_counts_against_the_rule() -> None:
    report = RegretReport(
        rule="online_gradient",
        num_rounds=1,
        loss=2.0,
        regret=0.9,
        regret_uncertainty=0.2,
        path_length=0.0,
        hint_error=None,
        bound=1.0,
    )
    assert report.keeps_bound is False


def test_the_minimisers_of_a_stream_are_within_their_gaps() -> None:
    losses = GIVEN.losses[:6]
    found = stream_minimisers(
        losses,
        START,
        radius=RADIUS,
        smoothness=[softmax_smoothness(torch.ones((1, 3)))] * 6,
        tolerance=2e-3,
        max_steps=400,
    )
    for one, known in zip(found, GIVEN.minimisers, strict=False):
        assert known.value - 1e-9 <= one.value <= known.value + one.gap + 1e-9
        assert euclidean_norm(difference(one.weights, START)) <= RADIUS + 1e-9
        assert one.gap < math.inf
