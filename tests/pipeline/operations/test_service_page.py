"""Liveness, readiness and metrics of the services that have a page of their own."""

from __future__ import annotations

import gc
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from learner.ports import EventSource
from learner.service import LearnerCounts, LearnerSettings, PolicyLearner
from pipeline.archive.archiver import Archiver
from pipeline.configuration.schedule_settings import ScheduleSettings
from pipeline.configuration.server_settings import MetricsSettings
from pipeline.configuration.settings import Settings, SettingsError
from pipeline.eventlog.embedded import EmbeddedEventLog
from pipeline.eventlog.kafka_membership import KafkaMembership
from pipeline.eventlog.ports import EventLogUnavailableError, Message
from pipeline.messaging.boards import LogEventSource, LogPolicyBoard
from pipeline.messaging.dead_letters import KINDS
from pipeline.messaging.outages import open_log_patiently, run_through_outages
from pipeline.operations.health import NotHealthyError, check_health
from pipeline.operations.loops import Loop, Loops
from pipeline.operations.service_page import ServicePage, answering
from pipeline.operations.service_watch import ArchiverMetrics, LearnerMetrics, WatchedSource
from pipeline.operations.services import open_page
from pipeline.schedule import Schedule, run_scheduler
from schemas.codec import encode
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.broker import free_port
from tests.learner.fakes import FakeEventLog, FakeEventSource
from tests.pipeline.archiving import Clock
from tests.pipeline.messages import broken, event, message, open_log
from tests.schemas.builders import PRODUCED_AT, make_event

STILL_SECONDS = 60.0
MOST_SECONDS = 180.0


@pytest.fixture
def page() -> ServicePage:
    return ServicePage(Loops(STILL_SECONDS))


def said(page: ServicePage, path: str) -> tuple[int, str]:
    status, _, body = page.answer(path)
    return status, body.decode().strip()


