"""Arms: what they are, what they cost, and that any policy runs over them."""

from __future__ import annotations

import numpy as np
import pytest

from learner.arms import ArmCosts, Arms, LossRange, arm_lengths, prepare_arms
from learner.measures import expected_acceptance_length
from learner.selection import parse_policy
from learner.walk import Coins, Walker, prepare
from schemas.events import NO_DRAFTER, CostModel
from tests.learner.token_traces import flat_costs, token_trace


def model(draft: list[float], score: list[float], verify: list[float]) -> CostModel:
    return CostModel(
        draft_seconds=np.array(draft),
        score_seconds=np.array(score),
        verify_seconds=np.array(verify),
    )


def test_every_arm_is_found_again_by_its_drafter_and_k() -> None:
    arms = Arms(3, 4)
    pairs = zip(arms.drafter.tolist(), arms.num_speculative_tokens.tolist(), strict=True)
    assert [arms.index(drafter, k) for drafter, k in pairs] == list(range(len(arms)))
    assert arms.names(["a", "b", "c"])[:3] == ("none", "a@1", "a@2")


@pytest.mark.parametrize(("drafter", "k"), [(0, 0), (0, 5), (3, 1), (NO_DRAFTER, 1)])
def test_invalid_arms_are_refused(drafter: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"drafter {drafter} with K={k}"):
        Arms(3, 4).index(drafter, k)


def test_a_prior_over_drafters_is_spread_over_their_arms() -> None:
    arms = Arms(2, 3)
    prior = arms.prior([0.8, 0.2])
    assert prior.sum() == pytest.approx(1.0)
    assert prior[0] == pytest.approx(1 / 3)
    assert prior[1:4].sum() == pytest.approx(0.8 * 2 / 3)
    assert prior[1] > prior[2] > prior[3]


def test_an_arm_is_as_long_as_the_window_cut_to_its_k() -> None:
    generator = np.random.default_rng(0)
    trace = token_trace(generator.random((9, 2)), 4)
    lengths = arm_lengths(trace)
    arms = Arms(2, 4)
    for k in range(1, 5):
        cut = expected_acceptance_length(
            trace.acceptance_probability[:, :k],
            trace.realised_acceptance[:, :k],
            num_levels=np.minimum(trace.num_levels, k),
        )
        for drafter in range(2):
            np.testing.assert_allclose(lengths[:, arms.index(drafter, k)], cut[:, drafter])
    assert (lengths[:, 0] == 1.0).all()


def test_any_policy_walks_over_arms_and_accepts_no_more_than_k() -> None:
    generator = np.random.default_rng(1)
    trace = token_trace((generator.random((40, 2)) < 0.8).astype(float), 3)
    coins = Coins.toss(generator, 40, 3)
    costs = flat_costs([0.1, 0.2], 3)
    arms = costs.arms
    prepared = prepare_arms(trace, coins, costs, 1.0)
    whole = prepare(trace, coins)
    for arm in range(1, len(arms)):
        expected = np.minimum(
            whole.accepted[:, arms.drafter[arm]], arms.num_speculative_tokens[arm]
        )
        np.testing.assert_array_equal(prepared.accepted[:, arm], expected)
    assert (prepared.accepted[:, 0] == 0).all()
    walked = Walker(parse_policy("hedge"), len(arms)).walk(prepared)
    assert walked.num_tokens == 40
    alone = Walker(parse_policy("fixed:0"), len(arms)).walk(prepared)
    assert alone.length.tolist() == [1] * 40


def test_losses_at_a_price_rank_arms_by_theta_times_seconds_minus_length() -> None:
    trace = token_trace(np.array([[1.0, 0.0]] * 12), 2)
    costs = flat_costs([0.5, 0.0], 2)
    coins = Coins.toss(np.random.default_rng(0), 12, 2)
    losses = prepare_arms(trace, coins, costs, 2.0).loss_to_losses["length"][0]
    # At 2 tokens per second: none 2 - 1, always right 2 x 1.5 - 2 and 2 x 2 - 3, never right 2 - 1.
    scaled = LossRange.of(costs).scaled(np.array([1.0, 1.0, 1.0, 1.0, 1.0]))
    np.testing.assert_allclose(losses, scaled)


def test_a_round_costs_its_drafts_and_its_rows() -> None:
    costs = ArmCosts(
        draft_seconds=np.array([0.1]),
        verify_seconds=np.array([1.0, 1.2, 1.5]),
        score_seconds=np.array([0.05]),
    )
    np.testing.assert_allclose(costs.seconds(), [1.0, 1.3, 1.7])


def test_gaps_of_a_cost_model_are_filled_without_flattering_anybody() -> None:
    nan = np.nan
    costs = ArmCosts.from_model(
        model([0.1, nan, 0.3], [0.01, nan, 0.03], [1.0, nan, 1.2, nan, nan]), 4
    )
    assert costs is not None
    np.testing.assert_allclose(costs.verify_seconds, [1.0, 1.1, 1.2, 1.3, 1.4])
    np.testing.assert_allclose(costs.draft_seconds, [0.1, 0.3, 0.3])
    np.testing.assert_allclose(costs.score_seconds, [0.01, 0.02, 0.03])


def test_one_measured_verification_stands_for_all_rows() -> None:
    costs = ArmCosts.from_model(model([np.nan], [np.nan], [np.nan, 2.0]), 3)
    assert costs is not None
    np.testing.assert_allclose(costs.verify_seconds, [2.0] * 4)
    assert costs.draft_seconds[0] == 2.0
    assert costs.scoring_seconds == 0.0


def test_nothing_measured_gives_no_costs() -> None:
    assert ArmCosts.from_model(model([0.1], [0.1], [np.nan, np.nan]), 1) is None


def test_invalid_costs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"verify_seconds\[1\]=nan"):
        ArmCosts(
            draft_seconds=np.zeros(1),
            verify_seconds=np.array([1.0, np.nan]),
            score_seconds=np.zeros(1),
        )
    with pytest.raises(ValueError, match=r"draft_seconds\[0\]=-1.0"):
        flat_costs([-1.0], 1)
