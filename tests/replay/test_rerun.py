"""The log re-run on itself is exact, and what differs is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from learner.request_selector import RequestSelector
from replay.requests import RequestTrace, join_segments
from replay.rerun import verify_logged_rounds, verify_logged_selection
from replay.selectors import logged_selector
from schemas.events import NO_DRAFTER, AcceptanceRule, VerificationEvent
from tests.replay.synthetic import make_request, split, window_rows

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


def test_rounds_of_a_log_without_scoring_are_checked_where_nothing_was_drafted() -> None:
    event = make_request(num_tokens=30)
    request = joined(replace(event, windows=window_rows(event.windows, 0, 0)))
    assert verify_logged_rounds(request).num_checked == int(
        ((event.rounds.drafter_index == NO_DRAFTER) | (event.rounds.num_draft_tokens == 0)).sum()
    )
