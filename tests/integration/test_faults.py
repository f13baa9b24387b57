"""After seeded faults everything is as one clean pass over the same log would have made it.

A short run, one fault of each kind, belongs to the suite. ``DRAFTLOOP_TEST_FAULTS=30`` asks for a
long one, with services that stand still for longer than their session, and with events that come
late by ten thousand; ``DRAFTLOOP_TEST_SEED`` for another order.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from schemas.arrow import LoggedEvent
from schemas.topics import DEAD_LETTERS, VERIFICATION_EVENTS
from tests.integration.clean_pass import (
    CleanReleases,
    first_wrong_policy,
    first_wrong_release,
    first_wrong_row,
    is_archived,
    logged_events,
    release_end,
)
from tests.integration.fault_kinds import (
    HISTORY_WORKER,
    Fault,
    drawn_faults,
    fault_kinds,
    messages_of,
)
from tests.integration.kafka_client import forgets_sockets, sockets_freed_here
from tests.integration.roles import NUM_PARTITIONS
from tests.integration.stage import ROLE_TO_COUNT, Stage, until

NUM_FAULTS = int(os.environ.get("DRAFTLOOP_TEST_FAULTS", "0"))
SEED = int(os.environ.get("DRAFTLOOP_TEST_SEED", "7"))
NUM_LATE = 10_000 if NUM_FAULTS else 1_000
SECONDS_BETWEEN = 0.4

pytestmark = [
    pytest.mark.external_service,
    pytest.mark.timeout(1800 if NUM_FAULTS else 300),
    forgets_sockets,
]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with sockets_freed_here(), ExitStack() as stack:
        (tmp_path / "archive").mkdir()
        has_small_disk = stack.enter_context(_small_disk(tmp_path / "archive"))
        yield Stage(tmp_path, stack, has_small_disk=has_small_disk)


@contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    """Make the archive's folder a small disk, and tell whether this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(folder)]
    try:
        is_mounted = subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        is_mounted = False
    yield is_mounted
    if is_mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_policies_releases_and_rows_after_faults_equal_those_of_a_clean_pass(
    stage: Stage,
) -> None:
    kinds = fault_kinds(NUM_LATE)
    faults = _disturbed(stage, kinds)
    events, clean = _settled(stage)

    print(f"seed {SEED}, {len(events)} events, faults {dict(Counter(faults))}")  # noqa: T201
    assert len(faults) >= min(NUM_FAULTS, len(kinds) - 2)
    assert first_wrong_policy(stage.log, events) is None
    assert first_wrong_release(stage.log, stage.registry, clean, events) is None
    assert first_wrong_row(stage.folder / "archive", events) is None
    _assert_dead_letters_are_complete(stage, len(events))


def _disturbed(stage: Stage, kinds: dict[str, Fault]) -> list[str]:
    """Let events flow, disturb what learns from them, and return the faults."""
    generator = np.random.default_rng(SEED)
    for start in range(1, NUM_LATE + 1, 500):
        stage.append(messages_of(HISTORY_WORKER, list(range(start, start + 500))))
    stage.sequence = NUM_LATE + 1
    for role, count in ROLE_TO_COUNT.items():
        for _ in range(count):
            stage.start(role)
    faults = drawn_faults(list(kinds), NUM_FAULTS, generator)
    for name in faults:
        kinds[name](stage, generator)
        stage.assert_released_version_is_there()
        time.sleep(SECONDS_BETWEEN * generator.uniform(0.5, 1.5))
    return faults


def _settled(stage: Stage) -> tuple[list[LoggedEvent], CleanReleases]:
    """End the traffic, wait until all of it is learned, and end everything else."""
    stage.end_all("worker")
    events = logged_events(stage.log)
    clean = CleanReleases.of(events, stage.folder / "clean")
    # Behind the last event there may be dead letters, over which no position is committed.
    ends = {row.partition: row.offset + 1 for row in events}
    assert len(ends) == NUM_PARTITIONS
    _until(stage, lambda: stage.committed() == ends, "the learners' positions")
    _until(stage, lambda: is_archived(stage.log, stage.folder / "archive"), "the archive")
    _until(stage, lambda: _is_trained(stage, clean), "the newest version")
    for role in ("learner", "trainer", "archiver"):
        stage.end_all(role)
    return events, clean


def _until(stage: Stage, condition: Callable[[], bool], what: str) -> None:
    def holds() -> bool:
        stage.assert_running()
        return condition()

    until(holds, what)


def _is_trained(stage: Stage, clean: CleanReleases) -> bool:
    release = stage.latest_release()
    return release is not None and release_end(release, clean.partition) == clean.last_end


def _assert_dead_letters_are_complete(stage: Stage, num_events: int) -> None:
    """Every message is an event or, once, a dead letter."""
    ends = [stage.log.end_offset(VERIFICATION_EVENTS, p) for p in range(NUM_PARTITIONS)]
    letters = stage.log.read(DEAD_LETTERS, 0, 0, max_messages=10_000)
    places = {
        tuple(stored.message.headers[name] for name in ("topic", "partition", "offset"))
        for stored in letters
    }
    assert len(places) == sum(ends) - num_events
