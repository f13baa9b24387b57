"""The dynamic programme equals brute force; the other comparators equal their definitions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from replay import comparators
from replay.comparators import (
    best_fixed,
    best_per_group,
    best_switching,
    clairvoyant,
    path_length,
)


def total(losses: NDArray[np.float64], sequence: NDArray[np.integer[Any]]) -> float:
    return float(losses[np.arange(losses.shape[0]), sequence].sum())


@st.composite
def small_losses(draw: st.DrawFn) -> NDArray[np.float64]:
    num_rounds = draw(st.integers(1, 6))
    num_drafters = draw(st.integers(1, 3))
    # Tenths make ties common, which is where a dynamic programme goes wrong.
    tenths = draw(st.lists(st.integers(0, 10), min_size=18, max_size=18))
    return np.array(tenths[: num_rounds * num_drafters]).reshape(num_rounds, num_drafters) / 10


@given(small_losses(), st.integers(0, 7))
@settings(max_examples=150, deadline=None)
def test_the_best_switching_sequences_equal_brute_force(
    losses: NDArray[np.float64], max_switches: int
) -> None:
    num_rounds, num_drafters = losses.shape
    found = best_switching(losses, max_switches)
    every = [np.array(one) for one in itertools.product(range(num_drafters), repeat=num_rounds)]
    for num_switches in range(max_switches + 1):
        allowed = [one for one in every if path_length(one) <= num_switches]
        best = min(total(losses, one) for one in allowed)
        assert found.total_losses[num_switches] == pytest.approx(best, abs=1e-12)
        sequence = found.sequence(num_switches)
        assert path_length(sequence) <= num_switches
        assert total(losses, sequence) == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("rounds_per_block", [1, 7, 400])
def test_sequences_walked_back_over_blocks_reach_their_loss(
    monkeypatch: pytest.MonkeyPatch, rounds_per_block: int
) -> None:
    monkeypatch.setattr(comparators, "ROUNDS_PER_BLOCK", rounds_per_block)
    losses = np.random.default_rng(3).random((400, 5))
    found = best_switching(losses, 25)
    assert np.all(np.diff(found.total_losses) < 0.0)
    for num_switches in range(found.max_switches + 1):
        sequence = found.sequence(num_switches)
        assert path_length(sequence) == num_switches
        assert total(losses, sequence) == pytest.approx(found.total_losses[num_switches])


def test_zero_switches_is_the_best_fixed_drafter_and_all_switches_the_clairvoyant() -> None:
    losses = np.random.default_rng(4).random((30, 4))
    found = best_switching(losses, 29)
    assert np.array_equal(found.sequence(0), best_fixed(losses))
    assert np.array_equal(found.sequence(29), clairvoyant(losses))


def test_a_planted_switch_is_found_where_it_is() -> None:
    losses = np.ones((50, 3))
    losses[:20, 1] = 0.0
    losses[20:, 2] = 0.0
    expected = np.array([1] * 20 + [2] * 30)
    assert np.array_equal(best_switching(losses, 5).sequence(1), expected)


def test_with_one_drafter_every_comparator_is_that_drafter() -> None:
    losses = np.random.default_rng(5).random((9, 1))
    found = best_switching(losses, 4)
    assert np.allclose(found.total_losses, losses.sum())
    assert path_length(found.sequence(4)) == 0


def test_the_best_of_each_group_is_the_best_fixed_one_of_its_rounds() -> None:
    losses = np.random.default_rng(6).random((60, 4))
    groups = np.random.default_rng(7).integers(0, 5, 60)
    found = best_per_group(losses, groups)
    for group in range(5):
        rows = groups == group
        assert np.array_equal(found[rows], best_fixed(losses[rows]))


def test_half_a_million_rounds_take_seconds_and_stay_exact() -> None:
    # The second half is the first with drafters swapped, so one switch halves the loss.
    first = np.column_stack([np.zeros(250_000), np.full(250_000, 0.5)])
    found = best_switching(np.vstack([first, first[:, ::-1]]), 4)
    assert found.total_losses == pytest.approx([125_000.0, 0.0, 0.0, 0.0, 0.0])
    assert path_length(found.sequence(4)) == 1


@pytest.mark.parametrize(
    ("losses", "max_switches", "message"),
    [
        (np.empty((0, 3)), 1, r"shape \(0, 3\)"),
        (np.empty((3, 0)), 1, r"shape \(3, 0\)"),
        (np.array([[0.5, np.nan]]), 1, "1 non-finite"),
        (np.ones((2, 2)), -1, "max_switches=-1"),
    ],
)
def test_invalid_losses_and_switches_are_refused(
    losses: NDArray[np.float64], max_switches: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        best_switching(losses, max_switches)


def test_invalid_number_of_switches_of_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_switches=3 outside 0\.\.2"):
        best_switching(np.ones((2, 2)), 2).sequence(3)
