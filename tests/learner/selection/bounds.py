"""The stated bound of every policy, as a function of the game that was played.

``BOUNDS`` bounds the regret to every single drafter, (N,), ``SHIFTING_BOUNDS`` the regret to a
sequence of drafters, if feedback arrives in time. Every policy with full information goes through
the same weights late as in time; so late feedback adds no more than the mass that moves
while it is out. ``MOVES`` bounds that beforehand; for the others it is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from learner.selection import CompiledPolicy
from learner.selection.ada_normal_hedge_grid import LEARNING_RATES, NUM_LEARNERS, SHARES, TO_PAST
from tests.learner.selection.play import Play

Vector = NDArray[np.float64]
Bound = Callable[[Play, CompiledPolicy], Vector]
ShiftingBound = Callable[[Play, CompiledPolicy, NDArray[np.int64]], float]

UNIFORM_PRIOR_ONLY = ("normal_hedge",)
"""Policies whose bound is known for a uniform prior only."""


def _rates(play: Play) -> Vector:
    num_rounds, num_drafters = play.losses.shape
    return np.asarray(np.sqrt(8.0 * np.log(num_drafters) / np.arange(1, num_rounds + 1)))


def hedge(play: Play, policy: CompiledPolicy) -> Vector:
    prior = policy.table[1]
    rates = _rates(play)
    return np.asarray(np.log(1.0 / prior) / rates[-1] + rates.sum() / 8.0)


def normal_hedge(play: Play, policy: CompiledPolicy) -> Vector:
    """What the tests hold it to: below theorem 1, whose constants are large."""
    num_rounds, num_drafters = play.losses.shape
    held = np.sqrt(num_rounds * (1.0 + np.log(num_drafters)))
    return np.full(num_drafters, min(held, _normal_hedge_theorem(num_rounds, num_drafters)))


def _normal_hedge_theorem(num_rounds: int, num_drafters: int) -> float:
    logarithm = np.log(num_drafters)
    deltas = np.linspace(0.01, 0.5, 50)
    constant = 16.0 * logarithm**2 / deltas * (10.2 / deltas**2 + logarithm)
    inner = 3.0 * (1.0 + 50.0 * deltas) * num_rounds + constant
    return float(np.sqrt((1.0 + logarithm) * inner.min()))


def ada_normal_hedge(play: Play, policy: CompiledPolicy) -> Vector:
    prior = policy.table[1]
    absolute = np.abs(play.expected_losses[:, None] - play.losses).sum(axis=0)
    mean = 1.0 + 1.5 * float(prior @ (1.0 + np.log(1.0 + absolute)))
    spread = np.log(mean) + np.log(1.0 + np.log(len(prior)))
    return np.asarray(np.sqrt(3.0 * absolute * (np.log(1.0 / prior) + spread)))


def squint(play: Play, policy: CompiledPolicy) -> Vector:
    prior = policy.table[1]
    num_rounds = len(play.losses)
    variance = ((play.expected_losses[:, None] - play.losses) ** 2).sum(axis=0)
    logarithm = np.log(num_rounds + 1.0)
    root = 1.0 + np.sqrt(2.0 * np.log((0.5 + logarithm) / prior))
    return np.asarray(
        np.sqrt(2.0 * variance) * root + 5.0 * np.log(1.0 + (1.0 + 2.0 * logarithm) / prior)
    )


def leader(play: Play, policy: CompiledPolicy) -> Vector:
    """Who plays the next round's leader has no regret: what moves is the bound."""
    return np.full(policy.num_drafters, play.moves.sum())


