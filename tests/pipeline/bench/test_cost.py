"""The cost benchmark: its comparator is what fixed arms take, and its keys are there."""

from __future__ import annotations

import numpy as np
import pytest

from learner.arms import NO_SPECULATION
from pipeline.bench.cost import (
    CURVE_TO_SLOPE,
    HEAD,
    LOOKUP,
    RoundsByTokens,
    cost_rows,
    fixed_seconds,
    hit_rates,
    pool_costs,
    prepared,
    traffic,
    useless_rates,
)
from schemas.events import NO_DRAFTER

KINDS = (LOOKUP, HEAD)


def test_the_seconds_of_a_fixed_arm_are_those_of_playing_it_round_by_round() -> None:
    generator = np.random.default_rng(0)
    rates = hit_rates(KINDS, generator)
    requests = prepared(traffic(rates, generator, num_requests=2, num_tokens=80), generator)
    costs = pool_costs(KINDS, 0.1, 10)
    found = fixed_seconds(requests, costs)
    for drafter, most in ((NO_DRAFTER, 0), (0, 3), (1, 10)):
        rounds = 0
        for request in requests:
            position = 0
            while position < 80:
                position += 1 + (min(int(request.accepted[position, drafter]), most) if most else 0)
                rounds += 1
        arm = costs.arms.index(drafter, most)
        assert found[arm] == pytest.approx(rounds * costs.seconds()[arm])


def test_a_small_run_has_every_key_and_curve() -> None:
    result = cost_rows([0, 1], num_requests=4, num_tokens=120, kinds=KINDS)
    for key in ("cost_vs_best_fixed_arm", "useless_pool_loss"):
        assert result[f"{key}_low"] <= result[key] <= result[f"{key}_high"]
    assert len(result["cost_table"]) == 3 * len(CURVE_TO_SLOPE)
    assert 0.5 < result["cost_vs_best_fixed_arm"] < 2.0
    assert result["useless_pool_loss"] < 0.1
    for row in result["cost_table"]:
        assert (row["tokens_per_pass_by_tokens"] < 1.0) or row["stream"] != "useless pool"
        assert row["tokens_per_pass_by_tokens"] > 0.0


def test_a_policy_that_counts_tokens_alone_pays_for_every_draft_and_window() -> None:
    rounds = RoundsByTokens(100, np.array([10, 30]), 4)
    costs = pool_costs(KINDS, 0.1, 10)
    drafts = 4 * (10 * LOOKUP.draft_seconds + 30 * HEAD.draft_seconds)
    scoring = 100 * (LOOKUP.score_seconds + HEAD.score_seconds)
    assert rounds.seconds(costs) == pytest.approx(40 * 1.4 + drafts + scoring)


def test_useless_drafters_never_pay() -> None:
    generator = np.random.default_rng(1)
    rates = useless_rates(2, generator)
    requests = prepared(traffic(rates, generator, num_requests=2, num_tokens=300), generator)
    seconds = fixed_seconds(requests, pool_costs(KINDS, 0.15, 10))
    assert int(seconds.argmin()) == NO_SPECULATION
