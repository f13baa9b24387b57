"""One whole turn of the loop: the real commands, each a process, over a tiny model on disk."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipeline.eventlog.ports import EventLog
from pipeline.messaging.boards import LogPolicyBoard, LogReleaseBoard
from pipeline.messaging.event_logs import open_log
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import DrafterRegistry
from pipeline.wiring import open_target
from schemas.arrow import LoggedEvent, events_from_table
from schemas.codec import decode_verification_event
from schemas.equality import first_difference
from schemas.events import DrafterReleased, FinishReason, PolicyPublished, VerificationEvent
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.integration.broker import blank_broker
from tests.integration.commands import open_commands
from tests.integration.tiny_run import DOMAINS, RunningCommand, TinyRun, save_tiny_model, wait_until

HEADS = ("head-recent", "head-replay")
NUM_PROMPTS = 6
MAX_TOKENS = 48
SERVE = ("worker", "--prompts", "prompts.jsonl", "--max-tokens", str(MAX_TOKENS))

Start = Callable[..., RunningCommand]
"""Starts a command, given its arguments."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What is left of a turn: the folder, the events in order, the newest of what came back."""

    run: TinyRun
    events: list[LoggedEvent]
    policies: dict[str, PolicyPublished]
    releases: dict[str, DrafterReleased]
    num_dead_letters: int
    statuses: dict[str, int]


@pytest.fixture(
    scope="module",
    params=["embedded", pytest.param("kafka", marks=pytest.mark.external_service)],
)
def turn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Turn:
    """Serve a file of prompts twice while learner and archiver run, then stop everything."""
    folder = tmp_path_factory.mktemp("turn")
    save_tiny_model(folder / "model")
    with _event_log_url(request.param, folder) as url, open_commands() as commands:
        run = TinyRun.make(folder, folder / "model", url=url, num_prompts=NUM_PROMPTS)
        if request.param == "embedded":
            return _play(run, run.start)
        # Forked commands are enough here, and spare the seconds that the imports take.
        return _play(run, partial(commands.start, folder))


@contextmanager
def _event_log_url(kind: str, folder: Path) -> Iterator[str]:
    if kind == "embedded":
        yield ""
        return
    # A broker that is shared may hold the events of another run.
    with blank_broker(folder) as servers:
        yield f"kafka://{servers}"


def _play(run: TinyRun, start: Start) -> Turn:
    services = {name: start(name) for name in ("learner", "archiver")}
    statuses = {}
    with closing(open_log(run.settings)) as log:
        try:
            wait_until(lambda: len(LogReleaseBoard(log, source="test").read_all()) == len(HEADS))
            for worker in ("first worker", "second worker"):
                sampling = ("--temperature", "0.8") if worker == "second worker" else ()
                statuses[worker] = start(*SERVE, *sampling).wait()
                wait_until(lambda: _is_learned(log) and _is_trained(log))
        finally:
            for name, service in services.items():
                service.send_signal(signal.SIGTERM)
                statuses[name] = service.wait()
        return _remains(run, log, statuses)


def _is_learned(log: EventLog) -> bool:
    policies = LogPolicyBoard(log, source="test").read_all()
    learned = max((p.watermark.partition_to_offset.get(0, 0) for p in policies), default=0)
    return learned == log.end_offset(VERIFICATION_EVENTS, 0) > 0