def _shares(
    play: Play,
    prior: Vector,
    rate: float,
    share: float,
    comparators: NDArray[np.int64],
    *,
    to_prior: float = 1.0,
) -> float:
    """Return fixed share's bound; ``to_prior`` is the part of the share that the prior gets."""
    num_rounds = len(play.losses)
    switched = np.flatnonzero(np.diff(comparators)) + 1
    entered = np.concatenate([comparators[:1], comparators[switched]])
    switches = len(switched)
    nats = np.log(1.0 / prior[entered]).sum() + switches * np.log(1.0 / (share * to_prior))
    nats += (num_rounds - switches - 1) * np.log(1.0 / (1.0 - share))
    return float(nats / rate + rate * num_rounds / 8.0)


def fixed_share_shifting(
    play: Play, policy: CompiledPolicy, comparators: NDArray[np.int64]
) -> float:
    rate, share = policy.numbers[:2]
    return _shares(play, policy.table[1], rate, share, comparators)


def mixing_past_posteriors_shifting(
    play: Play, policy: CompiledPolicy, comparators: NDArray[np.int64]
) -> float:
    rate, share = policy.numbers[:2]
    num_rounds = len(play.losses)
    switches = np.count_nonzero(np.diff(comparators))
    nats = np.log(1.0 / policy.table[1, np.unique(comparators)]).sum()
    nats += switches * np.log(num_rounds / share)
    nats += (num_rounds - switches - 1) * np.log(1.0 / (1.0 - share))
    return float(nats / rate + rate * num_rounds / 8.0)


def grid_shifting(play: Play, policy: CompiledPolicy, comparators: NDArray[np.int64]) -> float:
    """AdaNormalHedge's regret to the best of the grid's learners, and theirs.

    Of a learner's share only the part that does not go to the past is sure to reach a drafter.
    """
    num_rounds = len(play.losses)
    mean = 1.0 + 1.5 * (1.0 + np.log(1.0 + num_rounds))
    number, to_prior = float(NUM_LEARNERS), 1.0 - policy.numbers[TO_PAST]
    logarithms = np.log(number) + np.log(mean) + np.log(1.0 + np.log(number))
    members = [
        _shares(play, policy.table[1], rate, share, comparators, to_prior=to_prior)
        for rate in LEARNING_RATES
        for share in SHARES
    ]
    return float(np.sqrt(3.0 * num_rounds * logarithms)) + min(members)


def _to_single_drafters(bound: ShiftingBound) -> Bound:
    def single(play: Play, policy: CompiledPolicy) -> Vector:
        num_rounds, num_drafters = play.losses.shape
        return np.array([bound(play, policy, np.full(num_rounds, i)) for i in range(num_drafters)])

    return single


SHIFTING_BOUNDS: Mapping[str, ShiftingBound] = {
    "ada_normal_hedge_grid": grid_shifting,
    "fixed_share": fixed_share_shifting,
    "mixing_past_posteriors": mixing_past_posteriors_shifting,
}

BOUNDS: Mapping[str, Bound] = {
    "ada_normal_hedge": ada_normal_hedge,
    "discounted_follow_the_leader": leader,
    "follow_the_leader": leader,
    "hedge": hedge,
    "normal_hedge": normal_hedge,
    "squint": squint,
    **{name: _to_single_drafters(bound) for name, bound in SHIFTING_BOUNDS.items()},
}

MOVES: Mapping[str, Callable[[Play, CompiledPolicy], Vector]] = {
    "fixed_share": lambda play, policy: np.full(
        len(play.losses), policy.numbers[0] / 4.0 + policy.numbers[1]
    ),
    "hedge": lambda play, policy: 3.0 / 8.0 * _rates(play),
    "mixing_past_posteriors": lambda play, policy: np.full(
        len(play.losses), policy.numbers[0] / 4.0 + policy.numbers[1]
    ),
}


def moved_while_out(moves: Vector, num_learned_before: NDArray[np.int64]) -> float:
    """Sum over rounds of the mass that the windows move which are played but not yet learned."""
    sums = np.concatenate([[0.0], np.cumsum(moves)])
    rounds = np.arange(len(num_learned_before))
    return float((sums[rounds] - sums[num_learned_before]).sum())
