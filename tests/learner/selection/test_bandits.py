"""The bandits: their bounds, what delay does, and where river's agree and where they do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from river import bandit as river_bandit

from learner.selection import RoundFeedback, parse_policy, policy_from_name
from learner.selection.ucbspec import confidence_radius
from tests.learner.selection.play import Play, in_time, late, play_rounds
from tests.learner.selection.sequences import games
from tests.learner.selection.teaching import feedback

NUM_ENVIRONMENTS, NUM_RUNS = 100, 10
LONG_DELAY = 1000


@pytest.mark.parametrize("is_late", [False, True])
def test_exp3spec_keeps_its_bound_on_losses_fixed_beforehand(is_late: bool) -> None:
    """The mean of five runs; late, one learner is held to the bound of the pool."""
    for seed, game in enumerate(games()):
        num_rounds, num_drafters = game.losses.shape
        learned = game.num_learned_before if is_late else in_time(num_rounds)
        delay = int((np.arange(num_rounds) - learned).max())
        runs = [
            play_rounds(policy_from_name("exp3spec", num_drafters), game.losses, learned, run)
            for run in range(5)
        ]
        regrets = np.mean([run.regrets for run in runs], axis=0)
        pool = np.ceil(num_rounds / (delay + 1))
        bound = (delay + 1) * 2.0 * np.sqrt(pool * num_drafters * np.log(num_drafters))
        assert np.all(regrets <= bound), (seed, game.family)


def environment(seed: int) -> tuple[NDArray[np.float64], int, int]:
    """Mean losses of the drafters, rounds, and delay: none, one, 2 K, or hundreds."""
    generator = np.random.default_rng(seed)
    means = generator.random(int(generator.choice([2, 4, 8])))
    delay = (0, 1, 16, LONG_DELAY)[seed % 4]
    return means, 2 * LONG_DELAY if delay == LONG_DELAY else 600, delay


def play_environment(text: str, seed: int, run: int) -> tuple[Play, NDArray[np.float64]]:
    """A run and its gaps (N,): losses are 0 or 1, drawn independently with the same means."""
    means, num_rounds, delay = environment(seed)
    generator = np.random.default_rng([seed, run])
    losses = (generator.random((num_rounds, len(means))) < means).astype(np.float64)
    learned = late(np.full(num_rounds, delay))
    return play_rounds(
        policy_from_name(text, len(means)), losses, learned, run
    ), means - means.min()


@pytest.mark.parametrize("text", ["ucb:width=1", "metasd_ucb:width=1"])
def test_ucb_of_width_one_keeps_its_bound_if_means_stand(text: str) -> None:
    for seed in range(NUM_ENVIRONMENTS):
        _, num_rounds, delay = environment(seed)
        runs = [play_environment(text, seed, run) for run in range(NUM_RUNS)]
        gaps = runs[0][1]
        regret = np.mean([gaps[played.drawn].sum() for played, _ in runs])
        positive = gaps[gaps > 0.0]
        bound = (8.0 * np.log(num_rounds) / positive).sum()
        bound += (1.0 + np.pi**2 / 3.0 + delay) * positive.sum()
        assert regret <= bound, seed


def test_ucbspec_keeps_its_bound_with_the_promised_probability() -> None:
    num_broken = 0
    for seed in range(NUM_ENVIRONMENTS):
        _, num_rounds, delay = environment(seed)
        for run in range(NUM_RUNS):
            played, gaps = play_environment("ucbspec", seed, run)
            counts = np.arange(1.0, num_rounds + 1.0)
            radii = [confidence_radius(n, len(gaps), float(num_rounds), 0.05) for n in counts]
            last = (2.0 * np.array(radii) >= gaps[:, None]).sum(axis=1)
            bound = float((gaps * np.minimum(last + 1 + delay, num_rounds)).sum())
            num_broken += gaps[played.drawn].sum() > bound
    assert num_broken <= 0.05 * NUM_ENVIRONMENTS * NUM_RUNS


@pytest.mark.parametrize("text", ["ucb", "metasd_ucb", "ucbspec", "ucb:width=1"])
def test_an_adversary_makes_the_regret_of_index_policies_linear(text: str) -> None:
    """They are sure of their choice, so whoever knows them can hurt it every time."""
    policy, lost, losses = policy_from_name(text, 2), 0.0, np.zeros(2)
    for _ in range(2000):
        probabilities = policy.probabilities()
        index = int(np.argmax(probabilities))
        lost += probabilities[index]
        losses[index] += 1.0
        policy.learn_round(feedback(index, 1.0))
    assert lost - losses.min() > 0.2 * 2000


def test_the_literal_ucbspec_plays_in_turn_within_a_request() -> None:
    """The warning of the notes: a hundred rounds in, the radius still hides a gap of 0.2."""
    losses = np.tile([0.3] + [0.5] * 7, (120, 1))
    literal = play_rounds(policy_from_name("ucbspec", 8), losses, in_time(120), 0)
    tuned = play_rounds(policy_from_name("ucb", 8), losses, in_time(120), 0)
    assert np.count_nonzero(literal.drawn == 0) < 30
    assert np.count_nonzero(tuned.drawn == 0) > 60


def test_ucbspec_follows_the_formula() -> None:
    """Lengths 1..K + 1, with the radius K/2 sqrt((1 + n)/n² (1 + 2 ln(N t² sqrt(1 + n)/δ)))."""
    policy = parse_policy("ucbspec").build(3, num_speculative_tokens=4)
    lengths: list[list[float]] = [[], [], []]
    generator = np.random.default_rng(0)
    for turn in range(1, 200):
        index = int(np.argmax(policy.probabilities()))
        length = float(generator.integers(1, 6))
        lengths[index].append(length)
        policy.learn_round(feedback(index, 1.0 - length / 5.0))
        if turn >= 3:
            counts = np.array([len(seen) for seen in lengths], dtype=np.float64)
            logarithm = np.log(3 * (turn + 1) ** 2 * np.sqrt(1 + counts) / 0.05)
            radius = 2.0 * np.sqrt((1 + counts) / counts**2 * (1 + 2 * logarithm))
            index_of = np.array([np.mean(seen) for seen in lengths]) + radius
            assert policy.probabilities()[int(np.argmax(index_of))] > 0.0


def test_exp3spec_follows_the_formula_with_the_probability_of_the_decision() -> None:
    policy = parse_policy("exp3spec").build(3, num_speculative_tokens=4)
    estimates = np.zeros(3)
    for turn, (index, length, probability) in enumerate(
        [(0, 2, 0.5), (2, 5, 0.25), (0, 1, 0.125)], start=1
    ):
        policy.learn_round(feedback(index, 1.0 - length / 5.0, probability))
        estimates[index] += (5 - length) / (4 * probability)
        weights = np.exp(-np.sqrt(np.log(3) / ((turn + 1) * 3)) * estimates)
        np.testing.assert_allclose(policy.probabilities(), weights / weights.sum(), rtol=1e-12)


def test_metasd_learns_agreement_and_the_others_length() -> None:
    for name, expected in (("metasd_ucb", 0), ("ucb", 1), ("ucbspec", 1)):
        policy = policy_from_name(name, 2)
        for index in (0, 1):
            policy.learn_round(
                RoundFeedback(
                    drafter_index=index,
                    selection_probability=1.0,
                    length_loss=1.0 - index,
                    agreement_loss=float(index),
                )
            )
        assert int(np.argmax(policy.probabilities())) == expected


@pytest.mark.parametrize("delay", [0, 16])
def test_ucb_and_rivers_agree_in_time_and_late(delay: int) -> None:
    """River counts at the update, so that late feedback leaves it right; it wants gains."""
    width = 0.25
    ours = policy_from_name(f"ucb:width={width}", 4)
    theirs: Any = river_bandit.UCB(delta=width, seed=0)
    generator = np.random.default_rng(0)
    waiting: list[tuple[int, float]] = []
    for _ in range(400):
        pulled = theirs.pull(list(range(4)))
        assert ours.probabilities()[pulled] > 0.0
        waiting.append((pulled, float(generator.random()) * (0.4 + 0.2 * pulled)))
        if len(waiting) > delay:
            index, loss = waiting.pop(0)
            ours.learn_round(feedback(index, loss))
            theirs.update(index, -loss)


def test_rivers_exp3_weighs_late_feedback_by_the_wrong_probability_and_ours_does_not() -> None:
    """River divides by the probability of its last pull, ours by that of the decision."""
    theirs: Any = river_bandit.Exp3(gamma=0.5, seed=0)
    first = theirs.pull([0, 1])
    assert theirs._probabilities[first] == pytest.approx(0.5)
    for _ in range(20):
        theirs.pull([0, 1])
        theirs.update(first, 1.0)
    now = theirs._probabilities[first]
    weight = theirs._weights[first]
    theirs.update(first, 1.0)
    grown = np.log(theirs._weights[first] / weight)
    assert grown == pytest.approx(0.5 / now / 2) and now > 0.7
    assert grown != pytest.approx(0.5 / 0.5 / 2, rel=0.1)
    ours = policy_from_name("exp3spec", 2)
    ours.learn_round(feedback(0, 0.6, 0.5))
    ours.learn_round(feedback(0, 0.6, 0.25))
    np.testing.assert_allclose(ours.table[2], [0.6 / 0.5 + 0.6 / 0.25, 0.0])


def test_rivers_exp3_fails_on_feedback_for_a_removed_drafter_and_ours_refuses_it() -> None:
    theirs: Any = river_bandit.Exp3(gamma=0.5, seed=0)
    theirs.pull([0, 1])
    with pytest.raises(KeyError):
        theirs.update(2, 1.0)
    with pytest.raises(ValueError, match="drafter_index=2 outside"):
        policy_from_name("exp3spec", 2).learn_round(feedback(2, 0.5))
