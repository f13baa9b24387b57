"""Walking a request on paper: equal to a slow walk by the contract, and to decoding by hand."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.measures import acceptance_length_loss, expected_acceptance_length
from learner.selection import PolicySpec, parse_policy, policy_names
from learner.walk import Coins, WalkedRounds, Walker, WindowTrace, accepted_tokens, prepare

K, N, P = 3, 4, 60


def trace_of(seed: int, *, sampled: bool, unscored: bool = False) -> WindowTrace:
    """Return a request with windows everywhere but at its first position."""
    rng = np.random.default_rng(seed)
    num_windows = P - 2
    values = rng.random((num_windows, K, N)).astype(np.float16)
    realised = values if sampled else (values < 0.6).astype(np.float16)
    probability = np.sqrt(values).astype(np.float16) if sampled else realised
    left = P - 1 - np.arange(1, P - 1)
    num_levels = np.minimum(left, K).astype(np.int16)
    missing = np.arange(K)[None, :] >= num_levels[:, None]
    probability, realised = probability.copy(), realised.copy()
    probability[missing] = realised[missing] = np.nan
    if unscored:
        asleep = rng.random((num_windows, N)) < 0.2
        for scores in (probability, realised):
            scores[np.broadcast_to(asleep[:, None, :], scores.shape)] = np.nan
    is_idle = np.zeros(P, dtype=np.bool_)
    is_idle[[0, -1]] = True
    return WindowTrace(
        num_positions=P,
        starts=np.arange(1, P - 1, dtype=np.int64),
        num_levels=num_levels,
        is_whole=num_levels == K,
        acceptance_probability=probability,
        realised_acceptance=realised,
        is_idle=is_idle,
    )


def slow_walk(
    trace: WindowTrace, coins: Coins, spec: PolicySpec, *, block: int
) -> list[tuple[int, int, int]]:
    """Walk by the contract alone: one window at a time, one policy object, no kernel of walks."""
    policy = spec.build(N)
    first = 1.0 - trace.acceptance_probability[:, 0].astype(np.float64)
    lengths = expected_acceptance_length(
        trace.acceptance_probability, trace.realised_acceptance, num_levels=trace.num_levels
    )
    length = acceptance_length_loss(lengths, K)
    losses = {"first": first, "length": length, "hybrid": 0.5 * (first + length)}[spec.loss]
    accepted = accepted_tokens(trace, coins.acceptance)
    position, learned, rounds = 0, 0, []
    while position < P:
        row = position - 1
        awake = accepted[row] >= 0 if 0 <= row < len(accepted) else np.zeros(N, dtype=np.bool_)
        if not awake.any():
            if trace.is_idle[position]:
                rounds.append((position, -1, 1))
            position += 1
            continue
        ready = _num_ready(trace, spec, position)
        if ready - learned >= block:
            for window in losses[learned:ready]:
                policy.learn(window)
            learned = max(learned, ready)
        index = _choice(policy.probabilities(), awake, spec, coins.selection[len(rounds)])
        tokens = min(int(accepted[row, index]) + 1, P - position)
        rounds.append((position, index, tokens))
        position += tokens
    return rounds


def _num_ready(trace: WindowTrace, spec: PolicySpec, position: int) -> int:
    needed = trace.starts + (1 if spec.loss == "first" else K + 1)
    is_ready = (needed <= position) & (trace.is_whole | (spec.loss == "first"))
    return int(np.count_nonzero(is_ready))


def _choice(
    probabilities: NDArray[np.float64], awake: NDArray[np.bool_], spec: PolicySpec, coin: float
) -> int:
    chances = np.where(awake, probabilities, 0.0)
    chances = chances / chances.sum() if chances.sum() > 0 else awake / awake.sum()
    if spec.choice == "argmax":
        chances = (chances == chances.max()).astype(np.float64)
    reached = np.cumsum(chances) / chances.sum()
    return int(np.searchsorted(reached, coin, side="right"))


def as_rows(walked: WalkedRounds) -> list[tuple[int, int, int]]:
    return list(
        zip(walked.position.tolist(), walked.drafter.tolist(), walked.length.tolist(), strict=True)
    )


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("unscored", [False, True])
@pytest.mark.parametrize("block", [1, 8])
@pytest.mark.parametrize(
    "name",
    [
        "ada_normal_hedge_grid",
        "normal_hedge",
        "hedge:loss=hybrid",
        "fixed_share:choice=sample",
        "follow_the_leader:loss=first",
        "fixed:2",
    ],
)
def test_the_kernel_walks_as_the_contract_says(
    name: str, block: int, unscored: bool, sampled: bool
) -> None:
    trace = trace_of(5, sampled=sampled, unscored=unscored)
    coins = Coins.toss(np.random.default_rng(1), P, K)
    spec = parse_policy(name)
    walked = Walker(spec, N, block=block).walk(prepare(trace, coins))
    assert as_rows(walked) == slow_walk(trace, coins, spec, block=block)
    assert walked.num_tokens == P


@pytest.mark.parametrize("name", policy_names())
def test_a_request_begins_where_its_scope_says(name: str) -> None:
    spec = parse_policy(name)
    requests = [
        prepare(trace_of(seed, sampled=False), Coins.toss(np.random.default_rng(seed), P, K))
        for seed in range(3)
    ]
    walker = Walker(spec, N)
    carried = [as_rows(walker.walk(request)) for request in requests]
    afresh = [as_rows(Walker(spec, N).walk(request)) for request in requests]
    assert carried[0] == afresh[0]
    if spec.scope == "request":
        assert carried == afresh


def test_a_carried_policy_has_learned_every_window_of_the_requests_before() -> None:
    spec = parse_policy("fixed_share")
    traces = [trace_of(seed, sampled=False) for seed in range(2)]
    walker, direct = Walker(spec, N), spec.build(N)
    for seed, trace in enumerate(traces):
        walker.walk(prepare(trace, Coins.toss(np.random.default_rng(seed), P, K)))
        direct.learn_windows(1.0 - trace.acceptance_probability[:, 0].astype(np.float64))
    np.testing.assert_allclose(walker.policy.probabilities(), direct.probabilities(), atol=1e-15)


def test_every_policy_sees_the_same_coins() -> None:
    trace = trace_of(2, sampled=True)
    coins = Coins.toss(np.random.default_rng(3), P, K)
    prepared = prepare(trace, coins)
    first = as_rows(Walker(parse_policy("fixed:1"), N).walk(prepared))
    again = as_rows(Walker(parse_policy("fixed:1"), N).walk(prepare(trace, coins)))
    assert first == again
