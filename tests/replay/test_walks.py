"""A walk is what another policy would have done with the same text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.selection import policy_names
from replay.errors import ReplayError
from replay.requests import RequestTrace, join_segments
from replay.walks import (
    ESTIMATED,
    IDLE,
    ROUNDS,
    SKIPPED,
    SWITCHES,
    TOKENS,
    PolicyWalks,
    WalkOptions,
    window_trace,
)
from schemas.events import AcceptanceRule, DrafterVersion, FinishReason, VerificationEvent
from tests.replay.synthetic import make_request, split, window_rows
from tests.replay.test_rerun import DETERMINISTIC, joined, policy_selector, with_realised


def walks_of(
    requests: Sequence[RequestTrace], policies: Sequence[str], seed: int = 0, **options: Any
) -> PolicyWalks:
    chosen = WalkOptions(policies=tuple(policies), **options)
    walks = PolicyWalks(chosen, np.random.default_rng(seed))
    for request in requests:
        walks.add(request)
    return walks


def counts_of(
    requests: Sequence[RequestTrace], policy: str, seed: int = 0, **options: Any
) -> NDArray[np.float64]:
    return walks_of(requests, [policy], seed, **options).sums[0].counts.total


def length_of(requests: Sequence[RequestTrace], policy: str, **options: Any) -> float:
    counts = counts_of(requests, policy, **options)
    return float(counts[TOKENS] / counts[ROUNDS])


def pool(*ids: str) -> tuple[DrafterVersion, ...]:
    return tuple(DrafterVersion(drafter_id=i, weights_version=0) for i in ids)


@pytest.mark.parametrize("rule", DETERMINISTIC)
def test_a_walk_with_the_logged_choices_takes_the_logged_rounds(rule: AcceptanceRule) -> None:
    for drafter in range(3):
        event = make_request(
            num_tokens=150, rule=rule, selector=policy_selector(f"fixed:{drafter}")
        )
        counts = counts_of([joined(event)], f"fixed:drafter-{drafter}")
        assert counts[ROUNDS] == event.rounds.first_position.size
        assert (counts[TOKENS], counts[SKIPPED], counts[ESTIMATED]) == (150, 0, 0)


def test_a_walk_agrees_with_decoding_when_sampling() -> None:
    """A walk's mean acceptance length is that of decoding the same text with the same drafter."""
    rule = AcceptanceRule.SPECULATIVE_SAMPLING
    num_rounds, walked = 0, []
    for seed in range(30):
        played = make_request(
            num_tokens=200, rule=rule, seed=seed, selector=policy_selector("fixed:0")
        )
        num_rounds += played.rounds.first_position.size
        other = make_request(
            num_tokens=200, rule=rule, seed=seed, selector=policy_selector("fixed:2")
        )
        walked.append(replace(joined(other), request_id=f"request-{seed}"))
    counts = counts_of(walked, "fixed:drafter-0")
    assert counts[TOKENS] / counts[ROUNDS] == pytest.approx(30 * 200 / num_rounds, rel=0.03)
    assert counts[ESTIMATED] == 30 * 200


def test_all_policies_meet_the_same_coins() -> None:
    event = make_request(
        hit_rates=[0.6, 0.6], rule=AcceptanceRule.SPECULATIVE_SAMPLING, num_tokens=120
    )
    realised = event.windows.realised_acceptance.copy()
    realised[:, :, 1] = realised[:, :, 0]
    request = joined(with_realised(event, realised))
    walks = walks_of([request] * 3, ["fixed:drafter-0", "fixed:drafter-1", "hedge"], 5)
    rounds = [sums.counts.rows[:, ROUNDS].tolist() for sums in walks.sums]
    assert rounds[0] == rounds[1] == rounds[2]
    alone = counts_of([request] * 3, "hedge", 5)
    assert alone[ROUNDS] == sum(rounds[2]), "other policies take no coins away"


def test_a_policy_that_learns_beats_the_worst_fixed_drafter_and_nears_the_best() -> None:
    requests = [joined(make_request(num_tokens=300, seed=seed)) for seed in range(6)]
    best, worst = (length_of(requests, f"fixed:drafter-{i}") for i in (0, 2))
    for name in ("normal_hedge", "hedge", "ada_normal_hedge_grid"):
        found = length_of(requests, name)
        assert worst * 2 < found <= best
        assert found > 0.85 * best


def test_a_stream_is_carried_on_and_a_request_begins_afresh() -> None:
    requests = [joined(make_request(num_tokens=40, seed=seed)) for seed in range(20)]
    carried = length_of(requests, "hedge:scope=stream")
    afresh = length_of(requests, "hedge:scope=request")
    assert carried > 1.1 * afresh
    streams = [replace(request, stream=f"s{i}") for i, request in enumerate(requests)]
    assert length_of(streams, "hedge:scope=stream") == length_of(streams, "hedge:scope=request")


