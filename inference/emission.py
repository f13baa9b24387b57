"""Emission: events leave the serving path through a bounded queue and one sender thread.

``emit`` never waits for the broker, the disk or the network. When the queue is full, the oldest
event goes and is counted; what serving has produced last is worth most to a learner.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from schemas.events import VerificationEvent

Send = Callable[[Sequence[VerificationEvent]], None]
"""Hands events over and returns once they are safe; raises if they may not be."""

Prepare = Callable[[Sequence[VerificationEvent]], Sequence[VerificationEvent]]
"""Completes events before they are sent, for example by writing the features they refer to."""

FIRST_BACK_OFF_SECONDS = 0.05
LONGEST_BACK_OFF_SECONDS = 5.0

logger = logging.getLogger(__name__)


class Emitter:
    """Sends events in batches from a thread of its own, oldest dropped first.

    The thread starts with the first ``emit``, so an emitter may be built before a process forks;
    a child starts with an empty queue and its own thread, and the parent sends what it had.

    A batch whose ``send`` raises is sent again after a back-off that doubles up to five seconds.
    It may therefore arrive twice; the idempotence key of the events makes that harmless.

    Args:
        send: Called in the sender thread alone, with 1..``max_batch`` events, oldest first.
        capacity: Most events waiting, >= 1; the batch being sent does not count.
        prepare: Called once per batch in the sender thread, before the first ``send``.
        max_batch: Most events per ``send``, >= 1.

    Attributes:
        num_emitted: Calls to ``emit``.
        num_sent: Events that ``send`` accepted, or that ``prepare`` took out of their batch.
        num_dropped: Events dropped because the queue was full or the emitter closed.
        num_send_errors: Raised by ``send`` or ``prepare``, one per attempt.
    """

    def __init__(
        self,
        send: Send,
        *,
        capacity: int,
        prepare: Prepare | None = None,
        max_batch: int = 500,
    ) -> None:
        for name, value in (("capacity", capacity), ("max_batch", max_batch)):
            if value < 1:
                raise ValueError(f"{name}={value} outside 1..")
        self._send = send
        self._prepare = prepare
        self._capacity = capacity
        self._max_batch = max_batch
        self._start_over()

    def _notice_fork(self) -> None:
        """In a child, forget what the parent queued; its locks and threads are not here."""
        if self._process_id != os.getpid():
            self._start_over()

    def _start_over(self) -> None:
        self.num_emitted = 0
        self.num_sent = 0
        self.num_dropped = 0
        self.num_send_errors = 0
        self._process_id = os.getpid()
        self._waiting: deque[VerificationEvent] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._num_in_flight = 0
        self._deadline: float | None = None

    def emit(self, event: VerificationEvent) -> None:
        """Queue one event; returns at once, whatever the sender is doing."""
        self._notice_fork()
        with self._changed:
            self.num_emitted += 1
            if self._deadline is not None:
                self.num_dropped += 1
                return
            if len(self._waiting) == self._capacity:
                self._waiting.popleft()
                self.num_dropped += 1
            self._waiting.append(event)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def close(self, timeout_seconds: float) -> int:
        """Send what is queued, for at most ``timeout_seconds``; later events are dropped.

        A signal handler should only set a flag; closing belongs to the code that sees it.

        Returns:
            Number of events left unsent; those of a ``send`` still under way count as unsent,
            though they may yet arrive.
        """
        self._notice_fork()
        with self._changed:
            self._deadline = time.monotonic() + timeout_seconds
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_seconds)
        with self._changed:
            unsent = len(self._waiting) + self._num_in_flight
        if unsent:
            logger.warning("closed with %d events unsent", unsent)
        return unsent

    def _run(self) -> None:
        while batch := self._next_batch():
            self._deliver(batch)

    def _next_batch(self) -> list[VerificationEvent]:
        """Wait for events and take them; an empty batch ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._deadline is not None)
            if self._is_late():
                return []
            size = min(len(self._waiting), self._max_batch)
            self._num_in_flight = size
            return [self._waiting.popleft() for _ in range(size)]

    def _deliver(self, batch: Sequence[VerificationEvent]) -> None:
        """Prepare once, then send until it succeeds or time is up."""
        prepared: Sequence[VerificationEvent] | None = None
        back_off_seconds = FIRST_BACK_OFF_SECONDS
        while True:
            try:
                if prepared is None:
                    prepared = self._prepare(batch) if self._prepare else batch
                if prepared:
                    self._send(prepared)
            except Exception as error:
                self._count_error(error, len(batch), back_off_seconds)
            else:
                with self._changed:
                    self.num_sent += self._num_in_flight
                    self._num_in_flight = 0
                return
            if not self._wait_to_retry(back_off_seconds):
                return
            back_off_seconds = min(2 * back_off_seconds, LONGEST_BACK_OFF_SECONDS)

    def _count_error(self, error: Exception, num_events: int, back_off_seconds: float) -> None:
        with self._changed:
            self.num_send_errors += 1
            is_closing = self._deadline is not None
        # While closing, it is tried many times a second, and ``close`` tells what was left.
        logger.log(
            logging.DEBUG if is_closing else logging.WARNING,
            "%d events not sent (%s: %s), trying again in %.2f s",
            num_events,
            type(error).__name__,
            error,
            back_off_seconds,
        )

    def _wait_to_retry(self, back_off_seconds: float) -> bool:
        """Sleep, cut short when closing begins; False once the deadline has passed."""
        with self._changed:
            if self._deadline is None:
                self._changed.wait_for(lambda: self._deadline is not None, back_off_seconds)
            elif not self._is_late():
                self._changed.wait(min(back_off_seconds, FIRST_BACK_OFF_SECONDS))
            return not self._is_late()

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline
