"""The refresh job trains on what no learner has read, once, and leaves a running learner alone."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from inference.sampling import SamplingParams
from inference.target import Target
from inference.worker import Request
from pipeline.locks import only_one
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.releases.drafter_versions import DrafterVersions
from pipeline.releases.registry import DrafterRegistry
from pipeline.releases.release_history import ReleaseHistory
from pipeline.schedule import refresh
from pipeline.wiring import open_target, start_worker
from schemas.codec import decode_verification_event
from schemas.events import DrafterReleased, ReleaseState
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.tiny_run import TinyRun, save_tiny_model


def never() -> bool:
    """Do not ask the job to end."""
    return False


def request(target: Target, number: int) -> Request:
    """Return a request of a stream that consents."""
    return Request(
        request_id=f"request-{number}",
        stream="code",
        prompt_token_ids=target.encode("abcdefgh"),
        params=SamplingParams(max_tokens=16),
        has_consent=True,
    )


def releases(run: TinyRun) -> dict[str, DrafterReleased]:
    with closing(open_log(run.settings)) as log:
        return {one.drafter_id: one for one in LogReleaseBoard(log, source="test").read_all()}


def versions(run: TinyRun) -> dict[str, int]:
    return {name: one.version for name, one in releases(run).items()}


def drafter_ids_of_events(run: TinyRun) -> list[list[str]]:
    """Return whom each event names, in the order of the log."""
    with closing(open_log(run.settings)) as log:
        partitions = range(log.num_partitions(VERIFICATION_EVENTS))
        stored = [m for p in partitions for m in log.read(VERIFICATION_EVENTS, p, 0)]
    events = [decode_verification_event(one.message.value or b"") for one in stored]
    return [[drafter.drafter_id for drafter in event.drafters] for event in events]


def test_a_refresh_trains_on_each_event_once(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    run = TinyRun.make(tmp_path, tmp_path / "model")
    target = open_target(run.settings)
    running = start_worker(run.settings, target)
    for number in range(4):
        running.worker.serve(request(target, number))
    running.close()

    assert refresh(run.settings, never) >= 4
    first = versions(run)
    assert first.keys() == {"head-recent", "head-replay"}
    assert min(first.values()) >= 1
    history = ReleaseHistory(str(run.settings.data)).steps("head-replay")
    assert history[0].version == 0
    assert {one.version for one in history} >= {0, first["head-replay"]}
    refresh(run.settings, never)
    assert versions(run) == first, "the same data cut gives nothing new"

    with only_one(run.settings.data, "learner", cure=""):
        assert refresh(run.settings, never) == 0
    assert refresh(run.settings, lambda: True) == 0, "asked to end before it began"


def test_events_from_a_retired_drafter_teach_the_others_and_serving_goes_on(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "model")
    run = TinyRun.make(tmp_path, tmp_path / "model")
    target = open_target(run.settings)
    running = start_worker(run.settings, target)
    answers = [running.worker.serve(request(target, 0)).token_ids]
    refresh(run.settings, never)
    with closing(open_log(run.settings)) as log:
        versions_by_hand = DrafterVersions(
            DrafterRegistry(str(run.settings.data)),
            LogReleaseBoard(log, source="test"),
            now=lambda: datetime.now(UTC),
        )
        versions_by_hand.retire("head-recent", "no longer wanted")
    before = releases(run)
    # The worker need not have heard of it: its events name the retired drafter all the same.
    answers += [running.worker.serve(request(target, number)).token_ids for number in range(1, 5)]
    running.close()

    assert all("head-recent" in one for one in drafter_ids_of_events(run)[-4:])
    assert refresh(run.settings, never) >= 4
    after = releases(run)
    assert after["head-recent"] == before["head-recent"], "nothing of it is trained or announced"
    assert after["head-recent"].state is ReleaseState.RETIRED
    trained = after["head-replay"].training_window.partition_to_offset
    assert trained != before["head-replay"].training_window.partition_to_offset
    assert all(one == answers[0] for one in answers), "a retired drafter changes no output"
