from __future__ import annotations

import itertools
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference import emission
from inference.emission import Emitter
from schemas.events import VerificationEvent
from tests.schemas.builders import make_event

EVENT = make_event(num_windows=1)

# The child only emits, closes and exits, so the locks of other threads do not matter to it.
fork_with_threads = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def event(sequence: int) -> VerificationEvent:
    return replace(EVENT, sequence=sequence)


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        time.sleep(0.001)


class FakeLog:
    """Receives events; can be blocked, or fail a number of times."""

    def __init__(self, *, failures: int = 0) -> None:
        self.failures = failures
        self.batches: list[list[int]] = []
        self.is_open = threading.Event()
        self.is_open.set()
        self.is_entered = threading.Event()

    def send(self, events: Sequence[VerificationEvent]) -> None:
        self.is_entered.set()
        self.is_open.wait()
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("no broker")
        self.batches.append([event.sequence for event in events])

    @property
    def sequences(self) -> list[int]:
        return [sequence for batch in self.batches for sequence in batch]


def blocked_log() -> FakeLog:
    log = FakeLog()
    log.is_open.clear()
    return log


def test_everything_emitted_arrives_in_order_and_close_leaves_nothing() -> None:
    log = FakeLog()
    emitter = Emitter(log.send, capacity=2000)
    for sequence in range(1000):
        emitter.emit(event(sequence))
    assert emitter.close(10.0) == 0
    assert log.sequences == list(range(1000))
    assert (emitter.num_emitted, emitter.num_sent, emitter.num_dropped) == (1000, 1000, 0)


def test_emit_never_waits_while_send_blocks() -> None:
    """The log opens only when all has been emitted; whoever waited for it would wait for ever."""
    log = blocked_log()
    emitter = Emitter(log.send, capacity=50)
    emitter.emit(event(0))
    assert log.is_entered.wait(60)
    for sequence in range(1, 2000):
        emitter.emit(event(sequence))
    assert log.batches == []
    assert emitter.num_dropped == 1999 - 50
    log.is_open.set()
    emitter.close(10.0)


def test_the_oldest_events_are_dropped_and_counted() -> None:
    log = blocked_log()
    emitter = Emitter(log.send, capacity=3)
    emitter.emit(event(0))
    assert log.is_entered.wait(60)
    for sequence in range(1, 9):
        emitter.emit(event(sequence))
    log.is_open.set()
    assert emitter.close(10.0) == 0
    assert log.sequences == [0, 6, 7, 8]
    assert (emitter.num_emitted, emitter.num_sent, emitter.num_dropped) == (9, 4, 5)


def test_what_waits_is_sent_in_batches_of_at_most_max_batch() -> None:
    log = blocked_log()
    emitter = Emitter(log.send, capacity=100, max_batch=10)
    emitter.emit(event(0))
    assert log.is_entered.wait(60)
    for sequence in range(1, 26):
        emitter.emit(event(sequence))
    log.is_open.set()
    emitter.close(10.0)
    assert [len(batch) for batch in log.batches] == [1, 10, 10, 5]


def test_a_failing_send_is_repeated_with_the_same_events_until_it_succeeds() -> None:
    log = FakeLog(failures=3)
    emitter = Emitter(log.send, capacity=10)
    emitter.emit(event(0))
    wait_until(lambda: emitter.num_sent == 1)
    assert log.sequences == [0]
    assert emitter.num_send_errors == 3
    assert emitter.close(1.0) == 0


def test_the_pause_between_attempts_doubles_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emission, "FIRST_BACK_OFF_SECONDS", 0.01)
    monkeypatch.setattr(emission, "LONGEST_BACK_OFF_SECONDS", 0.04)
    times: list[float] = []

    def send(events: Sequence[VerificationEvent]) -> None:
        times.append(time.monotonic())
        if len(times) < 6:
            raise ConnectionError

    emitter = Emitter(send, capacity=10)
    emitter.emit(event(0))
    wait_until(lambda: emitter.num_sent == 1)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    for pause, least in zip(pauses, [0.01, 0.02, 0.04, 0.04, 0.04], strict=True):
        assert pause >= least * 0.9


