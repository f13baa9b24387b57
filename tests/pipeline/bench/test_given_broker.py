"""A broker that the user names is used, and left as it was found."""

from __future__ import annotations

import io
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from pipeline.bench.given_broker import GivenBroker, emptied_broker
from pipeline.bench.group import OPTIONS
from pipeline.bench.scaling import ScalingBench, run_scaling_bench
from pipeline.cli import app
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.kafka_clients import KafkaClients
from pipeline.local_broker import BenchError, LocalBroker, local_broker
from pipeline.messaging.topics import TopicPlan, create_topics


def topics_of(servers: str) -> list[str]:
    with closing(KafkaClients([servers], OPTIONS).admin()) as admin:
        return [str(name) for name in admin.list_topics()]


@pytest.mark.external_service
def test_what_a_benchmark_made_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    with local_broker(tmp_path) as servers:
        with closing(KafkaClients([servers], OPTIONS).admin()) as admin:
            admin.create_topics({"theirs": {"num_partitions": 1, "replication_factor": 1}})
        bench = ScalingBench(
            num_learners=2, num_partitions=2, num_events=64, num_windows=2, repetitions=1
        )
        console = Console(file=io.StringIO())
        result = run_scaling_bench(bench, json_file=None, console=console, servers=servers)
        assert result["states_equal"]
        assert [name for name in topics_of(servers) if not name.startswith("__")] == ["theirs"]


@pytest.mark.external_service
def test_invalid_broker_that_holds_topics_of_ours_is_refused_and_keeps_them(
    tmp_path: Path,
) -> None:
    with local_broker(tmp_path) as servers:
        with closing(KafkaEventLog([servers], OPTIONS)) as log:
            create_topics(log, TopicPlan(num_partitions=1))
        before = topics_of(servers)
        with (
            pytest.raises(BenchError, match=r"holds draftloop\.dead-letters, "),
            emptied_broker(servers, OPTIONS),
        ):
            pass
        assert topics_of(servers) == before


@pytest.mark.external_service
def test_a_broker_is_stopped_and_started_by_commands_and_left_running(tmp_path: Path) -> None:
    own = LocalBroker(tmp_path)
    own.start()
    try:
        asleep, awake = (f"kill -{name} {own.process_id}" for name in ("STOP", "CONT"))
        given = GivenBroker(own.servers, asleep, f"{awake}; echo >> {tmp_path / 'starts'}")
        given.stop()
        assert not (tmp_path / "starts").exists()
        given.close()
        given.close()
        assert (tmp_path / "starts").read_text() == "\n"
        assert all(name.startswith("__") for name in topics_of(own.servers))
    finally:
        own.stop()


def test_invalid_command_is_refused_with_its_status_and_words() -> None:
    given = GivenBroker("127.0.0.1:1", "echo no such unit >&2; exit 5", "true")
    with pytest.raises(BenchError, match=r"ended with status 5: no such unit"):
        given.stop()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kafka", "h:9092"],
        ["--kafka", "h:9092", "--stop-command", "x"],
        ["--stop-command", "x", "--start-command", "y"],
    ],
)
def test_invalid_half_of_the_options_of_a_given_broker_is_refused(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "outage", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "--kafka, --stop-command and --start-command go together" in result.output