def test_a_pool_may_change_from_request_to_request() -> None:
    first = make_request(hit_rates=[0.2, 0.9], drafters=pool("a", "b"), num_tokens=200)
    second = make_request(
        hit_rates=[0.9, 0.2], drafters=pool("b", "c"), num_tokens=200, sequence=1, request_id="r1"
    )
    policy = "follow_the_leader:scope=stream"
    walks = walks_of([joined(first), joined(second)], [policy])
    alone = walks_of([joined(second)], [policy])
    assert walks.sums[0].counts.rows[1, ROUNDS] < alone.sums[0].counts.rows[0, ROUNDS]
    assert walks.sums[0].by_drafter.rows.shape == (2, 3)
    assert walks.sums[0].by_drafter.rows[1, 0] == 0.0, "a sleeps in the second request"


def test_a_fixed_drafter_that_a_request_lacks_leaves_the_target_alone() -> None:
    first = make_request(hit_rates=[0.9], drafters=pool("a"), num_tokens=50)
    second = make_request(
        hit_rates=[0.9], drafters=pool("b"), num_tokens=50, sequence=1, request_id="r1"
    )
    rows = walks_of([joined(first), joined(second)], ["fixed:a"]).sums[0].counts.rows
    assert rows[0, IDLE] < 4
    assert (rows[1, IDLE], rows[1, ROUNDS], rows[1, TOKENS]) == (50, 50, 50)


def test_fewer_levels_give_what_a_worker_with_fewer_levels_logs() -> None:
    for seed in range(3):
        deep = make_request(num_tokens=200, num_speculative_tokens=6, seed=seed)
        flat = make_request(
            num_tokens=200,
            num_speculative_tokens=2,
            seed=seed,
            selector=policy_selector("fixed:0", depth=2),
        )
        walks = walks_of([joined(deep)], ["fixed:drafter-0"], num_speculative_tokens=2)
        assert walks.sums[0].counts.total[ROUNDS] == flat.rounds.first_position.size
        by_draft = np.bincount(flat.rounds.num_draft_tokens, minlength=3)
        assert walks.sums[0].by_draft.total.tolist() == by_draft.tolist()


def test_more_levels_than_were_logged_are_the_logged_ones() -> None:
    request = joined(make_request(num_tokens=100))
    more = counts_of([request], "hedge", num_speculative_tokens=9)
    assert more.tolist() == counts_of([request], "hedge").tolist()


def test_a_part_of_the_pool_is_walked_as_if_the_others_were_not_there() -> None:
    whole = joined(make_request(num_tokens=200))
    found = walks_of([whole], ["normal_hedge"], drafter_ids=("drafter-1", "drafter-2"))
    assert set(np.flatnonzero(found.sums[0].by_drafter.total)) <= {0, 1}
    best, poor = (length_of([whole], f"fixed:drafter-{i}") for i in (1, 2))
    counts = found.sums[0].counts.total
    assert poor <= counts[TOKENS] / counts[ROUNDS] <= best
    assert walks_of([whole], ["hedge"], drafter_ids=("nobody",)).num_requests == 0


def test_what_a_policy_drafted_and_verified_is_counted() -> None:
    request = joined(make_request(num_tokens=120))
    sums = walks_of([request], ["hedge"]).sums[0]
    counts = sums.counts.total
    assert sums.by_draft.total.sum() == counts[ROUNDS]
    assert sums.by_drafter.total.sum() == np.arange(5) @ sums.by_draft.total
    assert 0 < counts[SWITCHES] < counts[ROUNDS]


def test_a_drafter_that_is_not_scored_is_never_walked_with() -> None:
    event = make_request(num_tokens=60)
    values = event.windows.acceptance_probability.copy(), event.windows.realised_acceptance.copy()
    for one in values:
        one[10:, :, 0] = np.nan
    windows = replace(
        event.windows, acceptance_probability=values[0], realised_acceptance=values[1]
    )
    request = joined(replace(event, windows=windows))
    drafted = walks_of([request], ["fixed:drafter-0"]).sums[0]
    assert drafted.by_drafter.total[0] <= 10 * 4
    assert drafted.counts.total[IDLE] >= 60 - 10 - 5


def test_where_every_drafter_is_asleep_the_target_writes_alone() -> None:
    event = make_request(num_tokens=30)
    nothing = np.full_like(event.windows.realised_acceptance, np.nan)
    windows = replace(event.windows, acceptance_probability=nothing, realised_acceptance=nothing)
    counts = counts_of([joined(replace(event, windows=windows))], "hedge")
    assert (counts[ROUNDS], counts[TOKENS], counts[IDLE], counts[SKIPPED]) == (30, 30, 30, 0)


def test_windows_of_which_only_the_first_level_is_known_are_passed_over() -> None:
    event = make_request(num_tokens=60, hit_rates=[1.0, 1.0])
    values = event.windows.acceptance_probability.copy(), event.windows.realised_acceptance.copy()
    for one in values:
        one[10:20, 1:] = np.nan
    windows = replace(
        event.windows, acceptance_probability=values[0], realised_acceptance=values[1]
    )
    counts = counts_of([joined(replace(event, windows=windows))], "hedge")
    assert counts[SKIPPED] > 0
    assert counts[TOKENS] + counts[SKIPPED] == 60
    assert counts[IDLE] <= 2