def test_emit_goes_on_while_send_fails_and_the_newest_events_survive() -> None:
    log = FakeLog(failures=1_000_000)
    emitter = Emitter(log.send, capacity=5)
    emitter.emit(event(0))
    wait_until(lambda: emitter.num_send_errors > 0)
    for sequence in range(1, 20):
        emitter.emit(event(sequence))
    log.failures = 0
    assert emitter.close(10.0) == 0
    assert log.sequences == [0, 15, 16, 17, 18, 19]


def test_close_returns_in_time_and_counts_what_a_dead_log_leaves_unsent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FakeLog(failures=1_000_000)
    emitter = Emitter(log.send, capacity=100)
    for sequence in range(20):
        emitter.emit(event(sequence))
    with caplog.at_level(logging.WARNING):
        assert emitter.close(0.2) == 20
    assert "20 events unsent" in caplog.text
    assert emitter.num_sent == 0


def test_close_does_not_wait_out_a_long_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emission, "FIRST_BACK_OFF_SECONDS", 60.0)
    log = FakeLog(failures=1)
    emitter = Emitter(log.send, capacity=10)
    emitter.emit(event(0))
    wait_until(lambda: emitter.num_send_errors == 1)
    # Had it waited, all of its time would have passed before the event left.
    assert emitter.close(20.0) == 0
    assert log.sequences == [0]


def test_close_gives_up_on_a_blocked_send_and_counts_its_batch() -> None:
    log = blocked_log()
    emitter = Emitter(log.send, capacity=10)
    for sequence in range(4):
        emitter.emit(event(sequence))
    assert log.is_entered.wait(60)
    assert emitter.close(0.1) == 4
    log.is_open.set()


def test_events_after_close_are_dropped_and_counted() -> None:
    log = FakeLog()
    emitter = Emitter(log.send, capacity=10)
    assert emitter.close(1.0) == 0
    emitter.emit(event(0))
    assert (emitter.num_emitted, emitter.num_dropped, log.sequences) == (1, 1, [])
    assert emitter.close(1.0) == 0


def test_events_are_prepared_once_in_the_sender_thread_before_the_first_attempt() -> None:
    log = FakeLog(failures=2)
    calls: list[tuple[str, int]] = []

    def prepare(events: Sequence[VerificationEvent]) -> Sequence[VerificationEvent]:
        calls.append((threading.current_thread().name, len(events)))
        return [replace(event, sequence=event.sequence + 100) for event in events]

    emitter = Emitter(log.send, capacity=10, prepare=prepare)
    emitter.emit(event(1))
    assert emitter.close(10.0) == 0
    assert calls == [("emitter", 1)]
    assert log.sequences == [101]


def test_an_event_is_never_sent_unprepared() -> None:
    log = FakeLog()
    attempts: list[int] = []

    def prepare(events: Sequence[VerificationEvent]) -> Sequence[VerificationEvent]:
        attempts.append(len(events))
        if len(attempts) < 3:
            raise RuntimeError("disk")
        return events

    emitter = Emitter(log.send, capacity=10, prepare=prepare)
    emitter.emit(event(0))
    wait_until(lambda: emitter.num_sent == 1)
    assert (attempts, emitter.num_send_errors, log.sequences) == ([1, 1, 1], 2, [0])


def test_no_thread_runs_before_the_first_emit() -> None:
    before = set(threading.enumerate())
    emitter = Emitter(FakeLog().send, capacity=1)
    assert set(threading.enumerate()) <= before
    emitter.emit(event(0))
    (started,) = set(threading.enumerate()) - before
    emitter.close(10.0)
    started.join(60)
    assert not started.is_alive()


