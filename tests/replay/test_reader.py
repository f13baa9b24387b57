"""Everything readable is read once, in order, and everything else is named."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replay.errors import ReplayError
from replay.reader import LogReader, SequenceSet
from schemas.arrow import LoggedEvent, events_to_table, write_table
from schemas.events import VerificationEvent
from tests.replay.synthetic import log, make_request, write_log
from tests.schemas.builders import make_event


def events(count: int, *, first: int = 0, worker_id: str = "worker-0") -> list[VerificationEvent]:
    one = make_request(num_tokens=6, worker_id=worker_id)
    return [
        replace(
            one,
            sequence=index,
            event_id=f"{worker_id}.1.{index}",
            request_id=f"{worker_id}-request-{index}",
        )
        for index in range(first, first + count)
    ]


def offsets(reader: LogReader) -> list[tuple[int, int]]:
    return [(logged.partition, logged.offset) for logged in reader]


def test_the_data_folder_its_events_folder_and_one_file_are_all_logs(tmp_path: Path) -> None:
    paths = write_log(tmp_path, log(events(5)), rows_per_file=3)
    assert offsets(LogReader(tmp_path)) == [(0, i) for i in range(5)]
    assert offsets(LogReader(tmp_path / "events")) == [(0, i) for i in range(5)]
    assert offsets(LogReader(paths[1])) == [(0, 3), (0, 4)]


def test_events_survive_the_way_through_the_log(tmp_path: Path) -> None:
    written = log(events(2))
    write_log(tmp_path, written)
    read = list(LogReader(tmp_path))
    assert [row.event.request_id for row in read] == [row.event.request_id for row in written]
    for one, other in zip(read, written, strict=True):
        windows = (one.event.windows, other.event.windows)
        assert np.array_equal(windows[0].start, windows[1].start)
        assert np.array_equal(
            windows[0].realised_acceptance, windows[1].realised_acceptance, equal_nan=True
        )


def test_offsets_are_in_order_when_names_sort_otherwise(tmp_path: Path) -> None:
    # "...-100-..." sorts before "...-99-..." as text.
    write_log(tmp_path, log(events(3), first_offset=97))
    write_log(tmp_path, log(events(3, first=3), first_offset=100))
    assert [offset for _, offset in offsets(LogReader(tmp_path))] == list(range(97, 103))


def test_partitions_are_merged_by_time_and_each_stays_in_offset_order(tmp_path: Path) -> None:
    first = log(events(4))
    second = [
        replace(row, appended_at=row.appended_at + timedelta(seconds=0.5))
        for row in log(events(4, worker_id="worker-1"), partition=1)
    ]
    # A clock that stepped back must not reorder a partition.
    second[2] = replace(second[2], appended_at=second[0].appended_at)
    write_log(tmp_path, first)
    write_log(tmp_path, second, hour="02")
    found = offsets(LogReader(tmp_path))
    assert found[:3] == [(0, 0), (1, 0), (0, 1)]
    for partition in (0, 1):
        assert [offset for at, offset in found if at == partition] == [0, 1, 2, 3]


def test_rows_written_twice_are_read_once_and_counted(tmp_path: Path) -> None:
    rows = log(events(6))
    write_log(tmp_path, rows[:4])
    write_log(tmp_path, rows[2:], hour="02")
    reader = LogReader(tmp_path)
    assert [offset for _, offset in offsets(reader)] == list(range(6))
    assert reader.summary().num_duplicates == 2


def test_an_event_sent_twice_by_its_worker_is_read_once(tmp_path: Path) -> None:
    sent = events(3)
    write_log(tmp_path, log([*sent, sent[1]]))
    reader = LogReader(tmp_path)
    assert [offset for _, offset in offsets(reader)] == [0, 1, 2]
    assert reader.summary().num_duplicates == 1


def test_an_event_sent_again_to_another_partition_is_read_once(tmp_path: Path) -> None:
    sent = events(3)
    write_log(tmp_path, log(sent))
    write_log(tmp_path, log(sent[1:2], partition=1, first_offset=50), hour="02")
    reader = LogReader(tmp_path)
    assert len(offsets(reader)) == 3
    assert reader.summary().num_duplicates == 1


def test_a_restarted_worker_counts_from_zero_without_losing_events(tmp_path: Path) -> None:
    again = [replace(event, worker_epoch=2) for event in events(3)]
    write_log(tmp_path, log([*events(3), *again]))
    assert len(offsets(LogReader(tmp_path))) == 6


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_cut_file_is_skipped_and_named(tmp_path: Path, keep: int) -> None:
    paths = write_log(tmp_path, log(events(6)), rows_per_file=2)
    paths[1].write_bytes(paths[1].read_bytes()[:keep])
    reader = LogReader(tmp_path)
    assert [offset for _, offset in offsets(reader)] == [0, 1, 4, 5]
    summary = reader.summary()
    assert (summary.num_files, summary.num_unreadable_files) == (2, 1)
    (problem,) = summary.problems
    assert problem.name == str(paths[1].relative_to(tmp_path / "events"))
    assert problem.reason and "\n" not in str(problem)


def test_a_flipped_bit_is_found_by_its_checksum(tmp_path: Path) -> None:
    paths = write_log(tmp_path, log(events(4)), rows_per_file=2)
    with pq.ParquetFile(paths[0]) as parquet:
        chunk = parquet.metadata.row_group(0).column(5)
    content = bytearray(paths[0].read_bytes())
    content[chunk.data_page_offset + chunk.total_compressed_size - 2] ^= 1
    paths[0].write_bytes(content)
    reader = LogReader(tmp_path)
    assert [offset for _, offset in offsets(reader)] == [2, 3]
    assert reader.summary().num_unreadable_files == 1


def test_a_foreign_parquet_file_is_skipped_and_named(tmp_path: Path) -> None:
    paths = write_log(tmp_path, log(events(2)))
    pq.write_table(pa.table({"a": [1]}), paths[0].with_name("other.parquet"))
    reader = LogReader(tmp_path)
    assert len(offsets(reader)) == 2
    assert [problem.name.endswith("other.parquet") for problem in reader.summary().problems] == [
        True
    ]


def test_a_row_that_breaks_the_contract_ends_its_file_and_says_where(tmp_path: Path) -> None:
    rows = log(events(3))
    table = events_to_table(rows)
    broken = table["num_positions"].to_pylist()
    broken[1] = 99
    at = table.schema.get_field_index("num_positions")
    table = table.set_column(at, table.schema.field(at), pa.array(broken, pa.int64()))
    folder = tmp_path / "events"
    folder.mkdir()
    write_table(table, folder / "t-0-0-2.parquet")
    write_table(
        events_to_table(log(events(1, first=9), first_offset=3)), folder / "t-0-3-3.parquet"
    )
    reader = LogReader(tmp_path)
    assert (0, 3) in offsets(reader)
    (problem,) = reader.summary().problems
    assert "num_positions" in problem.reason and "99" in problem.reason


def test_unfinished_and_hidden_names_are_ignored(tmp_path: Path) -> None:
    paths = write_log(tmp_path, log(events(2)))
    paths[0].with_name("_t-0-2-3.parquet").write_bytes(b"half")
    paths[0].with_name(".t-0-2-3.parquet").write_bytes(b"half")
    hidden = tmp_path / "events" / "_unfinished"
    hidden.mkdir()
    (hidden / "t-0-2-3.parquet").write_bytes(b"half")
    reader = LogReader(tmp_path)
    assert len(offsets(reader)) == 2
    assert reader.summary().problems == ()


def test_files_that_come_and_go_while_reading_do_not_stop_it(tmp_path: Path) -> None:
    paths = write_log(tmp_path, log(events(6)), rows_per_file=2)
    reader = LogReader(tmp_path)
    rows = iter(reader)
    read = [next(rows)]
    write_log(tmp_path, log(events(2, first=6), first_offset=6), hour="02")
    paths[1].unlink()
    read.extend(rows)
    assert [row.offset for row in read] == [0, 1, 4, 5]
    assert "No such file" in reader.summary().problems[0].reason
    assert len(offsets(LogReader(tmp_path))) == 6


def test_a_reader_can_be_read_again(tmp_path: Path) -> None:
    write_log(tmp_path, log(events(3)))
    reader = LogReader(tmp_path)
    assert offsets(reader) == offsets(reader)
    assert (reader.summary().num_events, reader.summary().num_duplicates) == (3, 0)


def test_the_summary_names_streams_drafters_and_times(tmp_path: Path) -> None:
    sent = events(3)
    later = sent[0].produced_at + timedelta(hours=1)
    sent[1] = replace(sent[1], stream="stream-b", produced_at=later)
    write_log(tmp_path, log(sent))
    reader = LogReader(tmp_path)
    list(reader)
    summary = reader.summary()
    assert summary.streams == ("stream-a", "stream-b")
    assert summary.drafter_ids == ("drafter-0", "drafter-1", "drafter-2")
    assert summary.num_speculative_tokens == (4,)
    assert (summary.first_produced_at, summary.last_produced_at) == (sent[0].produced_at, later)


def test_memory_is_bounded_by_a_file_not_by_the_log(tmp_path: Path) -> None:
    one = make_request(hit_rates=[0.5] * 8, num_tokens=400)
    sent = [replace(one, sequence=i, event_id=f"worker-0.1.{i}") for i in range(64)]
    rows = log(sent)
    write_log(tmp_path, rows, rows_per_file=4)
    file_bytes = events_to_table(rows[:4]).nbytes
    before = pa.total_allocated_bytes()
    peak = max(pa.total_allocated_bytes() - before for _ in LogReader(tmp_path))
    assert peak < 6 * file_bytes < 0.5 * events_to_table(rows).nbytes


def test_invalid_log_that_does_not_exist_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"nowhere does not exist; give the data folder") as found:
        LogReader(tmp_path / "nowhere")
    assert "\n" not in str(found.value)


def test_invalid_log_without_files_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match=r"holds no events.*let the worker and the archiver run"):
        LogReader(tmp_path)


def test_invalid_log_of_unreadable_files_only_is_refused_with_their_names(tmp_path: Path) -> None:
    (path,) = write_log(tmp_path, log(events(1)))
    path.write_bytes(b"nothing")
    with pytest.raises(ReplayError, match=f"1 unreadable.*{path.name}.*restore or remove"):
        list(LogReader(tmp_path))


def test_invalid_log_of_empty_tables_is_refused(tmp_path: Path) -> None:
    no_rows: list[LoggedEvent] = []
    write_table(events_to_table(no_rows), tmp_path / "t-0-0-0.parquet")
    with pytest.raises(ReplayError, match="holds no events"):
        list(LogReader(tmp_path))


@given(st.lists(st.integers(0, 40)))
def test_a_sequence_set_is_a_set_in_disjoint_intervals(values: list[int]) -> None:
    found, expected = SequenceSet(), set[int]()
    for value in values:
        assert found.add(value) == (value not in expected)
        expected.add(value)
    num_runs = sum(value - 1 not in expected for value in expected)
    assert found.num_intervals == num_runs


def test_prompts_are_read_if_asked_for_and_nothing_else_of_the_content(tmp_path: Path) -> None:
    event = make_event(with_content=True, segment_index=0)
    assert event.content is not None
    write_log(tmp_path, log([event]))
    (asked,) = LogReader(tmp_path, reads_prompts=True).segments()
    (mute,) = LogReader(tmp_path).segments()
    np.testing.assert_array_equal(asked.prompt_token_ids, event.content.prompt_token_ids)
    assert asked.prompt_token_ids.size > 0
    assert mute.prompt_token_ids.size == 0
