"""The worker's inbox takes what is new, refuses what is broken, and outlives the log's outages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference.drafters.nothing import NothingDrafter
from inference.ports import Draft, Drafter
from pipeline.eventlog.ports import EventLog, EventLogError
from pipeline.messaging.boards import LogPolicyBoard, LogReleaseBoard
from pipeline.messaging.inbox import LogInbox
from pipeline.releases.registry import ArtifactError
from schemas.events import DrafterReleased, ReleaseState
from tests.inference.fakes import FakeDrafter
from tests.integration.tiny_run import wait_until
from tests.pipeline.messages import open_log
from tests.schemas.builders import make_policy, make_release


class Versioned(NothingDrafter):
    """A drafter that remembers its release."""

    def __init__(self, release: DrafterReleased) -> None:
        super().__init__(release.drafter_id)
        self.release_version = release.version


class Weighted(FakeDrafter):
    """A drafter with weights, which may stand beside another."""

    def __init__(self, release: DrafterReleased) -> None:
        super().__init__(
            behaviour=lambda *_: Draft(),
            drafter_id=release.drafter_id,
            weights_version=release.version,
        )


@pytest.fixture
def log(tmp_path: Path) -> Iterator[EventLog]:
    opened = open_log(tmp_path, num_partitions=1)
    yield opened
    opened.close()


@contextmanager
def following(
    open_log: Callable[[], EventLog],
    load: Callable[[DrafterReleased], Drafter] = Versioned,
    drafter_ids: tuple[str, ...] = ("drafter-0", "drafter-1"),
) -> Iterator[LogInbox]:
    """Yield an inbox that has looked once."""
    inbox = LogInbox(open_log, load, drafter_ids, poll_seconds=0.01, canary_share=0.25)
    inbox.start()
    try:
        yield inbox
    finally:
        inbox.close()


def live(drafter_id: str, version: int) -> DrafterReleased:
    return make_release(drafter_id=drafter_id, version=version, state=ReleaseState.LIVE)


def versions(drafters: object) -> dict[str, int]:
    assert isinstance(drafters, list)
    return {one.version.drafter_id: one.release_version for one in drafters}


def test_what_was_published_before_is_there_after_the_start(tmp_path: Path, log: EventLog) -> None:
    LogPolicyBoard(log, source="learner").publish([make_policy(version=3)])
    LogReleaseBoard(log, source="learner").publish(live("drafter-0", 4))
    with following(lambda: open_log(tmp_path, num_partitions=1)) as inbox:
        assert [policy.version for policy in inbox.take_policies()] == [3]
        assert versions(inbox.take_drafters()) == {"drafter-0": 4}
        assert inbox.take_policies() == []
        assert inbox.take_drafters() == []


def test_only_the_newest_of_what_came_between_two_takes_is_taken(
    tmp_path: Path, log: EventLog
) -> None:
    loaded: list[int] = []

    def load(release: DrafterReleased) -> Drafter:
        loaded.append(release.version)
        return Versioned(release)

    board = LogReleaseBoard(log, source="learner")
    with following(lambda: open_log(tmp_path, num_partitions=1), load) as inbox:
        for version in (1, 2, 3):
            board.publish(live("drafter-1", version))
            wait_until(lambda version=version: version in loaded)  # type: ignore[misc]
        LogPolicyBoard(log, source="learner").publish([make_policy(version=9)])
        wait_until(lambda: bool(inbox._policies))
        assert versions(inbox.take_drafters()) == {"drafter-1": 3}
        assert [policy.version for policy in inbox.take_policies()] == [9]


def test_candidates_and_drafters_of_other_pools_are_passed_over(
    tmp_path: Path, log: EventLog
) -> None:
    board = LogReleaseBoard(log, source="learner")
    board.publish(make_release(drafter_id="drafter-0", state=ReleaseState.CANDIDATE))
    board.publish(live("stranger", 1))
    board.publish(live("drafter-1", 1))
    with following(lambda: open_log(tmp_path, num_partitions=1)) as inbox:
        assert versions(inbox.take_drafters()) == {"drafter-1": 1}
        assert inbox.num_refused == 0


def released(version: int, state: str) -> DrafterReleased:
    return make_release(drafter_id="drafter-0", version=version, state=ReleaseState(state))


def places(inbox: LogInbox) -> dict[str, tuple[int, float]]:
    """Return version and share of the requests per place."""
    return {
        one.version.drafter_id: (one.version.weights_version, getattr(one, "canary_share", 1.0))
        for one in inbox.take_drafters()
    }


def test_a_version_on_trial_comes_beside_the_live_one_and_leaves_when_it_is_over(
    tmp_path: Path, log: EventLog
) -> None:
    board = LogReleaseBoard(log, source="learner")
    board.publish(released(1, "live"))
    board.publish_beside(released(2, "shadow"))
    loads: list[int] = []

    def load(release: DrafterReleased) -> Drafter:
        loads.append(release.version)
        return Weighted(release)

    with following(lambda: open_log(tmp_path, num_partitions=1), load) as inbox:
        assert places(inbox) == {"drafter-0": (1, 1.0), "drafter-0@shadow": (2, 0.0)}
        board.publish_beside(released(2, "canary"))
        wait_until(lambda: bool(inbox._drafters))
        assert places(inbox) == {"drafter-0@shadow": (2, 0.25)}
        board.publish(released(2, "live"))
        wait_until(lambda: bool(inbox._drafters))
        assert places(inbox) == {"drafter-0": (2, 1.0)}
        board.publish_beside(released(1, "retired"))
        wait_until(lambda: bool(inbox._drafters))
        assert places(inbox) == {"drafter-0@shadow": (0, 0.0)}
        assert loads == [1, 2], "promotion loads nothing"


def test_a_retired_drafter_proposes_nothing(tmp_path: Path, log: EventLog) -> None:
    LogReleaseBoard(log, source="learner").publish(released(1, "retired"))
    with following(lambda: open_log(tmp_path, num_partitions=1)) as inbox:
        (drafter,) = inbox.take_drafters()
        assert type(drafter) is NothingDrafter
        assert drafter.version.drafter_id == "drafter-0"


@pytest.mark.parametrize(
    "error",
    [
        ArtifactError("weights", found="sha256 a", expected="sha256 b"),
        FileNotFoundError("gone"),
        ValueError("shape"),
    ],
)
def test_invalid_artifacts_are_told_and_the_other_drafters_are_taken(
    tmp_path: Path, log: EventLog, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def load(release: DrafterReleased) -> Drafter:
        if release.drafter_id == "drafter-0":
            raise error
        return Versioned(release)

    board = LogReleaseBoard(log, source="learner")
    board.publish(live("drafter-0", 7))
    board.publish(live("drafter-1", 1))
    with following(lambda: open_log(tmp_path, num_partitions=1), load) as inbox:
        assert versions(inbox.take_drafters()) == {"drafter-1": 1}
        assert inbox.num_refused == 1
    assert f"drafter drafter-0 version 7 is not used: {error}" in caplog.text


def test_one_outage_is_one_warning_and_the_inbox_goes_on_when_the_log_is_back(
    tmp_path: Path, log: EventLog, caplog: pytest.LogCaptureFixture
) -> None:
    is_down = True

    def open_when_up() -> EventLog:
        if is_down:
            raise EventLogError("nobody answers")
        return open_log(tmp_path, num_partitions=1)

    with caplog.at_level(logging.WARNING), following(open_when_up) as inbox:
        wait_until(lambda: inbox.num_failed_looks >= 5)
        is_down = False
        LogPolicyBoard(log, source="learner").publish([make_policy()])
        wait_until(lambda: bool(inbox.take_policies()))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "nobody answers" in caplog.text


def test_a_log_that_is_down_does_not_hold_up_the_start() -> None:
    def refuse() -> EventLog:
        raise EventLogError("nobody answers")

    with following(refuse) as inbox:
        assert inbox.take_policies() == []
        assert inbox.num_failed_looks >= 1


def test_experts_of_the_pools_heads_come_and_go(tmp_path: Path, log: EventLog) -> None:
    board = LogReleaseBoard(log, source="learner")
    with following(lambda: open_log(tmp_path, num_partitions=1)) as inbox:
        board.publish(live("drafter-0.expert-1", 0))
        board.publish(live("other.expert-1", 0))
        wait_until(lambda: bool(inbox._drafters))
        assert versions(inbox.take_drafters()) == {"drafter-0.expert-1": 0}
        board.publish(
            make_release(drafter_id="drafter-0.expert-1", version=0, state=ReleaseState.RETIRED)
        )
        wait_until(lambda: bool(inbox._drafters))
        (gone,) = inbox.take_drafters()
        assert isinstance(gone, NothingDrafter)
        assert gone.version.drafter_id == "drafter-0.expert-1"
