"""Walks over arms: they end at the most tokens per second, live and on paper alike."""

from __future__ import annotations

import numpy as np
import pytest

from learner.arm_learner import ArmLearner
from learner.arms import ArmCosts
from learner.price import rate
from learner.priced_walk import PricedTrace, PricedWalker, WalkedArms
from learner.scoring_schedule import NUM_ALARMS, ScheduleSettings
from learner.selection import DEFAULT_POLICY, parse_policy
from learner.walk import WindowTrace
from tests.learner.token_traces import flat_costs, priced, repeated_hits, token_trace

DEFAULT = parse_policy(DEFAULT_POLICY)
SCORE_ALL = ScheduleSettings(floor=1.0)


def favourite(walked: WalkedArms) -> int:
    """Return the arm that is played most in the second half."""
    late = walked.arm[len(walked.arm) // 2 :]
    return int(np.bincount(late).argmax())


def random_hits(rates: list[float], num_tokens: int, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.random((num_tokens, len(rates))) < rates).astype(float)


def walk(hits: np.ndarray, costs: ArmCosts, *, seed: int = 0) -> tuple[WalkedArms, PricedWalker]:
    trace = token_trace(hits, costs.arms.max_speculative_tokens)
    walker = PricedWalker(DEFAULT, costs, settings=SCORE_ALL)
    return walker.walk(priced(trace, np.random.default_rng(seed))), walker


def test_the_arm_with_most_tokens_per_second_wins_not_the_best_mean_of_ratios() -> None:
    # Drafter 0 emits 3 tokens a second in every round. Drafter 1 emits 7 and 1 by turns in 1.2:
    # 3.33 tokens a second, though its mean of seconds per token is more than twice as high.
    hits = repeated_hits(["110", "11111100"], 3000)
    costs = flat_costs([0.0, 0.2 / 6], 6)
    walked, walker = walk(hits, costs)
    arms = walker.learner.arms
    seconds = costs.seconds()
    per_arm = [seconds[arms.index(0, 2)] / 3, seconds[arms.index(1, 6)] * (1 + 1 / 7) / 2]
    assert per_arm[0] < per_arm[1]
    assert favourite(walked) == arms.index(1, 6)


def test_the_price_ends_at_the_speed_of_the_best_arm() -> None:
    hits = repeated_hits(["1110", "10"], 4000)
    costs = flat_costs([0.1, 0.0], 4)
    walked, walker = walk(hits, costs)
    # Three hits and a miss with K = 3: 4 tokens in 1.3.
    assert favourite(walked) == walker.learner.arms.index(0, 3)
    assert rate(walker.learner.price) == pytest.approx(4 / 1.3, rel=0.02)


def test_of_two_drafters_that_are_equally_long_the_cheap_one_wins() -> None:
    hits = np.repeat(random_hits([0.7], 3000, 1), 2, axis=1)
    costs = flat_costs([0.1, 0.02], 4)
    walked, walker = walk(hits, costs)
    assert walker.learner.arms.drafter[favourite(walked)] == 1


def test_k_shrinks_as_verification_costs_more_by_the_row_until_nothing_is_drafted() -> None:
    hits = random_hits([0.75], 6000, 2)
    chosen = []
    for slope in (0.0, 0.1, 0.4, 1.5):
        walked, walker = walk(hits, flat_costs([0.01], 8, slope=slope))
        chosen.append(int(walker.learner.arms.num_speculative_tokens[favourite(walked)]))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 6
    assert 0 < chosen[2] <= 2
    assert chosen[3] == 0


def test_a_useless_pool_costs_at_most_three_per_cent_of_no_speculation() -> None:
    generator = np.random.default_rng(6)
    costs = flat_costs([0.0, 0.05, 0.1, 0.3], 4, scoring=0.03)
    walker = PricedWalker(DEFAULT, costs, block=8)
    seconds = tokens = 0.0
    for request in range(10):
        hits = random_hits([0.01] * 4, 600, request)
        walked = walker.walk(priced(token_trace(hits, 4), generator))
        seconds += walked.total_seconds
        tokens += int(walked.length.sum())
    assert seconds <= 1.03 * tokens


def test_scoring_comes_back_when_the_text_changes() -> None:
    generator = np.random.default_rng(7)
    costs = flat_costs([0.0, 0.0], 4, scoring=0.1)
    walker = PricedWalker(DEFAULT, costs, block=8)
    before = random_hits([0.9, 0.2], 2000, 8)
    after = random_hits([0.2, 0.9], 2000, 9)
    walked = walker.walk(priced(token_trace(np.vstack([before, after]), 4), generator))
    drafter = walker.learner.arms.drafter[walked.arm]
    assert np.mean(drafter[(walked.position > 1000) & (walked.position < 2000)] == 0) > 0.95
    assert np.mean(drafter[walked.position > 2300] == 1) > 0.9
    assert walker.learner.schedule[NUM_ALARMS] >= 1
    assert walked.num_scored.sum() < 0.3 * 4000


def test_the_probability_of_scoring_does_not_look_at_the_round() -> None:
    costs = flat_costs([0.0, 0.0], 4, scoring=0.1)
    hits = random_hits([0.8, 0.4], 500, 10)
    walks = []
    for changed in (hits, np.vstack([hits[:400], 1.0 - hits[400:]])):
        walker = PricedWalker(DEFAULT, costs, block=8)
        walks.append(walker.walk(priced(token_trace(changed, 4), np.random.default_rng(3))))
    first = int(np.searchsorted(walks[0].position, 390)) - 1
    np.testing.assert_array_equal(
        walks[0].score_probability[:first], walks[1].score_probability[:first]
    )


def step_through(
    learner: ArmLearner, trace: WindowTrace, request: PricedTrace, *, block: int
) -> list[tuple[int, int, float, bool, float]]:
    """Walk a request as a worker does: round by round, learning what is complete and scored."""
    learner.start_request()
    position = num_rounds = num_learned = 0
    is_scored = np.zeros(trace.num_positions, dtype=np.bool_)
    rounds = []

    def learn(until: int) -> int:
        rows = np.arange(num_learned, until)[is_scored[num_learned:until]]
        learner.learn(
            trace.acceptance_probability[rows],
            trace.realised_acceptance[rows],
            trace.num_levels[rows],
            trace.starts[rows],
        )
        return until

    while position < trace.num_positions:
        num_ready = int(np.searchsorted(request.ready_at, position, side="right"))
        if num_ready - num_learned >= block:
            num_learned = learn(num_ready)
        accepted = request.accepted[position]
        arm, probability = learner.choose(accepted >= 0, request.coins[num_rounds])
        scores, chance = learner.begin_round(request.score_coins[num_rounds])
        drafter = learner.arms.drafter[arm]
        most = int(learner.arms.num_speculative_tokens[arm])
        length = 1 + (min(int(accepted[drafter]), most) if arm else 0)
        length = min(length, trace.num_positions - position)
        is_scored[position : position + length] = scores
        learner.end_round(arm, length)
        rounds.append((position, arm, probability, scores, chance))
        position += length
        num_rounds += 1
    learn(trace.num_positions)
    return rounds


@pytest.mark.parametrize("policy", [DEFAULT_POLICY, "hedge:choice=sticky,scope=stream"])
def test_stepping_round_by_round_and_walking_on_paper_are_the_same(policy: str) -> None:
    generator = np.random.default_rng(11)
    costs = flat_costs([0.0, 0.05], 3, slope=0.05, scoring=0.05)
    spec = parse_policy(policy)
    walker = PricedWalker(spec, costs, block=4)
    stepper = ArmLearner(spec, costs)
    for request in range(4):
        # In tenths, so that sums are the same in any order of rounding.
        acceptance = np.round(random_hits([0.7, 0.5], 150, request) * 0.9, 1)
        trace = token_trace(acceptance, 3)
        prepared = priced(trace, generator)
        walked = walker.walk(prepared)
        rounds = step_through(stepper, trace, prepared, block=4)
        assert [r[0] for r in rounds] == walked.position.tolist()
        assert [r[1] for r in rounds] == walked.arm.tolist()
        np.testing.assert_array_equal([r[2] for r in rounds], walked.probability)
        np.testing.assert_array_equal([r[4] for r in rounds], walked.score_probability)
        assert [r[3] for r in rounds] == (walked.num_scored > 0).tolist()
    for name, values in walker.learner.state().items():
        np.testing.assert_array_equal(values, stepper.state()[name])


def test_a_restored_learner_goes_on_bit_for_bit() -> None:
    costs = flat_costs([0.0, 0.05], 3, slope=0.05, scoring=0.05)
    traces = [
        priced(token_trace(random_hits([0.8, 0.4], 200, seed), 3), np.random.default_rng(seed))
        for seed in range(4)
    ]
    whole, first, second = (PricedWalker(DEFAULT, costs, block=4) for _ in range(3))
    for trace in traces:
        expected = whole.walk(trace)
    for trace in traces[:3]:
        first.walk(trace)
    second.learner.restore(first.learner.state())
    found = second.walk(traces[3])
    np.testing.assert_array_equal(found.arm, expected.arm)
    np.testing.assert_array_equal(found.score_probability, expected.score_probability)


def test_invalid_states_and_costs_are_refused() -> None:
    learner = ArmLearner(DEFAULT, flat_costs([0.0, 0.1], 2))
    with pytest.raises(ValueError, match="expected those of"):
        learner.use_costs(flat_costs([0.0], 2))
    other = ArmLearner(DEFAULT, flat_costs([0.0], 2))
    with pytest.raises(ValueError, match="table has shape"):
        learner.restore(other.state())
    windows = np.zeros((1, 2, 3))
    with pytest.raises(ValueError, match="expected \\(1, 2, 2\\)"):
        learner.learn(windows, windows, np.array([2]), np.array([0]))


def test_costs_in_another_unit_change_no_choice() -> None:
    costs = flat_costs([0.0, 0.05], 3, slope=0.05, scoring=0.05)
    millis = ArmCosts(
        draft_seconds=costs.draft_seconds * 1e-3,
        verify_seconds=costs.verify_seconds * 1e-3,
        score_seconds=costs.score_seconds * 1e-3,
    )
    traces = [
        priced(token_trace(random_hits([0.8, 0.4], 200, seed), 3), np.random.default_rng(seed))
        for seed in range(2)
    ]
    one, other = (PricedWalker(DEFAULT, costs, block=4) for _ in range(2))
    one.walk(traces[0])
    other.walk(traces[0])
    other.learner.use_costs(millis)
    np.testing.assert_array_equal(one.walk(traces[1]).arm, other.walk(traces[1]).arm)
    assert rate(other.learner.price) == pytest.approx(1e3 * rate(one.learner.price))


def test_in_another_pool_who_stays_keeps_what_was_learned() -> None:
    costs = flat_costs([0.0, 0.05], 3)
    walker = PricedWalker(DEFAULT, costs)
    walker.walk(priced(token_trace(random_hits([0.9, 0.2], 400, 0), 3), np.random.default_rng(0)))
    before = walker.learner.probabilities(np.ones(2, dtype=np.bool_))
    other = walker.learner.over_pool([-1, 1, 0], flat_costs([0.1, 0.05, 0.0], 3), share=0.06)
    after = other.probabilities(np.ones(3, dtype=np.bool_))
    assert after[1:4].sum() == pytest.approx(0.06)
    np.testing.assert_allclose(after[7:10], 0.94 * before[1:4])
    np.testing.assert_allclose(after[4:7], 0.94 * before[4:7])
    np.testing.assert_array_equal(other.tallies[:, 7:10], walker.learner.tallies[:, 1:4])
    assert (other.tallies[:, 1:4] == 0.0).all()
