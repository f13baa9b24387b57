"""The log re-run on itself is exact, and a walk is what another policy would have done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.request_selector import RequestSelector
from replay.requests import RequestTrace, join_segments
from replay.rerun import (
    Walk,
    verify_logged_rounds,
    verify_logged_selection,
    walk,
    walk_all,
)
from replay.selectors import logged_selector, selector_from_name
from schemas.events import NO_DRAFTER, AcceptanceRule, VerificationEvent
from tests.replay.synthetic import make_request, split

DETERMINISTIC = [AcceptanceRule.GREEDY, AcceptanceRule.ONE_HOT]


def policy_selector(name: str, num_drafters: int = 3, depth: int = 4) -> RequestSelector:
    return RequestSelector.fresh(name, num_drafters, depth)


def joined(event: VerificationEvent) -> RequestTrace:
    return join_segments([event])


def with_realised(event: VerificationEvent, realised: NDArray[np.float16]) -> VerificationEvent:
    return replace(event, windows=replace(event.windows, realised_acceptance=realised))


@pytest.mark.parametrize("rule", list(AcceptanceRule))
def test_an_exact_log_agrees_with_itself_in_every_round(rule: AcceptanceRule) -> None:
    for seed in range(5):
        event = make_request(rule=rule, num_tokens=150, seed=seed, no_drafter_share=0.1)
        check = verify_logged_rounds(joined(event))
        assert check.disagreements == ()
        assert check.num_checked == check.num_rounds == event.rounds.first_position.size


@pytest.mark.parametrize("rule", DETERMINISTIC)
def test_one_accepted_token_too_many_is_found(rule: AcceptanceRule) -> None:
    event = make_request(hit_rates=[1.0], num_tokens=60, rule=rule)
    realised = event.windows.realised_acceptance.copy()
    realised[event.windows.start == event.rounds.first_position[5], 3] = 0.0
    found = verify_logged_rounds(joined(with_realised(event, realised))).disagreements
    assert [(one.round_index, one.quantity, one.logged, one.rebuilt) for one in found] == [
        (5, "num_accepted_tokens", 4.0, 3.0),
        (5, "num_emitted_tokens", 5.0, 4.0),
    ]
    assert "round 5: num_accepted_tokens is 4 in the log, 3 from the windows" in str(found[0])


def test_an_acceptance_that_the_windows_forbid_is_found_when_sampling() -> None:
    event = make_request(rule=AcceptanceRule.SPECULATIVE_SAMPLING, hit_rates=[0.9])
    index = int(np.argmax(event.rounds.num_accepted_tokens))
    realised = event.windows.realised_acceptance.copy()
    realised[event.windows.start == event.rounds.first_position[index], 0] = 0.0
    check = verify_logged_rounds(joined(with_realised(event, realised)))
    assert [(found.round_index, found.rebuilt) for found in check.disagreements] == [
        (index, 0.0),
        (index, 1.0),
    ]


def test_a_hole_in_a_log_is_no_disagreement() -> None:
    head, rest = split(make_request(num_tokens=90), 5)
    middle, tail = split(rest, 5)
    check = verify_logged_rounds(join_segments([head, tail]))
    assert check.disagreements == ()
    assert verify_logged_rounds(join_segments([head, middle])).disagreements == ()


def test_rounds_without_window_are_not_checked() -> None:
    head, _ = split(make_request(num_tokens=60), 8)
    check = verify_logged_rounds(joined(head))
    ends = head.windows.start[-1]
    assert check.num_checked == int((head.rounds.first_position <= ends).sum())
    assert check.num_checked < check.num_rounds


@pytest.mark.parametrize("name", ["fixed:1", "hedge", "normal_hedge"])
@pytest.mark.parametrize("score_block", [1, 7])
def test_the_logged_policy_re_run_gives_the_same_probabilities(name: str, score_block: int) -> None:
    event = make_request(num_tokens=200, selector=policy_selector(name), score_block=score_block)
    for parts in ([event], split(event, 20)):
        request = join_segments(parts)
        assert verify_logged_selection(request, policy_selector(name)) == ()


def test_another_policy_than_the_logged_one_is_told_from_it() -> None:
    request = joined(make_request(num_tokens=200, selector=policy_selector("hedge")))
    found = verify_logged_selection(request, policy_selector("normal_hedge"))
    assert len(found) > 20
    assert {one.quantity for one in found} == {"selection_probability"}


def test_another_delay_than_the_logged_one_is_told_from_it() -> None:
    event = make_request(num_tokens=200, selector=policy_selector("hedge"))
    late = np.zeros_like(event.rounds.num_scored_windows)
    late[-1] = event.windows.start.size
    changed = replace(event, rounds=replace(event.rounds, num_scored_windows=late))
    assert verify_logged_selection(joined(changed), policy_selector("hedge"))


@pytest.mark.parametrize("name", ["hedge", "normal_hedge"])
def test_the_workers_selector_is_remade_from_the_log_alone(name: str) -> None:
    prior = np.array([0.6, 0.3, 0.1])
    live = RequestSelector.fresh(name, 3, 4, prior=prior)
    event = make_request(
        num_tokens=200, selector=live, prior=prior, policy_name=name, score_block=8
    )
    request = joined(event)
    assert verify_logged_selection(request, logged_selector(request)) == ()
    assert verify_logged_selection(request, policy_selector(name)), "the prior must matter"


@pytest.mark.parametrize("rule", DETERMINISTIC)
def test_a_walk_with_the_logged_choices_takes_the_logged_rounds(rule: AcceptanceRule) -> None:
    for drafter in range(3):
        name = f"fixed:{drafter}"
        event = make_request(num_tokens=150, rule=rule, selector=policy_selector(name))
        found = walk(joined(event), policy_selector(name), np.random.default_rng(0))
        assert found.num_rounds == event.rounds.first_position.size
        assert (found.num_requests, found.num_tokens, found.num_skipped_tokens) == (1, 150, 0)


def test_a_walk_agrees_with_decoding_when_sampling() -> None:
    """A walk's mean acceptance length is that of decoding the same text with the same drafter."""
    rule = AcceptanceRule.SPECULATIVE_SAMPLING
    logged, walked = Walk(), Walk()
    for seed in range(30):
        played = make_request(
            num_tokens=200, rule=rule, seed=seed, selector=policy_selector("fixed:0")
        )
        logged += Walk(num_rounds=played.rounds.first_position.size, num_tokens=200)
        other = make_request(
            num_tokens=200, rule=rule, seed=seed, selector=policy_selector("fixed:2")
        )
        walked += walk(joined(other), policy_selector("fixed:0"), np.random.default_rng(seed))
    assert walked.mean_acceptance_length == pytest.approx(logged.mean_acceptance_length, rel=0.03)


