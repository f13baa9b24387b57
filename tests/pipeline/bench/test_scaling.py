"""The scaling benchmark, in small: every key is there, and what a group learned is compared."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from kafka.partitioner.default import murmur2
from rich.console import Console

from learner.service import LearnerSettings, PolicyLearner
from pipeline.bench.scaling import (
    EPOCH,
    ScalingBench,
    backlog_messages,
    balanced_streams,
    refuse_other_states,
    run_scaling_bench,
)
from pipeline.local_broker import BenchError
from pipeline.messaging.boards import LogEventSource, LogPolicyBoard
from schemas.topics import VERIFICATION_EVENTS
from tests.pipeline.messages import open_log

KEYS = {
    "one_learner_events_per_second",
    "two_learners_events_per_second",
    "two_learners_vs_one",
    "two_learners_vs_one_low",
    "two_learners_vs_one_high",
    "num_states_compared",
    "one_learner_learner_cores",
    "two_learners_broker_cores",
}


def test_every_partition_gets_as_many_streams() -> None:
    streams = balanced_streams(6)
    places = [(murmur2(stream.encode()) & 0x7FFFFFFF) % 6 for stream in streams]
    assert len(set(streams)) == len(streams)
    assert places == [0, 1, 2, 3, 4, 5] * (len(streams) // 6)


def test_invalid_states_of_a_group_are_refused_with_the_stream(tmp_path: Path) -> None:
    bench = ScalingBench(num_events=8, num_windows=2)
    log = open_log(tmp_path, num_partitions=1)
    log.append(VERIFICATION_EVENTS, backlog_messages(balanced_streams(1), bench))
    board = LogPolicyBoard(log, source="test")
    source = LogEventSource(log, [0])
    learner = PolicyLearner(source, board, LearnerSettings(learner_id="bench"), now=lambda: EPOCH)
    learner.resume()
    for received in source.poll(1.0):
        learner.learn_one(received)
    learner.publish()
    assert refuse_other_states(log) == 4
    wrong = board.read_all()[0]
    board.publish([replace(wrong, version=wrong.version + 1)])
    with pytest.raises(BenchError, match=rf"stream {wrong.stream}: message\.version: "):
        refuse_other_states(log)
    log.close()


@pytest.mark.external_service
def test_a_small_run_compares_two_groups_and_writes_every_key(tmp_path: Path) -> None:
    bench = ScalingBench(
        num_learners=2, num_partitions=2, num_events=80, num_windows=2, repetitions=1
    )
    console = Console(file=io.StringIO())
    results = run_scaling_bench(bench, json_file=tmp_path / "out.json", console=console)
    assert json.loads((tmp_path / "out.json").read_text()) == results
    assert results.keys() >= KEYS
    assert results["states_equal"] is True
    assert results["num_states_compared"] == 16