def test_tokens_without_window_are_skipped_and_counted() -> None:
    head, rest = split(make_request(num_tokens=90), 5)
    _, tail = split(rest, 5)
    request = join_segments([head, tail])
    counts = counts_of([request], "hedge")
    missing = request.end_position - request.first_position - request.windows.start.size
    # The prompt's own pass and the last token need no window.
    assert counts[SKIPPED] == counts[ESTIMATED] == missing - 2
    assert counts[TOKENS] + counts[SKIPPED] == 90


def test_a_log_without_scoring_is_skipped_as_a_whole() -> None:
    event = make_request(num_tokens=30)
    request = joined(replace(event, windows=window_rows(event.windows, 0, 0)))
    counts = counts_of([request], "hedge")
    # The first and the last token need no window.
    assert (counts[ROUNDS], counts[SKIPPED]) == (2, 28)


def test_windows_that_an_abort_cut_are_walked_on_but_not_learned() -> None:
    event = make_request(num_tokens=40)
    aborted = joined(replace(event, finish_reason=FinishReason.ABORTED))
    assert window_trace(aborted).is_censored
    assert not window_trace(joined(event)).is_censored
    ended, cut = (counts_of([one], "hedge") for one in (joined(event), aborted))
    assert (ended[ROUNDS], ended[TOKENS]) == (cut[ROUNDS], cut[TOKENS])


def without_drafters(event: VerificationEvent) -> VerificationEvent:
    windows = replace(
        event.windows,
        acceptance_probability=event.windows.acceptance_probability[:, :, :0],
        realised_acceptance=event.windows.realised_acceptance[:, :, :0],
    )
    return replace(event, drafters=(), prior_probabilities=np.empty(0), windows=windows)


def test_requests_without_drafters_are_left_out_of_walks() -> None:
    request = joined(without_drafters(make_request(no_drafter_share=1.0)))
    walks = walks_of([request], ["hedge"])
    assert (walks.num_requests, walks.sums[0].counts.total.sum()) == (0, 0.0)
    assert walks.logged.total.sum() == 0.0


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_walks_every_kind_of_request(name: str) -> None:
    events = [
        make_request(num_tokens=50, sequence=0, request_id="r0"),
        make_request(num_tokens=1, sequence=1, request_id="r1"),
        make_request(num_tokens=40, sequence=2, request_id="r2", hit_rates=[0.5]),
        make_request(
            num_tokens=50,
            sequence=3,
            request_id="r3",
            rule=AcceptanceRule.SPECULATIVE_SAMPLING,
            no_drafter_share=0.2,
        ),
    ]
    counts = counts_of([joined(event) for event in events], name)
    assert counts[TOKENS] == 141
    assert 141 / 5 <= counts[ROUNDS] <= 141


def test_invalid_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ReplayError, match=r"cannot re-run nobody: unknown policy.*hedge"):
        walks_of([], ["nobody"])


def test_under_scope_both_a_new_tenant_starts_where_its_domain_stands() -> None:
    both, rates = "ada_normal_hedge_grid:scope=both", np.full((2, 10), 0.6)
    rates[0, 3] = rates[1, 7] = 0.95

    def request(stream: str, domain: int, num_tokens: int, number: int) -> RequestTrace:
        event = make_request(
            hit_rates=rates[domain],
            num_tokens=num_tokens,
            sequence=number,
            request_id=f"r{number}",
            stream=f"{stream}.domain-{domain}",
        )
        return joined(event)

    known = [request(f"tenant-{n // 2}", n % 2, 200, n) for n in range(6)]
    new = [request(f"new-{n}", n % 2, 25, n) for n in range(6, 26)]

    def num_rounds(policy: str) -> float:
        rows = walks_of([*known, *new], [policy]).sums[0].counts.rows
        return float(rows[len(known) :, ROUNDS].sum())

    assert num_rounds(both) < 0.9 * num_rounds("ada_normal_hedge_grid")


def test_under_scope_both_prompts_are_read_where_the_log_has_them() -> None:
    rates = [[0.95, 0.1, 0.1], [0.1, 0.1, 0.95]]
    requests = [
        replace(
            joined(make_request(hit_rates=rates[index % 2], num_tokens=40, seed=index)),
            prompt_token_ids=np.full(9, index % 2, dtype=np.int32),
        )
        for index in range(60)
    ]
    mute = [replace(one, prompt_token_ids=np.empty(0, dtype=np.int32)) for one in requests]
    both = "ada_normal_hedge_grid:scope=both"
    assert length_of(requests, both) > 1.05 * length_of(mute, both)
    assert length_of(mute, both) > 0.95 * length_of(mute, "ada_normal_hedge_grid")