def test_all_policies_meet_the_same_coins() -> None:
    event = make_request(
        hit_rates=[0.6, 0.6], rule=AcceptanceRule.SPECULATIVE_SAMPLING, num_tokens=120
    )
    realised = event.windows.realised_acceptance.copy()
    realised[:, :, 1] = realised[:, :, 0]
    request = joined(with_realised(event, realised))
    results = [
        walk(request, policy_selector(name, 2), np.random.default_rng(5)).num_rounds
        for name in ("fixed:0", "fixed:1", "hedge")
    ]
    assert len(set(results)) == 1


def test_a_policy_that_learns_beats_the_worst_fixed_drafter_and_nears_the_best() -> None:
    requests = [joined(make_request(num_tokens=300, seed=seed)) for seed in range(6)]
    name_to_length = {}
    for name in ("fixed:drafter-0", "fixed:drafter-2", "normal_hedge", "hedge"):
        found = walk_all(requests, selector_from_name(name), np.random.default_rng(1))
        assert found.mean_acceptance_length is not None
        name_to_length[name] = found.mean_acceptance_length
    best, worst = name_to_length["fixed:drafter-0"], name_to_length["fixed:drafter-2"]
    for name in ("normal_hedge", "hedge"):
        assert worst * 2 < name_to_length[name] <= best
        assert name_to_length[name] > 0.85 * best


class Spy:
    """Records what it is taught, and always chooses the first drafter that is awake."""

    def __init__(self) -> None:
        self.awake: list[list[bool]] = []
        self.num_taught: list[int] = []

    def probabilities(self, is_awake: NDArray[np.bool_]) -> NDArray[np.float64]:
        self.awake.append(is_awake.tolist())
        self.num_taught.append(0)
        return np.asarray(np.arange(is_awake.size) == np.argmax(is_awake), dtype=np.float64)

    def learn(
        self,
        acceptance_probability: NDArray[np.float16],
        realised_acceptance: NDArray[np.float16],
        num_levels: NDArray[np.int16],
    ) -> None:
        if not self.num_taught:
            self.num_taught.append(0)
        self.num_taught[-1] += len(num_levels)

    def learn_round(self, *_: float) -> None:
        """Windows are enough."""


