"""URLs of event logs, and the topics that everybody shares."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.opening import FILE_NAME, declared_topics, open_event_log
from pipeline.eventlog.ports import EventLogError, TopicSpec
from schemas import topics


def test_a_folder_holds_an_embedded_log(tmp_path: Path) -> None:
    open_event_log(str(tmp_path / "data")).close()
    assert (tmp_path / "data" / FILE_NAME).is_file()


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_sqlite_url_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_absolute: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x" / "log.db"
    log = open_event_log(f"sqlite:///{path}" if is_absolute else "sqlite:///x/log.db")
    assert isinstance(log, EmbeddedEventLog)
    log.close()
    assert path.is_file()


@pytest.mark.parametrize("url", ["kafka://a:9092", "kafka://a:9092,b.example:9093/"])
def test_a_kafka_url_opens_nothing_until_it_is_used(url: str) -> None:
    log = open_event_log(url)
    assert isinstance(log, KafkaEventLog)
    log.close()


@pytest.mark.parametrize(
    "url", ["", "kafka://", "kafka://host", "kafka://:9092", "redis://host:1", "sqlite:///"]
)
def test_invalid_url_is_refused_with_what_to_write(url: str) -> None:
    with pytest.raises(EventLogError, match=r"kafka://host:port"):
        open_event_log(url)


def test_only_what_is_looked_up_by_key_is_compacted() -> None:
    assert declared_topics(6) == [
        TopicSpec(name=topics.VERIFICATION_EVENTS, num_partitions=6),
        TopicSpec(name=topics.POLICIES, num_partitions=6, is_compacted=True),
        TopicSpec(name=topics.DRAFTER_RELEASES, num_partitions=1, is_compacted=True),
        TopicSpec(name=topics.DEAD_LETTERS, num_partitions=1),
    ]