def values(page: ServicePage) -> dict[str, float]:
    """Return name{labels} to value, as Prometheus reads the page."""
    text = page.answer("/metrics")[2].decode()
    return {
        sample.name
        + "".join(f"{{{k}={v}}}" for k, v in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + MOST_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_loop_that_stands_still_is_unhealthy_by_name(page: ServicePage) -> None:
    """D10: a consumer that stops without an error."""
    clock = Clock()
    loop = Loop("learner", clock.monotonic)
    page.loops._loops.append(loop)
    assert said(page, "/healthz") == said(page, "/readyz") == (200, "ok")
    clock.seconds = STILL_SECONDS + 1
    assert said(page, "/healthz") == (503, "learner stands still for 61 s, at most 60")
    assert said(page, "/readyz")[0] == 503
    loop.move()
    assert said(page, "/healthz") == (200, "ok")


def test_one_that_waits_for_the_broker_is_alive_and_not_ready(page: ServicePage) -> None:
    stop, is_there = threading.Event(), threading.Event()
    turns: list[int] = []

    def run(should_stop: Callable[[], bool]) -> None:
        if not is_there.is_set():
            raise EventLogUnavailableError("Kafka at a:1: gone; start the broker")
        while not should_stop():
            turns.append(1)
            time.sleep(0.01)

    loop = page.loops.loop("learner")
    thread = threading.Thread(target=run_through_outages, args=("learner", run, stop, loop))
    thread.start()
    until(lambda: said(page, "/readyz")[0] == 503)
    assert said(page, "/readyz")[1].startswith("degraded: learner: Kafka at a:1: gone")
    assert said(page, "/healthz") == (200, "ok")
    assert values(page)["draftloop_degraded{loop=learner}"] == 1
    is_there.set()
    until(lambda: said(page, "/readyz") == (200, "ok"))
    assert values(page)["draftloop_outages_total{loop=learner}"] == loop.num_outages >= 1
    assert values(page)["draftloop_degraded{loop=learner}"] == 0
    stop.set()
    thread.join()
    assert turns


@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_a_service_that_finds_no_broker_at_its_start_says_so_on_its_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D1: and tries again."""
    # The client's log records would keep the sockets alive that it does not close.
    for name in ("kafka", "pipeline.messaging.outages"):
        caplog.set_level(logging.CRITICAL + 1, logger=name)
    settings = Settings.model_validate(
        {
            "data": tmp_path,
            "event_log": {"url": f"kafka://127.0.0.1:{free_port()}"},
            "kafka": {"timeout_seconds": 1.0},
            "metrics": {"learner_port": free_port()},
        }
    )
    stop = threading.Event()
    with open_page(settings, "learner") as page:
        loop = page.loops.loop("learner")
        thread = threading.Thread(target=open_log_patiently, args=(settings, stop, loop))
        thread.start()
        until(lambda: said(page, "/readyz")[0] == 503)
        assert check_health("learner", settings) == "learner is well", "a restart helps nobody"
        stop.set()
        thread.join()
    gc.collect()


def test_the_page_answers_over_http_and_knows_no_other_path(page: ServicePage) -> None:
    port = free_port()
    settings = Settings(metrics=MetricsSettings(archiver_port=port))
    page.loops.watch("archiver", lambda: 1.0)
    with answering(page, "127.0.0.1", port, "metrics.archiver_port"):
        assert check_health("archiver", settings) == "archiver is well"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert b"draftloop_seconds_since_last_poll" in answer.read()
        with pytest.raises(urllib.error.HTTPError, match="404") as missing:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/secrets")
        missing.value.close()
        page.loops.watch("archiver", lambda: 1000.0)
        with pytest.raises(NotHealthyError, match="503: archiver stands still for 1000 s"):
            check_health("archiver", settings)
        with (
            pytest.raises(SettingsError, match=rf"metrics\.archiver_port = {port}: cannot be list"),
            answering(page, "127.0.0.1", port, "metrics.archiver_port"),
        ):
            pass
    with pytest.raises(NotHealthyError, match="does not say"):
        check_health("archiver", settings)


def test_a_learner_in_the_middle_of_a_long_step_is_seen_to_stand(tmp_path: Path) -> None:
    log = open_log(tmp_path, num_partitions=1)
    log.append(VERIFICATION_EVENTS, [message(1)])
    entered, leave = threading.Event(), threading.Event()

    class Slow(LogPolicyBoard):
        def publish(self, policies: object) -> None:
            entered.set()
            leave.wait(MOST_SECONDS)

    loop, stop = Loop("learner"), threading.Event()
    learner = PolicyLearner(
        LogEventSource(log, [0]),
        Slow(log, source="test"),
        LearnerSettings(publish_every_events=1, poll_seconds=0.01),
        now=lambda: datetime.now(UTC),
    )
    thread = threading.Thread(target=learner.run, args=(loop.moving(stop.is_set),))
    thread.start()
    assert entered.wait(MOST_SECONDS), "kernels may have to be compiled first"
    before = loop.still_seconds
    until(lambda: loop.still_seconds > before + 0.05)
    leave.set()
    until(lambda: loop.still_seconds < 0.05)
    stop.set()
    thread.join()
    log.close()


def test_a_membership_whose_thread_has_died_is_seen_to_stand(
    page: ServicePage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D10: the thread that keeps the heartbeat."""

    class Died(BaseException):
        """Not an error that the thread bears."""

    def die(_: object) -> object:
        raise Died

    member = KafkaMembership(die, "topic", session_timeout_seconds=6.0)
    page.loops.watch("membership", lambda: member.still_seconds)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    member.start()
    member._thread.join()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + STILL_SECONDS + 5)
    assert said(page, "/healthz")[0] == 503
    assert "membership stands still" in said(page, "/healthz")[1]


def test_a_scheduler_that_misses_its_times_is_seen_to_stand(
    page: ServicePage, tmp_path: Path
) -> None:
    settings = Settings(data=tmp_path, schedule=ScheduleSettings(compact="40 * * * *"))
    stop = threading.Event()
    thread = threading.Thread(target=run_scheduler, args=(settings, stop, page))
    thread.start()
    until(lambda: "scheduler" in page.answer("/metrics")[2].decode())
    assert said(page, "/healthz") == (200, "ok")
    stop.set()
    thread.join()


def test_a_job_that_does_not_end_when_its_time_is_over_counts_as_standing() -> None:
    """D10, F4: of the scheduler."""
    began, leave, stop = threading.Event(), threading.Event(), threading.Event()

    def hang(_: Callable[[], bool]) -> None:
        began.set()
        leave.wait(30)

    schedule = Schedule(
        {"refresh": hang}, {"refresh": "30 2 * * *"}, misfire_seconds=60.0, max_job_seconds=0.01
    )
    thread = threading.Thread(target=schedule.run, args=(stop,))
    thread.start()
    until(lambda: schedule._scheduler.running)
    assert schedule.overdue_seconds == 0.0
    schedule._scheduler.modify_job("refresh", next_run_time=datetime.now(UTC))
    assert began.wait(30)
    until(lambda: schedule.overdue_seconds > 0.05)
    leave.set()
    until(lambda: schedule.overdue_seconds == 0.0)
    schedule._scheduler.pause()
    late = datetime.now(UTC) - timedelta(hours=1)
    schedule._scheduler.modify_job("refresh", next_run_time=late)
    assert schedule.overdue_seconds > 3000, "its thread is not looking"
    stop.set()
    thread.join()


def test_dead_letters_and_delays_are_counted_by_reason_and_lag_by_topic(
    tmp_path: Path, page: ServicePage
) -> None:
    log = open_log(tmp_path, num_partitions=2)
    whole = encode(event(7))
    log.append(
        VERIFICATION_EVENTS,
        [
            *[message(n) for n in (1, 2, 3, 3)],
            *[broken(value) for value in (None, b"\xff", whole[:-4], b"\x01" + whole[1:])],
            broken(b"\x00\x00\x00\xff\xff" + whole[5:]),
            Message(key=b"another", value=whole),
        ],
    )
    source = WatchedSource(
        LogEventSource(log, [0, 1]), lambda p: log.end_offset(VERIFICATION_EVENTS, p)
    )
    learner = PolicyLearner(
        source, LogPolicyBoard(log, source="t"), LearnerSettings(), now=lambda: datetime.now(UTC)
    )
    learner.resume()
    with page.showing(LearnerMetrics(source, learner.counts, is_shared=True)):
        for received in source.poll(0.0):
            learner.learn_one(received)
        found = values(page)
    assert found["draftloop_learner_events_learned_total"] == 3
    assert found["draftloop_learner_events_late_total"] == 1, "the duplicate"
    assert found["draftloop_learning_delay_events_sum_total"] == 0 + 1 + 2
    assert found["draftloop_learner_idle"] == 0
    assert found[f"draftloop_consumer_lag_messages{{topic={VERIFICATION_EVENTS}}}"] >= 0
    kinds = {k: v for k, v in found.items() if k.startswith("draftloop_dead_letters_total") and v}
    assert {k.split("=")[1].rstrip("}"): v for k, v in kinds.items()} == {
        **{"value": 2, "body": 1, "magic_byte": 1, "schema_id": 1, "key": 1}
    }
    assert "draftloop_learner_events_learned_total" not in values(page), "shown no longer"
    log.close()


def test_labels_are_few_whatever_messages_hold(tmp_path: Path, page: ServicePage) -> None:
    """I3: reasons name values, labels do not."""
    log = open_log(tmp_path, num_partitions=1)
    poison = [b"\x00" + (77_000 + n).to_bytes(4, "big") + b"x" for n in range(300)]
    log.append(VERIFICATION_EVENTS, [broken(value) for value in poison])
    source = WatchedSource(LogEventSource(log, [0]), lambda _: 300)
    source.poll(0.0)
    with page.showing(LearnerMetrics(source, LearnerCounts())):
        found = values(page)
    assert found["draftloop_dead_letters_total{reason=schema_id}"] == 300
    assert len([key for key in found if key.startswith("draftloop_dead_letters")]) == len(KINDS)
    assert not any("77" in key for key in found)
    log.close()


def test_clocks_that_step_leave_delays_finite_and_are_counted(page: ServicePage) -> None:
    """I4: an event from the future, and one from long ago."""
    steps = {1: timedelta(days=1), 2: timedelta(0), 3: timedelta(days=-365)}
    events = [make_event(sequence=n, produced_at=PRODUCED_AT + step) for n, step in steps.items()]
    source = FakeEventSource(FakeEventLog.of({0: events}), np.random.default_rng(0))
    watched = WatchedSource(source, lambda _: 3, now=lambda: PRODUCED_AT)
    while not source.is_drained:
        watched.poll(0.0)
    assert (watched.num_events, watched.num_skewed) == (3, 1)
    assert watched.delay_seconds_sum == timedelta(days=365).total_seconds()
    with page.showing(LearnerMetrics(watched, LearnerCounts())):
        assert all(np.isfinite(value) for value in values(page).values())


def test_an_idle_replica_says_that_it_has_no_partition(page: ServicePage) -> None:
    source = FakeEventSource(FakeEventLog.of({}), np.random.default_rng(0))
    watched = WatchedSource(cast(EventSource, source), lambda _: 0)
    with page.showing(LearnerMetrics(watched, LearnerCounts(), is_shared=True)):
        assert values(page)["draftloop_learner_idle"] == 1
        assert values(page)["draftloop_learner_partitions"] == 0


def test_an_archiver_shows_how_far_it_is_behind(
    log: EmbeddedEventLog, open_archiver: Callable[..., Archiver], page: ServicePage
) -> None:
    archiver = open_archiver()
    log.append(VERIFICATION_EVENTS, [message(n) for n in range(7)])
    archiver._look_if_due()
    with page.showing(ArchiverMetrics(archiver)):
        key = f"draftloop_consumer_lag_messages{{topic={VERIFICATION_EVENTS}}}"
        assert values(page)[key] == 7


def test_every_metric_has_one_name(page: ServicePage) -> None:
    source = FakeEventSource(FakeEventLog.of({}), np.random.default_rng(0))
    one = LearnerMetrics(WatchedSource(source, lambda _: 0), LearnerCounts())
    names = [family.name for family in [*one.collect(), *page.loops.collect()]]
    assert len(set(names)) == len(names)
