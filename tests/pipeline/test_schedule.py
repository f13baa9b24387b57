"""Jobs by the clock: late ones run, overlapping ones do not, and all end when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pipeline.configuration.settings import Settings, SettingsError, load_settings
from pipeline.schedule import Schedule, ScheduleError, cron_trigger, run_scheduler
from tests.integration.tiny_run import wait_until

DAILY = "30 2 * * *"


def schedule(job: Callable[[Callable[[], bool]], None], *, seconds: float = 60.0) -> Schedule:
    return Schedule(
        {"refresh": job}, {"refresh": DAILY}, misfire_seconds=60.0, max_job_seconds=seconds
    )


def run_now(running: Schedule) -> None:
    """Make the job due at once, as its time would."""
    running._scheduler.modify_job("refresh", next_run_time=datetime.now(UTC))


@pytest.mark.parametrize("text", ["", "every day", "61 * * * *", "* * * *", "0 0 * * * *"])
def test_invalid_cron_texts_are_refused_with_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match="expected five fields such as '30 3"):
        cron_trigger(text)


def test_invalid_schedules_are_named_with_key_and_value(tmp_path: Path) -> None:
    (tmp_path / "draftloop.toml").write_text('[schedule]\nrefresh = "at noon"\n')
    with pytest.raises(SettingsError, match=r"schedule\.refresh = 'at noon': .*five fields"):
        load_settings(tmp_path / "draftloop.toml")


@pytest.mark.parametrize("day", ["2026-03-29", "2026-10-25"])
def test_the_hours_of_a_clock_change_come_once_each(day: str) -> None:
    """F5, F6."""
    trigger = cron_trigger("0 * * * *")
    now = datetime.fromisoformat(f"{day}T00:00:00+00:00")
    fires = []
    for _ in range(5):
        now = trigger.get_next_fire_time(now, now.replace(second=1))
        fires.append(now)
    assert [one.hour for one in fires] == [1, 2, 3, 4, 5]


def test_a_job_that_fails_is_counted_and_runs_again() -> None:
    def fail(_: Callable[[], bool]) -> None:
        raise OSError("disk full")

    running, stop = schedule(fail), threading.Event()
    thread = threading.Thread(target=running.run, args=(stop,))
    thread.start()
    for count in (1, 2):
        wait_until(lambda: running._scheduler.running)
        run_now(running)
        wait_until(lambda count=count: running.counts["refresh", "failed"] == count)  # type: ignore[misc]
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()


def test_a_job_still_running_is_not_started_again_and_ends_when_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """F4, F7."""
    begun, is_over = threading.Event(), threading.Event()

    def work(must_end: Callable[[], bool]) -> None:
        begun.set()
        wait_until(must_end)
        is_over.set()

    running, stop = schedule(work), threading.Event()
    thread = threading.Thread(target=running.run, args=(stop,))
    thread.start()
    wait_until(lambda: running._scheduler.running)
    run_now(running)
    assert begun.wait(10.0)
    run_now(running)
    wait_until(lambda: running.counts["refresh", "skipped"] == 1)
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()
    assert is_over.is_set()


def test_a_job_out_of_time_is_asked_to_end() -> None:
    running = schedule(lambda must_end: None, seconds=0.01)
    asked: list[bool] = []

    def work(must_end: Callable[[], bool]) -> None:
        wait_until(must_end)
        asked.append(must_end())

    running.run_job("refresh", work)
    assert asked == [True]


def test_without_any_schedule_there_is_nothing_to_run(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"set one of schedule\.refresh, schedule\.compact"):
        run_scheduler(Settings(data=tmp_path), threading.Event())
