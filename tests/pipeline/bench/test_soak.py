"""What the soak judges: memory that grows, events that are missing, sizes that were not planned."""

from __future__ import annotations

import os

import pytest

from pipeline.bench.soak import WINDOWS_UNTIL_WARM, Memory, faults_of
from pipeline.bench.soak_worker import NUM_STREAMS, stamped_events
from pipeline.configuration.settings import Settings

GOOD = {
    "num_windows": 2_000_000.0,
    "num_events": 30_000.0,
    "num_events_in_topic": 30_000.0,
    "num_events_learned": 30_000.0,
    "num_rows": 30_000.0,
    "num_dead_letters": 0.0,
    "topic_bytes_share_of_plan": 1.02,
    "parquet_bytes_share_of_plan": 0.95,
    "learner_memory_growth": 0.02,
}


def test_a_soak_as_it_should_be_has_no_faults() -> None:
    assert faults_of(GOOD) == []


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("num_events_learned", 29_999.0, "num_events_learned is 29,999, expected 30,000"),
        ("num_rows", 30_001.0, "num_rows is 30,001, expected 30,000"),
        ("num_dead_letters", 1.0, "num_dead_letters is 1, expected 0"),
        ("learner_memory_growth", 0.11, "learner_memory_growth is 0.110, expected at most 0.1"),
        ("topic_bytes_share_of_plan", 0.89, "topic_bytes_share_of_plan is 0.890, expected 1"),
        ("parquet_bytes_share_of_plan", 1.2, "parquet_bytes_share_of_plan is 1.200, expected 1"),
    ],
)
def test_invalid_soaks_are_named_with_both_numbers(name: str, value: float, fault: str) -> None:
    (found,) = faults_of({**GOOD, name: value})
    assert found.startswith(fault)


def test_a_short_soak_is_not_judged_by_its_memory() -> None:
    short = {**GOOD, "num_windows": WINDOWS_UNTIL_WARM - 1.0, "learner_memory_growth": 3.0}
    assert faults_of(short) == []


def test_growth_is_that_of_the_peaks_after_the_first_quarter() -> None:
    memory = Memory()
    for step in range(101):
        share = step / 100
        warming = 900 if share < 0.2 else 0
        memory.shares.append(share)
        # Two teeth of a saw, whose floor rises at the end.
        memory.sizes.append(1000 + warming + 200 * (step % 2) + (60 if share > 0.9 else 0))
    assert memory.warm_bytes == 1200
    assert memory.growth == pytest.approx(0.05)
    assert Memory().growth == 0.0


def test_memory_of_a_process_is_read_and_one_that_has_ended_has_none() -> None:
    memory = Memory()
    memory.look(os.getpid(), 0.3)
    memory.look(2**22 + 1, 0.4)
    assert len(memory.sizes) == 1
    assert memory.sizes[0] > 10 * 2**20


def test_every_event_of_the_worker_is_a_new_one_and_in_order() -> None:
    events = list(stamped_events(Settings(), 2_000))
    assert sum(len(event.windows.start) for event in events) >= 2_000
    assert [event.sequence for event in events] == list(range(len(events)))
    assert len({event.event_id for event in events}) == len(events)
    assert len({event.stream for event in events}) <= NUM_STREAMS
