"""One trainer at a time: the others stand by, and an old one stops when another has released."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from learner.ports import FencedError, ReceivedEvent, Trainer
from pipeline.elected_training import GROUP, ElectedReleases, ElectedTraining
from pipeline.eventlog.kafka_clients import KafkaOptions
from pipeline.eventlog.kafka_membership import ChangeKind, PartitionChange
from pipeline.messaging.topics import TopicPlan, create_topics
from schemas.codec import decode_drafter_released
from schemas.topics import DRAFTER_RELEASES, VERIFICATION_EVENTS
from tests.integration.broker import blank_broker, kafka_log
from tests.learner.fakes import FakeRefusedEvents
from tests.learner.trainers import Place, event_of, placed, train
from tests.pipeline.messages import message, open_log

MOST_SECONDS = 120.0


class Member:
    """A membership driven by the test (``pipeline.eventlog.kafka_membership``)."""

    def __init__(self) -> None:
        self.changes: list[PartitionChange] = []
        self.owned: frozenset[int] = frozenset({0})
        self.is_heard = True

    def is_confirmed(self, timeout_seconds: float) -> bool:
        return self.is_heard

    def tell(self, kind: ChangeKind) -> PartitionChange:
        change = PartitionChange(kind, (0,))
        self.changes.append(change)
        return change

    def take_changes(self) -> list[PartitionChange]:
        taken, self.changes = self.changes, []
        return taken

    def commit(self, partition: int, offset: int) -> None:
        """Pass over."""


class Recorder:
    """Writes down the offsets it is given; fails as told."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.offsets: list[int] = []
        self.raises: dict[int, Exception] = {}

    def start_offsets(self) -> Mapping[int, int]:
        return {0: self.start}

    def train(self, received: ReceivedEvent) -> None:
        if received.offset in self.raises:
            raise self.raises.pop(received.offset)
        self.offsets.append(received.offset)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {MOST_SECONDS} s in vain"
        time.sleep(0.02)


class Running:
    """Elected training in a thread."""

    def __init__(self, training: ElectedTraining) -> None:
        self.stop = threading.Event()
        self.thread = threading.Thread(target=training.run, args=(self.stop.is_set,))
        self.thread.start()

    def close(self) -> None:
        self.stop.set()
        self.thread.join(MOST_SECONDS)


def test_only_the_elected_one_trains_and_it_begins_anew_where_it_is_told(tmp_path: Path) -> None:
    log, member, refused = open_log(tmp_path, num_partitions=1), Member(), FakeRefusedEvents()
    log.append(VERIFICATION_EVENTS, [message(n) for n in range(10)])
    recorders = [Recorder(), Recorder(start=7)]
    recorders[0].raises = {3: ValueError("of another target")}
    built: list[Recorder] = []

    def build() -> Trainer:
        built.append(recorders[len(built)])
        return built[-1]

    training = ElectedTraining(log, build, member, refused)  # type: ignore[arg-type]
    with closing(log), closing(Running(training)):
        member.tell(ChangeKind.LOST)
        wait_until(lambda: not member.changes)
        assert (built, training.num_elections) == ([], 0)
        member.tell(ChangeKind.ASSIGNED)
        wait_until(lambda: recorders[0].offsets == [0, 1, 2, 4, 5, 6, 7, 8, 9])
        assert refused.place_to_reason == {(0, 3): "of another target"}
        change = member.tell(ChangeKind.REVOKED)
        wait_until(change.done.is_set)
        log.append(VERIFICATION_EVENTS, [message(10)])
        member.tell(ChangeKind.ASSIGNED)
        wait_until(lambda: recorders[1].offsets == [7, 8, 9, 10])
        assert recorders[0].offsets[-1] == 9
        assert training.num_elections == 2


