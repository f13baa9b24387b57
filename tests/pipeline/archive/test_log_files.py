"""Names of the files of the Parquet log."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.archive.log_files import LogFile, hour_folder, log_files, publish_log_file
from replay.reader import FILE_NAME
from schemas.arrow import events_to_table, read_table
from schemas.topics import VERIFICATION_EVENTS
from tests.schemas.builders import make_event, make_logged


def named(
    *, topic: str = VERIFICATION_EVENTS, partition: int = 0, first: int = 0, last: int = 9
) -> LogFile:
    return LogFile(topic=topic, partition=partition, first_offset=first, last_offset=last)


def test_names_sort_as_partitions_and_offsets_do() -> None:
    files = [
        named(partition=partition, first=first, last=2**63 - 1)
        for partition, first in itertools.product((0, 2, 10, 999), (0, 9, 10, 2**40))
    ]
    assert sorted(file.name for file in files) == [file.name for file in files]


@pytest.mark.parametrize("topic", [VERIFICATION_EVENTS, "t", "a-1-2-3", "with.dots_and-7"])
def test_a_name_says_what_it_was_made_from_to_us_and_to_the_reader(topic: str) -> None:
    file = named(topic=topic, partition=12, first=345, last=2**63 - 1)
    assert LogFile.parse(file.name) == file
    match = FILE_NAME.fullmatch(file.name)
    assert match is not None
    assert match["topic"] == topic
    assert [int(match[n]) for n in ("partition", "first", "last")] == [12, 345, 2**63 - 1]


@pytest.mark.parametrize(
    "name", ["", "x.parquet", "t-1-2.parquet", "t-1-2-x.parquet", "t-1-2-3.parquet.tmp", "t-1-2-3"]
)
def test_other_names_say_nothing(name: str) -> None:
    assert LogFile.parse(name) is None


def test_an_unfinished_file_is_no_log_file() -> None:
    assert LogFile.parse(f"_{named().name}") is None


def test_the_hour_is_that_of_the_clock_in_utc() -> None:
    folder = hour_folder(Path("data"), datetime(2026, 3, 29, 1, 59, 59, 999999, tzinfo=UTC))
    assert folder == Path("data/events/date=2026-03-29/hour=01")


def test_files_are_listed_by_offset_across_hours_and_topics_stay_apart(tmp_path: Path) -> None:
    table = events_to_table(make_logged([make_event()]))
    hours = [datetime(2026, 3, 29, hour, tzinfo=UTC) for hour in (3, 1, 2)]
    files = [named(first=first, last=first + 9) for first in (0, 10, 20)]
    for hour, file in zip(hours, files, strict=True):
        publish_log_file(hour_folder(tmp_path, hour), file, table)
    publish_log_file(hour_folder(tmp_path, hours[0]), named(topic="other.topic"), table)
    assert log_files(tmp_path, VERIFICATION_EVENTS) == files


def test_a_published_file_holds_its_table(tmp_path: Path) -> None:
    table = events_to_table(make_logged([make_event(), make_event(sequence=1)]))
    path = publish_log_file(tmp_path / "new" / "folders", named(), table)
    assert read_table(path).equals(table)
    assert [found.name for found in path.parent.iterdir()] == [named().name]
