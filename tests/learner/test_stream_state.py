"""One stream's state: drafters come, go and change, and publication keeps all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from learner.carried import NEWCOMER_SHARE
from learner.feedback import event_losses
from learner.selection import CompiledPolicy, parse_policy
from learner.stream_state import StreamSettings, StreamState
from schemas.codec import decode_policy_published, encode
from schemas.equality import same_message
from schemas.events import AcceptanceRule, DrafterVersion, PolicyPublished, VerificationEvent
from tests.learner.fakes import PlacedEvent
from tests.schemas.builders import make_drafters, make_event

NOW = datetime(2026, 11, 29, tzinfo=UTC)
SETTINGS = StreamSettings()
POOL = make_drafters(3)


def event_of(
    sequence: int, drafters: Sequence[DrafterVersion], *, acceptance: Sequence[float] | None = None
) -> VerificationEvent:
    return make_event(
        sequence=sequence,
        drafters=tuple(drafters),
        acceptance_rule=AcceptanceRule.SPECULATIVE_SAMPLING,
        acceptance_probability=None if acceptance is None else np.array(acceptance),
        realised_acceptance=None if acceptance is None else np.array(acceptance),
    )


def after(state: StreamState, event: VerificationEvent) -> StreamState:
    placed = PlacedEvent(partition=0, offset=event.sequence, event=event)
    return state.learned(placed, SETTINGS)[0]


def published(state: StreamState) -> PolicyPublished:
    return state.to_policy(SETTINGS, learner_id="learner-0", produced_at=NOW)


def probabilities(state: StreamState) -> dict[str, float]:
    policy = published(state)
    ids = [drafter.drafter_id for drafter in policy.drafters]
    return dict(zip(ids, policy.selection_probabilities.tolist(), strict=True))


def test_a_published_state_continues_bit_for_bit() -> None:
    state = StreamState(stream="stream-a")
    for sequence in range(40):
        first = sequence // 15
        state = after(state, event_of(sequence, POOL[first : first + 2]))
        again = decode_policy_published(encode(published(state)))
        restored = StreamState.from_policy(again, SETTINGS)
        assert same_message(published(restored), published(state))
        following = event_of(sequence + 1, POOL)
        assert same_message(
            published(after(restored, following)), published(after(state, following))
        )


def test_the_version_counts_events_and_the_parent_is_one_event_earlier() -> None:
    state = StreamState(stream="stream-a")
    for sequence in range(3):
        state = after(state, event_of(sequence, POOL))
    assert (published(state).version, published(state).parent_version) == (3, 2)


def test_the_better_drafter_leads_wherever_the_event_lists_it() -> None:
    state = StreamState(stream="stream-a")
    for sequence in range(20):
        flipped = sequence % 2 == 1
        pool, acceptance = POOL[:2], [0.9, 0.3]
        if flipped:
            pool, acceptance = pool[::-1], acceptance[::-1]
        state = after(state, event_of(sequence, pool, acceptance=acceptance))
    assert probabilities(state)["drafter-0"] > 0.9


def test_a_new_drafter_is_tried_and_soon_leads_if_it_is_better() -> None:
    state = StreamState(stream="stream-a")
    for sequence in range(200):
        state = after(state, event_of(sequence, POOL[:2], acceptance=[0.5, 0.1]))
    state = after(state, event_of(200, POOL, acceptance=[0.5, 0.1, 1.0]))
    assert probabilities(state)["drafter-2"] > 0.1
    for sequence in range(201, 206):
        state = after(state, event_of(sequence, POOL, acceptance=[0.5, 0.1, 1.0]))
    assert probabilities(state)["drafter-2"] > 0.8


def test_a_pool_may_shrink_to_one_and_grow_again() -> None:
    state = after(StreamState(stream="stream-a"), event_of(0, POOL[:1]))
    assert probabilities(state) == {"drafter-0": 1.0}
    state = after(state, event_of(1, POOL[:2]))
    assert len(probabilities(state)) == 2
    for sequence in range(2, 200):
        state = after(state, event_of(sequence, POOL[:1]))
    assert probabilities(state) == {"drafter-0": 1.0}


def test_a_stream_without_drafters_or_drafts_can_be_published() -> None:
    event = make_event(num_windows=0, num_drafters=0, num_speculative_tokens=0)
    state = after(StreamState(stream="stream-a"), event)
    assert published(state).drafters == ()
    assert published(state).cost.verify_seconds.shape == (1,)


def test_orphans_are_counted_and_teach_nothing() -> None:
    settings = StreamSettings(admitted_drafter_ids={"drafter-0", "drafter-1"})
    placed = PlacedEvent(partition=0, offset=0, event=event_of(0, POOL))
    state, num_orphans = StreamState(stream="stream-a").learned(placed, settings)
    assert num_orphans == 1
    assert [drafter.drafter_id for drafter in state.drafters] == ["drafter-0", "drafter-1"]


def test_a_longer_speculation_is_published_from_then_on() -> None:
    state = after(StreamState(stream="stream-a"), make_event(num_speculative_tokens=3))
    state = after(state, make_event(sequence=1, num_speculative_tokens=6))
    np.testing.assert_array_equal(published(state).num_speculative_tokens, [6, 6, 6])


def carried(state: StreamState) -> CompiledPolicy:
    assert state.policy is not None
    return state.policy


def chances(state: StreamState) -> dict[str, float]:
    """Return what the carried policy would play."""
    ids = [drafter.drafter_id for drafter in state.drafters]
    return dict(zip(ids, carried(state).probabilities().tolist(), strict=True))


def test_the_policy_learns_the_windows_of_all_workers_in_their_order() -> None:
    state, by_hand = StreamState(stream="stream-a"), SETTINGS.policy.build(3)
    for sequence in range(6):
        event = event_of(sequence, POOL)
        state = after(state, replace(event, worker_id=f"worker-{sequence % 2}"))
        losses = event_losses(event, policy_loss=SETTINGS.policy.loss)
        by_hand.learn_windows(losses.of_policy)
    assert carried(state).table.tobytes() == by_hand.table.tobytes()
    assert carried(state).numbers.tobytes() == by_hand.numbers.tobytes()


def test_a_state_is_not_changed_by_the_one_after_it() -> None:
    state = after(StreamState(stream="stream-a"), event_of(0, POOL))
    before = carried(state).table.tobytes()
    after(state, event_of(1, POOL))
    assert carried(state).table.tobytes() == before


def test_invalid_losses_are_refused_and_change_nothing() -> None:
    state = after(StreamState(stream="stream-a"), event_of(0, POOL[:2]))
    before = encode(published(state))
    event = event_of(1, POOL)
    # Contracts keep such scores out; a state must not rest on that.
    wrong = np.full_like(event.windows.acceptance_probability, 2.0)
    object.__setattr__(event.windows, "acceptance_probability", wrong)
    with pytest.raises(ValueError, match=r"loss of window 0 and drafter '.*' is -[01]"):
        after(state, event)
    assert encode(published(state)) == before


def test_drafters_join_and_leave_the_policy_and_new_weights_change_nothing() -> None:
    state = StreamState(stream="stream-a")
    for sequence in range(20):
        state = after(state, event_of(sequence, POOL[:2], acceptance=[0.9, 0.2]))
    lead = chances(state)["drafter-0"]
    renewed = make_drafters(2, weights_version=5)
    empty = make_event(sequence=20, num_windows=0, drafters=renewed)
    assert chances(after(state, empty))["drafter-0"] == lead
    joined = make_event(sequence=20, num_windows=0, drafters=POOL)
    assert chances(after(state, joined)) == pytest.approx(
        {
            "drafter-0": lead * (1 - NEWCOMER_SHARE),
            "drafter-1": (1 - lead) * (1 - NEWCOMER_SHARE),
            "drafter-2": NEWCOMER_SHARE,
        }
    )
    for sequence in range(20, 200):
        state = after(state, event_of(sequence, POOL[1:2]))
    assert chances(state) == pytest.approx({"drafter-1": 1.0})


def test_a_bandit_that_is_carried_learns_the_rounds_of_the_events() -> None:
    settings = StreamSettings(policy=parse_policy("exp3spec:scope=stream"))
    placed = PlacedEvent(partition=0, offset=0, event=make_event(drafters=POOL))
    state, _ = StreamState(stream="stream-a").learned(placed, settings)
    assert chances(state) != pytest.approx(dict.fromkeys(chances(state), 1 / 3))


@pytest.mark.parametrize("name", ["normal_hedge", "fixed:drafter-1"])
def test_what_starts_afresh_with_every_request_is_not_carried(name: str) -> None:
    settings = StreamSettings(policy=parse_policy(name))
    placed = PlacedEvent(partition=0, offset=0, event=event_of(0, POOL))
    state, _ = StreamState(stream="stream-a").learned(placed, settings)
    assert state.policy is None
    policy = state.to_policy(settings, learner_id="learner-0", produced_at=NOW)
    assert policy.policy_name == name
    assert policy.accumulators["policy_table"].shape == (0, 3)


def test_another_policy_starts_afresh_and_keeps_what_else_is_known() -> None:
    state = after(StreamState(stream="stream-a"), event_of(0, POOL))
    other = StreamSettings(policy=parse_policy("fixed_share"))
    changed = StreamState.from_policy(published(state), other)
    assert changed.policy is None
    assert changed.prior.num_windows.tolist() == state.prior.num_windows.tolist()
    policy = changed.to_policy(other, learner_id="learner-0", produced_at=NOW)
    assert policy.policy_name == "fixed_share"


def test_invalid_state_of_another_build_is_refused() -> None:
    policy = published(after(StreamState(stream="stream-a"), event_of(0, POOL)))
    arrays = {**policy.accumulators, "policy_layout": np.array([7.0])}
    with pytest.raises(ValueError, match=r"layout \[7\.\], expected \d"):
        StreamState.from_policy(replace(policy, accumulators=arrays), SETTINGS)