def _is_trained(log: EventLog) -> bool:
    """Over a broker training runs beside selection: wait for the last version that is due."""
    stored = log.read(VERIFICATION_EVENTS, 0, 0, max_messages=10_000)
    events = [decode_verification_event(one.message.value) for one in stored]
    with_content = sum(event.content is not None for event in events)
    releases = LogReleaseBoard(log, source="test").read_all()
    return all(release.version >= with_content // 2 for release in releases)


def _remains(run: TinyRun, log: EventLog, statuses: dict[str, int]) -> Turn:
    stored = log.read(VERIFICATION_EVENTS, 0, 0, timeout_seconds=5.0)
    assert len(stored) == log.end_offset(VERIFICATION_EVENTS, 0)
    events = [
        LoggedEvent(
            topic=VERIFICATION_EVENTS,
            partition=0,
            offset=one.offset,
            appended_at=one.appended_at,
            event=decode_verification_event(one.message.value),
        )
        for one in stored
    ]
    return Turn(
        run=run,
        events=events,
        policies={p.stream: p for p in LogPolicyBoard(log, source="test").read_all()},
        releases={r.drafter_id: r for r in LogReleaseBoard(log, source="test").read_all()},
        num_dead_letters=log.end_offset(DEAD_LETTERS, 0),
        statuses=statuses,
    )


def test_every_process_ends_well_and_complains_of_nothing(turn: Turn) -> None:
    assert set(turn.statuses.values()) == {0}, turn.statuses
    assert turn.num_dead_letters == 0
    for command in ("learner", "archiver", "worker"):
        _, complaints = turn.run.output(command)
        assert "Traceback" not in complaints
        # On a machine that is busy otherwise, the Kafka client complains of its own pace.
        lines = [line for line in complaints.splitlines() if "kafka.net.selector" not in line]
        assert not [line for line in lines if "WARNING" in line]
        assert "ERROR" not in complaints


def test_every_prompt_is_answered_in_the_order_of_the_file(turn: Turn) -> None:
    answers, _ = turn.run.output("worker")
    lines = answers.splitlines()
    finals = [one.event for one in turn.events if one.event.is_final][-NUM_PROMPTS:]
    assert len(lines) == NUM_PROMPTS
    assert [event.stream for event in finals] == [
        DOMAINS[index % len(DOMAINS)] for index in range(NUM_PROMPTS)
    ]
    assert {event.finish_reason for event in finals} == {FinishReason.LENGTH}


def test_a_policy_has_learned_every_event_of_its_stream_once(turn: Turn) -> None:
    counts = Counter(one.event.stream for one in turn.events)
    assert counts.keys() == set(DOMAINS)
    assert {stream: policy.version for stream, policy in turn.policies.items()} == counts


def test_content_and_features_are_recorded_with_consent_and_never_without(turn: Turn) -> None:
    for one in turn.events:
        content = one.event.content
        if one.event.stream == "private":
            assert content is None
        else:
            assert content is not None
            assert content.features is not None


def test_heads_are_released_several_times_and_every_version_kept_is_whole(turn: Turn) -> None:
    settings = turn.run.settings
    registry = DrafterRegistry(str(settings.data))
    load = HeadLoader(open_target(settings), registry)
    with_content = sum(one.event.content is not None for one in turn.events)
    for head in HEADS:
        release = turn.releases[head]
        # The untrained one, then one for every two events with content.
        assert release.version == with_content // settings.learner.publish_weights_every_events
        assert registry.versions(head)[-1] == release.version >= 4
        assert load(release).version.weights_version == release.version
    names = [path.name for path in (settings.data / "drafters").rglob("*")]
    assert [name for name in names if name.startswith("_")] == []


def test_the_worker_serves_with_the_weights_that_were_learned_from_it(turn: Turn) -> None:
    epochs = sorted({one.event.worker_epoch for one in turn.events})
    assert len(epochs) == 2
    for head in HEADS:
        versions = [
            version.weights_version
            for one in turn.events
            for version in one.event.drafters
            if version.drafter_id == head
        ]
        assert versions == sorted(versions)
        assert versions[0] < versions[-1]
    assert {e.policy_version > 0 for e in _of_epoch(turn, epochs[1])} == {True}


def _of_epoch(turn: Turn, epoch: int) -> list[VerificationEvent]:
    return [one.event for one in turn.events if one.event.worker_epoch == epoch]


def test_a_restarted_worker_counts_its_events_afresh_under_a_new_epoch(turn: Turn) -> None:
    epochs = [one.event.worker_epoch for one in turn.events]
    assert epochs == sorted(epochs)
    for epoch in set(epochs):
        sequences = [event.sequence for event in _of_epoch(turn, epoch)]
        assert sequences == list(range(len(sequences)))


def test_the_parquet_log_holds_the_events_of_the_event_log(turn: Turn) -> None:
    files = sorted((turn.run.settings.data / "events").rglob("[!_.]*.parquet"))
    rows = [row for file in files for row in events_from_table(pq.ParquetFile(file).read())]
    rows.sort(key=lambda row: row.offset)
    assert first_difference(rows, turn.events) is None


def test_replay_rebuilds_every_decision_and_writes_page_and_numbers(turn: Turn) -> None:
    replay = turn.run.start("replay", "data", "--report", "report.html", "--json", "numbers.json")
    assert replay.wait() == 0, turn.run.output("replay")
    numbers = json.loads((turn.run.folder / "numbers.json").read_text())
    assert numbers["check"]["num_disagreements"] == 0
    assert numbers["check"]["num_checked"] > 0.8 * numbers["check"]["num_rounds"]
    assert numbers["total"]["num_requests"] == 2 * NUM_PROMPTS
    assert numbers["total"]["num_tokens"] == 2 * NUM_PROMPTS * MAX_TOKENS
    assert "</html>" in (turn.run.folder / "report.html").read_text()
