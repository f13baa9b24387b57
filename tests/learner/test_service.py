"""The learner learns each event once, wherever it is killed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.feedback import Standing
from learner.ports import ReceivedEvent
from learner.service import LearnerSettings, PolicyLearner
from learner.stream_state import StreamSettings
from schemas.equality import first_difference
from schemas.errors import ContractError
from schemas.events import DrafterVersion, PolicyPublished, VerificationEvent
from tests.learner.fakes import (
    CrashError,
    FakeEventLog,
    FakeEventSource,
    FakePolicyBoard,
    FakeRefusedEvents,
    FakeTrainer,
    PlacedEvent,
)
from tests.schemas.builders import make_drafters, make_event

NOW = datetime(2026, 11, 29, tzinfo=UTC)
POOL = make_drafters(4)


def learner_of(
    log: FakeEventLog,
    board: FakePolicyBoard,
    generator: np.random.Generator,
    *,
    publish_every_events: int = 100,
    publish_seconds: float = 0.1,
    redeliver: float = 0.0,
    trainer: FakeTrainer | None = None,
) -> tuple[PolicyLearner, FakeEventSource]:
    """Return a learner whose clock goes on by 0.02 s whenever it is looked at."""
    source = FakeEventSource(log, generator, redeliver=redeliver)
    settings = LearnerSettings(
        publish_every_events=publish_every_events, publish_seconds=publish_seconds
    )
    clock = count(0.0, 0.02).__next__
    learner = PolicyLearner(source, board, settings, now=lambda: NOW, trainer=trainer, clock=clock)
    return learner, source


def one_clean_pass(log: FakeEventLog) -> dict[str, PolicyPublished]:
    board = FakePolicyBoard()
    learner, source = learner_of(
        FakeEventLog(partition_to_events=log.partition_to_events), board, np.random.default_rng(0)
    )
    learner.run(lambda: source.is_drained)
    return {policy.stream: policy for policy in board.read_all()}


def traffic(generator: np.random.Generator, num_events: int) -> FakeEventLog:
    """Streams over two partitions, two workers that restart, copies and a changing pool."""
    partition_to_events: dict[int, list[VerificationEvent]] = {0: [], 1: []}
    worker_to_next = {"worker-0": (1, 0), "worker-1": (1, 0)}
    for _ in range(num_events):
        partition = int(generator.integers(2))
        events = partition_to_events[partition]
        if events and generator.random() < 0.2:
            events.append(events[int(generator.integers(len(events)))])
            continue
        worker_id = f"worker-{generator.integers(2)}"
        epoch, sequence = worker_to_next[worker_id]
        if generator.random() < 0.1:
            epoch, sequence = epoch + 1, 0
        worker_to_next[worker_id] = (epoch, sequence + 1)
        first = int(generator.integers(3))
        events.append(
            make_event(
                stream=f"stream-{partition}-{generator.integers(3)}",
                worker_id=worker_id,
                worker_epoch=epoch,
                sequence=sequence,
                num_windows=int(generator.integers(0, 4)),
                drafters=POOL[first : first + 2],
                seed=int(generator.integers(2**31)),
            )
        )
    return FakeEventLog.of(partition_to_events)


def assert_same_policies(
    found: Sequence[PolicyPublished], expected: dict[str, PolicyPublished]
) -> None:
    assert {policy.stream for policy in found} == set(expected)
    for policy in found:
        difference = first_difference(
            replace(policy, produced_at=NOW), replace(expected[policy.stream], produced_at=NOW)
        )
        assert difference is None, f"{policy.stream}: {difference}"


def num_published(publish_every_events: int, publish_seconds: float) -> int:
    """Return how often one stream of 40 events was published."""
    board = FakePolicyBoard()
    log = FakeEventLog.of({0: [make_event(sequence=s, num_windows=0) for s in range(40)]})
    learner, source = learner_of(
        log,
        board,
        np.random.default_rng(0),
        publish_every_events=publish_every_events,
        publish_seconds=publish_seconds,
    )
    learner.run(lambda: source.is_drained)
    assert board.read_all()[0].version == 40
    return board.num_published


def test_policies_wait_for_events_and_seconds_but_not_while_nothing_comes() -> None:
    assert num_published(10_000, 0.0) == 40
    assert num_published(1, 1e9) == 40
    only_when_idle = num_published(10_000, 1e9)
    assert 1 <= only_when_idle < num_published(10_000, 0.1) < 40
    assert only_when_idle < num_published(5, 1e9) < 40


def test_a_learner_tells_whether_all_it_has_read_is_published() -> None:
    log = traffic(np.random.default_rng(0), 5)
    learner, source = learner_of(log, FakePolicyBoard(), np.random.default_rng(0))
    learner.resume()
    assert not learner.has_unpublished
    while not source.is_drained:
        for received in source.poll(0.0):
            learner.learn_one(received)
    assert learner.has_unpublished
    learner.publish()
    assert not learner.has_unpublished


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), num_events=st.integers(0, 40), num_crashes=st.integers(0, 6))
def test_crashes_copies_and_cadences_leave_the_state_of_one_clean_pass(
    seed: int, num_events: int, num_crashes: int
) -> None:
    generator = np.random.default_rng(seed)
    log = traffic(generator, num_events)
    board, trainer = FakePolicyBoard(generator=generator), FakeTrainer()
    for _ in range(num_crashes):
        run_until_crash(log, board, trainer, generator)
    board.num_stored_before_crash = None
    learner, source = learner_of(log, board, generator, redeliver=0.2, trainer=trainer)
    learner.run(lambda: source.is_drained)
    trainer.release()
    assert_same_policies(board.read_all(), one_clean_pass(log))
    places = [
        (placed.partition, placed.offset)
        for events in log.partition_to_events.values()
        for placed in events
    ]
    assert sorted(trainer.released) == places


def run_until_crash(
    log: FakeEventLog,
    board: FakePolicyBoard,
    trainer: FakeTrainer,
    generator: np.random.Generator,
) -> None:
    """Run a learner of random cadence that dies while learning or while publishing."""
    board.num_stored_before_crash = int(generator.integers(0, 8))
    learner, source = learner_of(
        log,
        board,
        generator,
        publish_every_events=int(generator.integers(1, 12)),
        redeliver=0.2,
        trainer=trainer,
    )
    steps_left = int(generator.integers(1, 40))

    def stop() -> bool:
        nonlocal steps_left
        steps_left -= 1
        if generator.random() < 0.1:
            trainer.release()
        if steps_left == 0:
            raise CrashError
        return source.is_drained

    try:
        learner.run(stop)
    except CrashError:
        return


def test_each_event_is_learned_once_and_copies_are_counted() -> None:
    events = [make_event(sequence=sequence) for sequence in range(3)]
    log = FakeEventLog.of({0: [*events, events[1], events[0]]})
    learner, _ = learner_of(log, FakePolicyBoard(), np.random.default_rng(0))
    placed = log.partition_to_events[0]
    standings = [learner.learn_one(received) for received in (*placed, placed[1])]
    assert standings == [Standing.NEW] * 3 + [Standing.LATE] * 2 + [Standing.CONTAINED]
    assert learner.stream_to_state["stream-a"].version == 3
    counts = learner.counts
    assert (counts.num_learned, counts.num_late, counts.num_contained) == (3, 2, 1)


def test_the_copy_of_an_event_is_late_also_ten_thousand_events_and_a_restart_later() -> None:
    first = make_event(sequence=0)
    later = [make_event(sequence=sequence) for sequence in range(1, 50)]
    log, board = FakeEventLog.of({0: [first, *later]}), FakePolicyBoard()
    learner, source = learner_of(log, board, np.random.default_rng(0))
    learner.run(lambda: source.is_drained)
    again, _ = learner_of(log, board, np.random.default_rng(0))
    again.resume()
    copy = PlacedEvent(partition=0, offset=10_000, event=first)
    assert again.learn_one(copy) is Standing.LATE
    assert again.stream_to_state["stream-a"].version == 50


def test_a_stream_first_seen_before_a_crash_is_not_lost_to_a_stream_published_later() -> None:
    """The one event of the quiet stream lies below the watermark of the busy one."""
    quiet = make_event(stream="quiet", sequence=0)
    busy = [make_event(stream="busy", sequence=sequence) for sequence in range(1, 6)]
    log, board = FakeEventLog.of({0: [quiet, *busy]}), FakePolicyBoard()
    learner, source = learner_of(log, board, np.random.default_rng(0))
    board.generator, board.num_stored_before_crash = np.random.default_rng(1), 1
    with pytest.raises(CrashError):
        learner.run(lambda: source.is_drained)
    assert [policy.stream for policy in board.read_all()] == ["busy"]
    board.num_stored_before_crash = None
    learner, source = learner_of(log, board, np.random.default_rng(0))
    learner.run(lambda: source.is_drained)
    assert_same_policies(board.read_all(), one_clean_pass(log))


def test_a_restart_reads_on_where_it_stopped() -> None:
    log = FakeEventLog.of({0: [make_event(sequence=sequence) for sequence in range(20)]})
    board = FakePolicyBoard()
    learner, source = learner_of(log, board, np.random.default_rng(0))
    learner.run(lambda: source.is_drained)
    assert log.partition_to_committed == {0: 20}
    learner, source = learner_of(log, board, np.random.default_rng(0))
    learner.resume()
    assert source.is_exhausted


def test_an_emptied_policies_topic_means_learning_afresh() -> None:
    log = FakeEventLog.of({0: [make_event(sequence=sequence) for sequence in range(20)]})
    learner, source = learner_of(log, FakePolicyBoard(), np.random.default_rng(0))
    learner.run(lambda: source.is_drained)
    board = FakePolicyBoard()
    learner, source = learner_of(log, board, np.random.default_rng(0))
    learner.run(lambda: source.is_drained)
    assert board.read_all()[0].version == 20


def test_a_trainer_that_lags_behind_gets_its_events_and_the_policy_does_not() -> None:
    log = FakeEventLog.of({0: [make_event(sequence=sequence) for sequence in range(10)]})
    board = FakePolicyBoard()
    learner, source = learner_of(log, board, np.random.default_rng(0))
    learner.run(lambda: source.is_drained)
    trainer = FakeTrainer(released=[(0, offset) for offset in range(4)])
    learner, source = learner_of(log, board, np.random.default_rng(0), trainer=trainer)
    learner.run(lambda: source.is_drained)
    assert trainer.unreleased == [(0, offset) for offset in range(4, 10)]
    assert (learner.counts.num_learned, learner.counts.num_contained) == (0, 6)


def test_an_idle_stream_is_not_published_again() -> None:
    log = FakeEventLog.of({0: [make_event(stream=f"stream-{index}") for index in range(3)]})
    board = FakePolicyBoard()
    learner, _ = learner_of(log, board, np.random.default_rng(0))
    for received in log.partition_to_events[0]:
        learner.learn_one(received)
        learner.publish()
    learner.publish()
    assert board.num_published == 3


def test_a_removed_drafter_is_an_orphan_and_returns_without_history() -> None:
    board = FakePolicyBoard()
    log = FakeEventLog.of({0: [make_event(sequence=sequence) for sequence in range(6)]})
    placed = log.partition_to_events[0]
    pool = StreamSettings(admitted_drafter_ids={"drafter-0", "drafter-2"})

    def learned(events: Sequence[ReceivedEvent], streams: StreamSettings) -> PolicyLearner:
        source = FakeEventSource(log, np.random.default_rng(0))
        learner = PolicyLearner(source, board, LearnerSettings(streams=streams), now=lambda: NOW)
        learner.resume()
        for received in events:
            learner.learn_one(received)
        learner.publish()
        return learner

    learned(placed[:2], StreamSettings())
    without = learned(placed[2:4], pool)
    assert without.counts.num_orphans == 2
    ids = [drafter.drafter_id for drafter in board.read_all()[0].drafters]
    assert ids == ["drafter-0", "drafter-2"]
    returned = learned(placed[4:5], StreamSettings()).stream_to_state["stream-a"]
    assert [drafter.drafter_id for drafter in returned.drafters][-1] == "drafter-1"
    assert returned.prior.num_windows[-1] == 6.0
    assert returned.prior.num_windows[0] > 20.0


def test_invalid_events_are_set_aside_with_their_place_and_the_loop_lives() -> None:
    good = make_event(sequence=0, num_windows=1, num_drafters=2, num_speculative_tokens=2)
    poisoned = make_event(sequence=1, num_windows=1, num_drafters=2, num_speculative_tokens=2)
    poison_windows(poisoned)
    after = make_event(sequence=2)
    log, refused = FakeEventLog.of({3: [good, poisoned, after]}), FakeRefusedEvents()
    source = FakeEventSource(log, np.random.default_rng(0))
    learner = PolicyLearner(
        source, FakePolicyBoard(), LearnerSettings(), now=lambda: NOW, refused=refused
    )
    learner.run(lambda: source.is_drained)
    assert learner.counts.num_refused == 1
    assert list(refused.place_to_reason) == [(3, 1)]
    assert "loss of window 0 and drafter 'drafter-0' is -" in refused.place_to_reason[3, 1]
    assert learner.stream_to_state["stream-a"].version == 2


def poison_windows(event: VerificationEvent) -> None:
    """Break the contract after the check, as only a bug of ours could."""
    poison = np.full(event.windows.acceptance_probability.shape, 9.0, np.float16)
    object.__setattr__(event.windows, "acceptance_probability", poison)


def test_invalid_policy_of_another_layout_is_refused() -> None:
    board = FakePolicyBoard()
    log = FakeEventLog.of({0: [make_event()]})
    learner, source = learner_of(log, board, np.random.default_rng(0))
    learner.run(lambda: source.is_drained)
    policy = board.read_all()[0]
    for layout, message in ((np.array([1.0]), r"layout: found \[1\.\]"), (None, "found nothing")):
        arrays = {**policy.accumulators, "layout": layout}
        kept = {name: values for name, values in arrays.items() if values is not None}
        board.publish([replace(policy, accumulators=kept)])
        with pytest.raises(ContractError, match=message):
            learner.resume()


def test_invalid_cadence_is_refused() -> None:
    with pytest.raises(ValueError, match="publish_every_events=0"):
        LearnerSettings(publish_every_events=0)
    with pytest.raises(ValueError, match="publish_seconds=nan"):
        LearnerSettings(publish_seconds=float("nan"))


def test_new_weights_keep_the_history_and_show_their_version() -> None:
    learner, _ = learner_of(FakeEventLog.of({0: []}), FakePolicyBoard(), np.random.default_rng(0))
    for sequence, weights_version in enumerate([1, 3, 2]):
        event = make_event(sequence=sequence, weights_version=weights_version)
        learner.learn_one(PlacedEvent(partition=0, offset=sequence, event=event))
    state = learner.stream_to_state["stream-a"]
    assert {drafter.weights_version for drafter in state.drafters} == {3}
    assert np.all(state.prior.num_windows > 12.0)


def test_drafters_that_left_long_ago_are_forgotten() -> None:
    learner, _ = learner_of(FakeEventLog.of({0: []}), FakePolicyBoard(), np.random.default_rng(0))
    gone = (DrafterVersion(drafter_id="gone", weights_version=1), *POOL[:1])
    for sequence in range(400):
        pool = gone if sequence < 3 else POOL[:2]
        event = make_event(sequence=sequence, drafters=pool, num_windows=2)
        learner.learn_one(PlacedEvent(partition=0, offset=sequence, event=event))
        if sequence == 50:
            assert "gone" in {d.drafter_id for d in learner.stream_to_state["stream-a"].drafters}
    state = learner.stream_to_state["stream-a"]
    assert [drafter.drafter_id for drafter in state.drafters] == ["drafter-0", "drafter-1"]