def test_a_trainer_that_is_fenced_begins_again_from_what_is_released(tmp_path: Path) -> None:
    log, member = open_log(tmp_path, num_partitions=1), Member()
    log.append(VERIFICATION_EVENTS, [message(n) for n in range(4)])
    recorders = [Recorder(), Recorder(start=2)]
    recorders[0].raises = {1: FencedError("drafter d: version 5, this one continues 3")}
    built: list[Recorder] = []

    def build() -> Trainer:
        built.append(recorders[len(built)])
        return built[-1]

    training = ElectedTraining(log, build, member, FakeRefusedEvents())  # type: ignore[arg-type]
    with closing(log), closing(Running(training)):
        member.tell(ChangeKind.ASSIGNED)
        wait_until(lambda: recorders[1].offsets == [2, 3])
        assert training.num_fenced == 1
        assert recorders[0].offsets == [0]


def test_invalid_release_of_a_trainer_that_another_one_has_overtaken(tmp_path: Path) -> None:
    """D12: the older one stops publishing at once, and says which versions collide."""
    place = Place(tmp_path)
    older = place.trainer()
    newer = place.trainer()
    train(place.online(newer), placed([event_of(0), event_of(1)]))
    history = list(place.releases.history)
    with pytest.raises(FencedError, match=r"version 2 was released .* continues 0"):
        train(place.online(older), placed([event_of(0)]))
    assert place.releases.history == history
    # Begun again it goes on where the other one was.
    again = place.trainer()
    train(place.online(again), placed([event_of(0), event_of(1), event_of(2)]))
    versions = [decode_drafter_released(data).version for data in place.releases.history]
    parents = [decode_drafter_released(data).parent_version for data in place.releases.history]
    assert parents == [-1, *versions[:-1]]


def test_invalid_announcement_of_a_trainer_that_is_no_longer_elected(tmp_path: Path) -> None:
    """It has written its version, but says nothing of it and deletes nothing."""
    place, member = Place(tmp_path), Member()
    board = ElectedReleases(place.releases, member)  # type: ignore[arg-type]
    trainer = place.trainer(board=board)
    train(place.online(trainer), placed([event_of(0)]))
    history, stored = list(place.releases.history), place.registry.versions("softmax")
    for owned, is_heard in ((frozenset(), True), (frozenset({0}), False)):
        member.owned, member.is_heard = frozenset(owned), is_heard
        with pytest.raises(FencedError, match=r"version \d is not announced"):
            trainer.release("too late")
        assert place.releases.history == history
        assert set(stored) <= set(place.registry.versions("softmax"))
    member.is_heard = True
    trainer = place.trainer(board=board)
    assert trainer.release("elected again").parent_version == 1


@pytest.mark.external_service
def test_a_standby_takes_over_when_the_active_trainer_leaves(tmp_path: Path) -> None:
    """D11: scaling trainers out neither doubles the work nor splits the state."""
    with blank_broker(tmp_path) as servers:
        log = kafka_log(servers, KafkaOptions(session_timeout_seconds=6.0))
        create_topics(log, TopicPlan(num_partitions=1))
        log.append(VERIFICATION_EVENTS, [message(n) for n in range(5)])
        released: list[int] = []

        class Releasing(Recorder):
            def train(self, received: ReceivedEvent) -> None:
                released.append(received.offset)

            def start_offsets(self) -> Mapping[int, int]:
                return {0: len(released)}

        members = [log.member(DRAFTER_RELEASES, GROUP) for _ in range(2)]
        trainings = [ElectedTraining(log, Releasing, m, FakeRefusedEvents()) for m in members]
        services = [Running(training) for training in trainings]
        for member in members:
            member.start()
        wait_until(lambda: len(released) == 5)
        assert active(trainings).count(True) == 1
        first = active(trainings).index(True)
        services[first].close()
        members[first].close()
        log.append(VERIFICATION_EVENTS, [message(n) for n in range(5, 8)])
        wait_until(lambda: released == list(range(8)))
        assert trainings[1 - first].is_active
        services[1 - first].close()
        members[1 - first].close()
        log.close()


def active(trainings: Sequence[ElectedTraining]) -> list[bool]:
    return [training.is_active for training in trainings]