@fork_with_threads
def test_an_emitter_built_and_used_before_a_fork_sends_in_both_processes() -> None:
    log = FakeLog()
    emitter = Emitter(log.send, capacity=10)
    emitter.emit(event(0))
    wait_until(lambda: emitter.num_sent == 1)
    child = os.fork()
    if child == 0:
        log.batches.clear()
        emitter.emit(event(7))
        unsent = emitter.close(10.0)
        os._exit(0 if (unsent, log.sequences, emitter.num_emitted) == (0, [7], 1) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    emitter.emit(event(1))
    assert emitter.close(10.0) == 0
    assert log.sequences == [0, 1]


@fork_with_threads
def test_a_child_does_not_wait_for_or_send_what_its_parent_has_queued() -> None:
    log = blocked_log()
    emitter = Emitter(log.send, capacity=10)
    for sequence in range(3):
        emitter.emit(event(sequence))
    assert log.is_entered.wait(60)
    child = os.fork()
    if child == 0:
        before = time.monotonic()
        unsent = emitter.close(200.0)
        # Far above what a busy machine needs, far below what waiting for the parent would take.
        os._exit(0 if unsent == 0 and time.monotonic() - before < 60.0 else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    log.is_open.set()
    assert emitter.close(10.0) == 0
    assert log.sequences == [0, 1, 2]


def test_a_process_that_closes_on_sigterm_loses_nothing() -> None:
    program = """
        import os, signal, sys, threading
        from inference.emission import Emitter
        from tests.schemas.builders import make_event

        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        sent = []
        emitter = Emitter(lambda events: sent.extend(events), capacity=10_000)
        event = make_event(num_windows=1)
        for _ in range(1000):
            emitter.emit(event)
        os.kill(os.getpid(), signal.SIGTERM)
        stop.wait(10)
        unsent = emitter.close(10.0)
        print(unsent, len(sent))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == ["0", "1000"]


def test_many_threads_may_emit_at_once() -> None:
    log = FakeLog()
    emitter = Emitter(log.send, capacity=10_000)

    def emit_some(first: int) -> None:
        for sequence in range(first, first + 200):
            emitter.emit(event(sequence))

    threads = [threading.Thread(target=emit_some, args=(1000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert emitter.close(10.0) == 0
    assert len(set(log.sequences)) == len(log.sequences) == 1600
    for first in range(0, 8000, 1000):
        own = [sequence for sequence in log.sequences if first <= sequence < first + 200]
        assert own == sorted(own)


@settings(max_examples=30, deadline=None)
@given(
    num_events=st.integers(0, 60),
    capacity=st.integers(1, 20),
    max_batch=st.integers(1, 10),
    fails=st.lists(st.booleans(), max_size=4),
)
def test_every_event_is_sent_or_dropped_or_unsent_and_order_holds(
    num_events: int, capacity: int, max_batch: int, fails: list[bool]
) -> None:
    outcomes = iter(fails)
    sent: list[int] = []

    def send(events: Sequence[VerificationEvent]) -> None:
        if next(outcomes, False):
            raise ConnectionError
        sent.extend(event.sequence for event in events)

    emitter = Emitter(send, capacity=capacity, max_batch=max_batch)
    for sequence in range(num_events):
        emitter.emit(event(sequence))
    unsent = emitter.close(10.0)
    assert unsent == 0
    assert emitter.num_emitted == num_events
    assert emitter.num_sent + emitter.num_dropped == num_events
    assert emitter.num_sent == len(sent)
    assert sent == sorted(set(sent))
    assert sent[-1:] == ([num_events - 1] if num_events else [])


@pytest.mark.parametrize(("capacity", "max_batch"), [(0, 1), (1, 0), (-1, 1)])
def test_invalid_sizes_are_refused(capacity: int, max_batch: int) -> None:
    with pytest.raises(ValueError, match=r"outside 1\.\."):
        Emitter(FakeLog().send, capacity=capacity, max_batch=max_batch)
