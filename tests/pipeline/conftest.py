"""One broker for all tests that need one; places for the archiver and the registry."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from pipeline.archive.archiver import Archiver
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.opening import declared_topics
from pipeline.messaging.dead_letters import DeadLetterTopic
from pipeline.releases.registry import DrafterRegistry
from tests.integration.broker import broker
from tests.pipeline.archiving import TOPIC, Clock


@pytest.fixture(scope="session")
def bootstrap_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a Kafka-protocol broker."""
    with broker(tmp_path_factory.mktemp("broker")) as servers:
        yield servers


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[EmbeddedEventLog]:
    log = EmbeddedEventLog(tmp_path / "log.sqlite", clock=clock.utc)
    for spec in declared_topics(3):
        log.create_topic(spec)
    yield log
    log.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def open_archiver(
    log: EmbeddedEventLog, folder: Path, clock: Clock
) -> Iterator[Callable[..., Archiver]]:
    opened: list[Archiver] = []

    def open_one(max_events_per_file: int = 10, max_seconds_per_file: float = 60.0) -> Archiver:
        archiver = Archiver(
            log,
            TOPIC,
            folder,
            dead_letters=DeadLetterTopic(log),
            max_events_per_file=max_events_per_file,
            max_seconds_per_file=max_seconds_per_file,
            clock=clock.monotonic,
        )
        opened.append(archiver)
        return archiver

    yield open_one
    for archiver in opened:
        archiver.close()


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A local folder, and a store without folders or renames."""
    if request.param == "local":
        yield str(tmp_path / "store")
        return
    name = f"/registry-{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(name):
        filesystem.rm(name, recursive=True)


@pytest.fixture
def local(tmp_path: Path) -> DrafterRegistry:
    return DrafterRegistry(str(tmp_path))