def cumulative(counts: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum(counts)


def test_a_window_is_learned_only_when_the_position_after_it_is_verified() -> None:
    # Nothing is ever accepted, so each round advances by one token and the delay is plain.
    request = joined(make_request(hit_rates=[0.0], num_tokens=40))
    spy = Spy()
    walk(request, spy, np.random.default_rng(0))
    # Round r (from 1) is at position r; windows 1..r-5 of four levels are complete before it,
    # and the counts are noted one choice late.
    learned = cumulative(spy.num_taught)
    expected = [max(0, position + 1 - 5) for position in range(1, len(learned))]
    assert learned[:-1].tolist() == expected


def test_a_drafter_that_is_not_scored_is_asleep_and_never_walked_with() -> None:
    event = make_request(num_tokens=60)
    values = event.windows.acceptance_probability.copy(), event.windows.realised_acceptance.copy()
    for one in values:
        one[10:, :, 0] = np.nan
    windows = replace(
        event.windows, acceptance_probability=values[0], realised_acceptance=values[1]
    )
    spy = Spy()
    walk(joined(replace(event, windows=windows)), spy, np.random.default_rng(0))
    assert spy.awake[0] == [True, True, True]
    assert spy.awake[-1] == [False, True, True]


def test_where_every_drafter_is_asleep_the_target_writes_alone() -> None:
    event = make_request(num_tokens=30)
    nothing = np.full_like(event.windows.realised_acceptance, np.nan)
    windows = replace(event.windows, acceptance_probability=nothing, realised_acceptance=nothing)
    found = walk(joined(replace(event, windows=windows)), Spy(), np.random.default_rng(0))
    assert (found.num_rounds, found.num_tokens, found.num_idle_rounds) == (30, 30, 30)
    assert found.mean_acceptance_length == 1.0


def test_tokens_without_window_are_skipped_and_counted() -> None:
    head, rest = split(make_request(num_tokens=90), 5)
    _, tail = split(rest, 5)
    request = join_segments([head, tail])
    found = walk(request, policy_selector("hedge"), np.random.default_rng(0))
    missing = request.end_position - request.first_position - request.windows.start.size
    # The prompt's own pass and the last token need no window.
    assert found.num_skipped_tokens == missing - 2
    assert found.num_tokens + found.num_skipped_tokens == 90


def test_a_log_without_scoring_is_skipped_as_a_whole() -> None:
    event = make_request(num_tokens=30)
    windows = replace(
        event.windows,
        start=event.windows.start[:0],
        num_levels=event.windows.num_levels[:0],
        acceptance_probability=event.windows.acceptance_probability[:0],
        realised_acceptance=event.windows.realised_acceptance[:0],
    )
    request = joined(replace(event, windows=windows))
    found = walk(request, Spy(), np.random.default_rng(0))
    # The first and the last token need no window.
    assert (found.num_rounds, found.num_skipped_tokens) == (2, 28)
    assert verify_logged_rounds(request).num_checked == int(
        ((event.rounds.drafter_index == NO_DRAFTER) | (event.rounds.num_draft_tokens == 0)).sum()
    )


def test_a_walk_without_rounds_has_no_mean() -> None:
    assert Walk().mean_acceptance_length is None


def test_requests_without_drafters_are_left_out_of_walks() -> None:
    event = make_request(no_drafter_share=1.0)
    windows = replace(
        event.windows,
        acceptance_probability=event.windows.acceptance_probability[:, :, :0],
        realised_acceptance=event.windows.realised_acceptance[:, :, :0],
    )
    request = joined(replace(event, drafters=(), prior_probabilities=np.empty(0), windows=windows))
    assert verify_logged_rounds(request).disagreements == ()
    found = walk_all([request], selector_from_name("hedge"), np.random.default_rng(0))
    assert found == Walk()


def test_invalid_policy_is_refused_with_the_known_ones() -> None:
    request = joined(make_request())
    with pytest.raises(ValueError, match="unknown policy 'nobody'"):
        selector_from_name("nobody")(request)
    with pytest.raises(ValueError, match="drafter-0, drafter-1, drafter-2"):
        selector_from_name("fixed:nobody")(request)
