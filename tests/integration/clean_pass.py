"""What one undisturbed pass makes of a log, and where anything else begins to differ from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from learner.service import LearnerSettings, PolicyLearner
from learner.stream_state import StreamSettings
from pipeline.archive.log_files import log_files
from pipeline.eventlog.ports import EventLog, StoredMessage
from pipeline.messaging.boards import LogEventSource
from pipeline.messaging.event_decoding import decode_events
from pipeline.releases.registry import DrafterRegistry
from schemas.arrow import LoggedEvent, events_from_table, read_table
from schemas.codec import decode_drafter_released, decode_policy_published, encode
from schemas.equality import first_difference
from schemas.events import DrafterReleased, PolicyPublished
from schemas.topics import DRAFTER_RELEASES, POLICIES, VERIFICATION_EVENTS
from tests.integration.roles import DRAFTER_ID, LEARNER_ID, TRAINED_STREAM, trainer
from tests.learner.fakes import FakePolicyBoard
from tests.learner.trainers import Releases, same
from tests.schemas.builders import PRODUCED_AT


def stored_messages(log: EventLog, topic: str, partition: int) -> Iterator[StoredMessage]:
    """Yield all that a partition holds."""
    offset, end = log.begin_offset(topic, partition), log.end_offset(topic, partition)
    while offset < end and (page := log.read(topic, partition, offset, timeout_seconds=5.0)):
        yield from page
        offset = page[-1].offset + 1


def logged_events(log: EventLog) -> list[LoggedEvent]:
    """Return every event that the log holds, by partition and offset."""
    rows: list[LoggedEvent] = []
    for partition in range(log.num_partitions(VERIFICATION_EVENTS)):
        messages = list(stored_messages(log, VERIFICATION_EVENTS, partition))
        rows += decode_events(VERIFICATION_EVENTS, messages)[0]
    return rows


def published_policies(log: EventLog) -> dict[str, list[PolicyPublished]]:
    """Return per stream every policy that the topic still holds, in the order of writing."""
    stream_to_policies = defaultdict(list)
    for partition in range(log.num_partitions(POLICIES)):
        for stored in stored_messages(log, POLICIES, partition):
            policy = decode_policy_published(stored.message.value)
            stream_to_policies[policy.stream].append(replace(policy, produced_at=PRODUCED_AT))
    return stream_to_policies


def first_wrong_policy(log: EventLog, events: list[LoggedEvent]) -> str | None:
    """Compare every policy ever published with the clean pass at the same version.

    Returns:
        The first event after which they differ, and how; None if the last policy of every stream
        contains every event, and none of the others differs.
    """
    found = published_policies(log)
    source = LogEventSource(log, range(log.num_partitions(VERIFICATION_EVENTS)), group="clean")
    learner = PolicyLearner(
        source,
        FakePolicyBoard(),
        LearnerSettings(learner_id=LEARNER_ID),
        now=lambda: PRODUCED_AT,
    )
    stream_to_versions = {
        stream: {policy.version: policy for policy in policies}
        for stream, policies in found.items()
    }
    for row in events:
        learner.learn_one(row)
        state = learner.stream_to_state[row.event.stream]
        published = stream_to_versions.get(state.stream, {}).get(state.version)
        if published is None:
            continue
        expected = state.to_policy(StreamSettings(), learner_id=LEARNER_ID, produced_at=PRODUCED_AT)
        difference = first_difference(published, expected)
        # A copy that was skipped moves no state, so the watermark of its event may be either.
        if difference is not None:
            return f"{place(row)}: policy version {state.version} of {state.stream}: {difference}"
    for stream, state in learner.stream_to_state.items():
        highest = max(stream_to_versions.get(stream, {0: None}))
        if highest != state.version:
            of_stream = [row for row in events if row.event.stream == stream]
            return (
                f"stream {stream}: {highest} events learned, {state.version} in the log; "
                f"the last one is {place(of_stream[-1])}"
            )
    return None


@dataclass(frozen=True, slots=True)
class CleanReleases:
    """The versions of one undisturbed trainer.

    ``end_to_release`` has them by the offset behind the last event that they were trained on, in
    the partition of the one stream that can be trained on.
    """

    registry: DrafterRegistry
    partition: int
    end_to_release: dict[int, DrafterReleased]

    @classmethod
    def of(cls, events: list[LoggedEvent], folder: Path) -> CleanReleases:
        """Train on the events of a log; the versions go to ``folder``."""
        board = Releases()
        registry = DrafterRegistry(str(folder), keep_seconds=float("inf"))
        online = trainer(board, registry)
        partition = next(row.partition for row in events if row.event.stream == TRAINED_STREAM)
        for row in events:
            # A trainer tells copies from new events by partition, whatever their streams.
            if row.partition == partition:
                online.train(row)
        releases = {release_end(one, partition): one for one in board.all_releases()}
        return cls(registry, partition, releases)

    @property
    def last_end(self) -> int:
        """Offset behind the last event of the newest version."""
        return max(self.end_to_release)


def release_end(release: DrafterReleased, partition: int) -> int:
    """Return the offset behind the last event of a partition that a version contains."""
    return release.training_window.partition_to_offset.get(partition, 0)


def first_wrong_release(
    log: EventLog, registry: DrafterRegistry, clean: CleanReleases, events: list[LoggedEvent]
) -> str | None:
    """Compare every announced version with the one that a clean pass makes of the same events.

    Numbers may have gaps, where a trainer died between writing and announcing. Of versions that
    were pruned meanwhile, only the events that trained them are compared.

    Returns:
        The last event of the first version that differs, and how; None if the newest version ends
        where the clean pass does, and none of the others differs.
    """
    end_to_row = {row.offset + 1: row for row in events if row.partition == clean.partition}
    stored, newest, end = set(registry.versions(DRAFTER_ID)), -1, -1
    for stored_message in stored_messages(log, DRAFTER_RELEASES, 0):
        release = decode_drafter_released(stored_message.message.value)
        end = release_end(release, clean.partition)
        where = place(end_to_row[end]) if end in end_to_row else "the untrained version"
        if release.version <= newest:
            return f"{where}: version {release.version} was announced behind version {newest}"
        newest = release.version
        expected = clean.end_to_release.get(end)
        if expected is None:
            return f"{where}: version {newest} ends with it, none of the clean pass does"
        if newest in stored and not same(
            _training_state(registry, release), _training_state(clean.registry, expected)
        ):
            return f"{where}: the weights of version {newest} differ, which ends with it"
    if newest not in stored or end != clean.last_end:
        return f"{place(end_to_row[clean.last_end])}: not in the newest version, {newest}"
    return None


def _training_state(
    registry: DrafterRegistry, release: DrafterReleased
) -> Mapping[str, torch.Tensor]:
    digest = release.manifest_sha256
    return registry.read_training_state(release.artifact_uri, manifest_sha256=digest)


def first_wrong_row(folder: Path, events: list[LoggedEvent]) -> str | None:
    """Compare every row of every Parquet file with the log; None if they are the same."""
    paths = sorted(folder.rglob("[!_]*.parquet"))
    rows = [row for path in paths for row in events_from_table(read_table(path))]
    rows.sort(key=lambda row: (row.partition, row.offset))
    for row, expected in zip(rows, events, strict=False):
        if (row.partition, row.offset) != (expected.partition, expected.offset):
            return f"{place(expected)}: expected, the archive has {place(row)}"
        if encode(row.event) != encode(expected.event):
            return f"{place(expected)}: the archive has {row.event.event_id}, or it otherwise"
        if row.appended_at != expected.appended_at:
            return f"{place(expected)}: appended at {expected.appended_at}, not {row.appended_at}"
    if len(rows) != len(events):
        longer = max((rows, events), key=len)
        return (
            f"{place(longer[min(len(rows), len(events))])}: {len(rows)} rows, {len(events)} events"
        )
    return None


def is_archived(log: EventLog, folder: Path) -> bool:
    """Tell whether the names of the files cover the log to its end, without a gap."""
    for partition in range(log.num_partitions(VERIFICATION_EVENTS)):
        files = [f for f in log_files(folder, VERIFICATION_EVENTS) if f.partition == partition]
        ends = [0, *(file.last_offset + 1 for file in files)]
        if [file.first_offset for file in files] != ends[:-1]:
            raise AssertionError(f"partition {partition}: ranges do not touch: {files}")
        if ends[-1] != log.end_offset(VERIFICATION_EVENTS, partition):
            return False
    return True


def place(row: LoggedEvent) -> str:
    """Name an event by where it lies."""
    return f"{row.topic}/{row.partition} offset {row.offset} ({row.event.event_id})"
