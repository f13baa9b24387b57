"""Every policy with full information keeps its stated bound on a thousand games."""

from __future__ import annotations

import numpy as np
import pytest

from learner.selection import CompiledPolicy, parse_policy
from tests.learner.selection import bounds
from tests.learner.selection.play import Play, in_time, play_windows
from tests.learner.selection.sequences import NUM_GAMES, Game, games
from tests.learner.selection.teaching import FULL_INFORMATION

BOUNDED = {"ada_normal_hedge_grid": "ada_normal_hedge_grid:memory=1"}
"""Specification for which a policy's bound is stated, where that is not the default one."""

ROUNDING = 1e-6


def policy_of(name: str, game: Game) -> CompiledPolicy:
    num_drafters = game.losses.shape[1]
    prior = None if name in bounds.UNIFORM_PRIOR_ONLY else game.prior
    return parse_policy(BOUNDED.get(name, name)).build(num_drafters, prior=prior)


def play_in_time(name: str, game: Game) -> Play:
    return play_windows(
        policy_of(name, game),
        game.losses,
        in_time(len(game.losses)),
        hurts_heaviest=game.hurts_heaviest,
    )


def test_there_are_a_thousand_games_with_all_delays() -> None:
    longest = [
        int((np.arange(len(game.losses)) - game.num_learned_before).max()) for game in games()
    ]
    assert len(longest) == NUM_GAMES == 1000
    assert set(longest) >= {0, 1, 16} and max(longest) > 900


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_regret_keeps_its_bound(name: str) -> None:
    for seed, game in enumerate(games()):
        played = play_in_time(name, game)
        bound = bounds.BOUNDS[name](played, policy_of(name, game))
        assert np.all(played.regrets <= bound + ROUNDING), (seed, game.family)


@pytest.mark.parametrize("name", bounds.SHIFTING_BOUNDS)
def test_regret_to_a_sequence_of_drafters_keeps_its_bound(name: str) -> None:
    for seed, game in enumerate(games()):
        played = play_in_time(name, game)
        bound = bounds.SHIFTING_BOUNDS[name](played, policy_of(name, game), game.comparators)
        assert played.regret_to(game.comparators) <= bound + ROUNDING, (seed, game.family)


@pytest.mark.parametrize("name", FULL_INFORMATION)
def test_late_feedback_adds_at_most_the_mass_that_moves_while_it_is_out(name: str) -> None:
    for seed, game in enumerate(games()):
        played = play_windows(
            policy_of(name, game),
            game.losses,
            game.num_learned_before,
            hurts_heaviest=game.hurts_heaviest,
        )
        timely = play_windows(policy_of(name, game), played.losses, in_time(len(played.losses)))
        policy = policy_of(name, game)
        moves = bounds.MOVES[name](timely, policy) if name in bounds.MOVES else timely.moves
        assert np.all(timely.moves <= moves + ROUNDING), (seed, game.family)
        bound = bounds.BOUNDS[name](timely, policy)
        bound = bound + bounds.moved_while_out(moves, game.num_learned_before)
        assert np.all(played.regrets <= bound + ROUNDING), (seed, game.family)


@pytest.mark.parametrize("name", ["hedge", "fixed_share", "normal_hedge"])
def test_the_bounds_are_not_vacuous(name: str) -> None:
    """Some adversary takes more than half of what the bound allows."""
    ratios = []
    for game in games():
        played = play_in_time(name, game)
        ratios.append(np.max(played.regrets / bounds.BOUNDS[name](played, policy_of(name, game))))
    assert 0.5 < max(ratios) <= 1.0
