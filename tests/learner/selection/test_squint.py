"""Squint: its integral against exact arithmetic, over all the scales that regrets can have."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.selection.squint import Squint, log_evidence, scaled_erfc


def by_quadrature(regret: float, variance: float) -> float:
    """ln of the integral by panels of ten scales' width around the largest integrand."""
    peak = min(max(regret / (2.0 * variance), 0.0), 0.5) if variance > 0.0 else 0.5 * (regret > 0)
    height = peak * regret - peak * peak * variance
    slope = abs(regret - 2.0 * peak * variance)
    scale = min(0.5, 1.0 / math.sqrt(variance + 1e-30), 1.0 / (slope + 1e-30))
    edges = np.unique(np.clip(peak + scale * np.linspace(-40.0, 40.0, 401), 0.0, 0.5))
    nodes, weights = np.polynomial.legendre.leggauss(8)
    centre, half = (edges[1:] + edges[:-1]) / 2.0, np.diff(edges) / 2.0
    rates = centre[:, None] + half[:, None] * nodes
    values = np.exp(rates * regret - rates**2 * variance - height)
    return height + math.log(float((half[:, None] * weights * values).sum()))


@settings(max_examples=400, deadline=None)
@given(
    share=st.floats(-1.0, 1.0),
    num_rounds=st.integers(1, 10**6),
    size=st.sampled_from([1e-9, 1e-4, 0.01, 0.3, 1.0]),
)
def test_the_integral_is_exact_at_every_scale(share: float, num_rounds: int, size: float) -> None:
    """R and V as regrets of one size leave them: |R| <= T size, V = T size²."""
    regret, variance = share * num_rounds * size, num_rounds * size * size
    expected = by_quadrature(regret, variance)
    assert log_evidence(regret, variance) == pytest.approx(expected, abs=1e-9, rel=1e-9)


@pytest.mark.parametrize("variance", [0.0, 1e-300, 1e-12, 15.999999, 16.000001, 1e6])
@pytest.mark.parametrize("regret", [0.0, 1e-12, 7.999999, 8.000001, -8.000001, 500.0, -500.0])
def test_the_integral_is_smooth_where_the_forms_meet(regret: float, variance: float) -> None:
    if regret * regret > 1e6 * variance and variance < 1e-3 and regret != 0.0:
        variance = regret * regret / 1e6
    expected = by_quadrature(regret, variance)
    assert log_evidence(regret, variance) == pytest.approx(expected, abs=1e-9, rel=1e-9)


def test_the_scaled_complement_is_one_function_over_its_two_forms() -> None:
    assert scaled_erfc(0.0) == 1.0
    below, above = scaled_erfc(25.0 - 1e-9), scaled_erfc(25.0 + 1e-9)
    assert below == pytest.approx(above, rel=1e-9)
    assert scaled_erfc(1e8) * 1e8 * math.sqrt(math.pi) == pytest.approx(1.0, rel=1e-12)


def test_without_regret_the_prior_is_played() -> None:
    assert log_evidence(0.0, 0.0) == pytest.approx(math.log(float(Fraction(1, 2))), abs=1e-15)
    policy = Squint(3, prior=[0.2, 0.3, 0.5])
    policy.learn_windows(np.zeros((1000, 3)))
    np.testing.assert_allclose(policy.probabilities(), [0.2, 0.3, 0.5], atol=1e-12)


def test_a_million_windows_stay_finite() -> None:
    policy = Squint(3)
    for _ in range(10):
        after = policy.learn_windows(np.tile([0.0, 1.0, 0.5], (100_000, 1)))
    assert np.isfinite(after).all()
    np.testing.assert_allclose(after[-1], [1.0, 0.0, 0.0], atol=1e-6)
