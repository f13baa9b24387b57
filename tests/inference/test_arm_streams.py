"""What requests of a worker start from when seconds count."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from inference.arm_streams import StreamArms
from inference.selection import Begun
from learner.arm_selector import ArmSelector
from learner.selection import parse_policy
from schemas.events import CostModel
from tests.schemas.builders import make_event, make_policy

SPEC = parse_policy("ada_normal_hedge_grid:objective=seconds")
IDS = ("drafter-0", "drafter-1")


def arms_of(begun: Begun) -> ArmSelector:
    assert isinstance(begun.selector, ArmSelector)
    return begun.selector


def test_before_anything_is_measured_rows_are_free() -> None:
    costs = StreamArms(SPEC, 4).costs("s", IDS)
    assert costs.verify_seconds.tolist() == [1.0] * 5


def test_published_seconds_are_charged_until_own_ones_are_measured() -> None:
    streams = StreamArms(SPEC, 2)
    policy = make_policy(stream="s", drafters=make_event(num_drafters=2).drafters)
    cost = CostModel(
        draft_seconds=np.array([0.3, np.nan]),
        score_seconds=np.array([0.1, 0.1]),
        verify_seconds=np.array([2.0, 3.0, 4.0]),
    )
    streams.update(replace(policy, cost=cost))
    ids = [drafter.drafter_id for drafter in policy.drafters]
    assert streams.costs("s", ids).verify_seconds.tolist() == [2.0, 3.0, 4.0]
    assert streams.costs("s", ids).draft_seconds.tolist() == [0.3, 0.3]
    event = make_event(num_drafters=2, num_speculative_tokens=2)
    rounds = event.rounds
    seconds = np.full(len(rounds.verify_seconds), 0.5, np.float32)
    position = rounds.first_position + np.int32(1)
    streams.emitted(
        replace(
            event,
            rounds=replace(rounds, verify_seconds=seconds, first_position=position),
            first_position=event.first_position + 1,
        )
        if event.first_position == event.num_prompt_tokens
        else replace(event, rounds=replace(rounds, verify_seconds=seconds))
    )
    np.testing.assert_allclose(streams.costs("s", ids).verify_seconds, 0.5)


def test_a_request_goes_on_from_the_one_that_ended_before_it() -> None:
    streams = StreamArms(SPEC, 2)
    begun = streams.begin("s", IDS, [])
    learner = arms_of(begun).learner
    scores = np.tile([0.0, 1.0], (20, 2, 1))
    learner.learn(scores, scores, np.full(20, 2), np.arange(20))
    fresh = arms_of(streams.begin("s", IDS, [])).learner.policy.table
    assert not np.allclose(fresh, learner.policy.table)
    begun.hand_back(IDS)
    np.testing.assert_allclose(
        arms_of(streams.begin("s", IDS, [])).learner.policy.table, learner.policy.table
    )
    other = arms_of(streams.begin("other", IDS, [])).learner.policy.table
    np.testing.assert_allclose(other, fresh)


def test_a_swapped_pool_takes_its_arms_along() -> None:
    streams = StreamArms(SPEC, 2)
    begun = streams.begin("s", IDS, [])
    learner = arms_of(begun).learner
    scores = np.tile([0.0, 1.0], (40, 2, 1))
    learner.learn(scores, scores, np.full(40, 2), np.arange(40))
    begun.hand_back(IDS)
    found = arms_of(streams.begin("s", IDS[::-1], [])).learner
    ours = learner.probabilities(np.ones(2, dtype=np.bool_))
    theirs = found.probabilities(np.ones(2, dtype=np.bool_))
    assert theirs[1:3] == pytest.approx(ours[3:5])


def test_seconds_stay_with_their_drafter_when_the_pool_changes() -> None:
    """A place in the pool is not always the same drafter's: experts come and go."""
    streams = StreamArms(SPEC, 2)
    event = make_event(num_drafters=2, num_speculative_tokens=2)
    rounds = event.rounds
    for index, each in ((0, 0.5), (1, 2.0)):
        seconds = (rounds.num_draft_tokens * np.float32(each)).astype(np.float32)
        chosen = np.where(rounds.drafter_index >= 0, index, -1).astype(rounds.drafter_index.dtype)
        one = replace(rounds, drafter_index=chosen, draft_seconds=seconds)
        streams.emitted(replace(event, rounds=one))
    first, second = event.drafter_ids
    assert streams.costs("s", [first, second]).draft_seconds.tolist() == [0.5, 2.0]
    assert streams.costs("s", [second, first]).draft_seconds.tolist() == [2.0, 0.5]
    assert streams.costs("s", ["new", second]).draft_seconds.tolist()[1] == 2.0
