"""The scheduler: several requests take turns, one round each, in the one thread of the target.

A new request plays its first round, which reads its prompt, after at most one round of every
other. What comes out goes to a listener; the thread waits for nobody.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from inference.recording import Round
from inference.worker import Completion, Request, RequestAtWork, Worker

logger = logging.getLogger(__name__)


class QueueFullError(Exception):
    """As many requests wait as may; the client should come again later."""


class NotServingError(Exception):
    """The scheduler drains or has ended; no request is taken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What one round of a request gave.

    Attributes:
        token_ids: Newly emitted tokens.
        logits: The target's, at the emitted positions, (emitted, V), if they were asked for.
        completion: The whole, with the last round.
        error: What ended the request, if that was a failure; nothing follows it.
    """

    token_ids: tuple[int, ...] = ()
    logits: torch.Tensor | None = None
    completion: Completion | None = None
    error: Exception | None = None


Listener = Callable[[Progress], None]
"""Told of every round, in the scheduler's thread; must return at once and not raise."""


class Ticket:
    """A request in the hands of the scheduler.

    Args:
        request: What is to be served.
        listener: Told of every round.
        wants_logits: Whether progress carries logits.
    """

    def __init__(self, request: Request, listener: Listener, *, wants_logits: bool) -> None:
        self.request = request
        self.listener = listener
        self.is_aborted = False
        self.work: RequestAtWork | None = None
        self._wants_logits = wants_logits
        self._logits: torch.Tensor | None = None

    def abort(self) -> None:
        """Stop the work within one round; no progress follows."""
        self.is_aborted = True

    def begin(self, worker: Worker) -> None:
        """Begin the work; ``work`` is set from then on."""
        self.work = worker.begin(
            self.request, on_logits=self._take_logits if self._wants_logits else None
        )

    def progress(self, played: Round, work: RequestAtWork) -> Progress:
        """Return what a round gave."""
        emitted = work.output_token_ids[-played.num_emitted_tokens :]
        return Progress(
            token_ids=tuple(emitted if played.num_emitted_tokens else ()),
            logits=self._logits,
            completion=work.completion if work.is_finished else None,
        )

    def _take_logits(self, logits: torch.Tensor) -> None:
        self._logits = logits


class Scheduler:
    """Plays requests in turn.

    Args:
        worker: Plays the rounds; used by the scheduler's thread alone.
        max_running: Most requests that take turns, >= 1.
        max_waiting: Most requests that wait for a turn, >= 0.
        on_finished: Told every completion, in the scheduler's thread.

    Attributes:
        num_refused: Requests that found the queue full.
        num_failed: Requests that a failure ended.
    """

    def __init__(
        self,
        worker: Worker,
        *,
        max_running: int,
        max_waiting: int,
        on_finished: Callable[[Completion], None] = lambda _: None,
    ) -> None:
        self._worker = worker
        self._max_running = max_running
        self._max_waiting = max_waiting
        self._on_finished = on_finished
        self._changed = threading.Condition()
        self._waiting: deque[Ticket] = deque()
        self._running: deque[Ticket] = deque()
        self._orders: deque[tuple[Callable[[Worker], None], Future[None]]] = deque()
        self._is_closed = False
        self._is_draining = False
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)
        self.num_refused = 0
        self.num_failed = 0

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a turn."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that take turns."""
        return len(self._running)

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken."""
        return self._thread.is_alive() and not (self._is_draining or self._is_closed)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: Request, listener: Listener, *, wants_logits: bool = False) -> Ticket:
        """Queue a request; returns at once.

        Raises:
            QueueFullError: If ``max_waiting`` requests wait already.
            NotServingError: If the scheduler drains or has ended.
        """
        ticket = Ticket(request, listener, wants_logits=wants_logits)
        with self._changed:
            if not self.is_ready:
                raise NotServingError("the server is shutting down or drained: try another one")
            if len(self._waiting) >= self._max_waiting + self._num_free():
                self._waiting = deque(one for one in self._waiting if not one.is_aborted)
            if len(self._waiting) >= self._max_waiting + self._num_free():
                self.num_refused += 1
                raise QueueFullError(
                    f"{len(self._waiting)} requests wait, the most allowed: try again later"
                )
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def order(self, act: Callable[[Worker], None]) -> Future[None]:
        """Have something done to the worker between two rounds; the future has what it raises."""
        done: Future[None] = Future()
        with self._changed:
            if self._is_closed:
                raise NotServingError("the server is shutting down")
            self._orders.append((act, done))
            self._changed.notify_all()
        return done

    def drain(self, *, is_draining: bool = True) -> None:
        """Take no more requests and finish those that were taken; or take them again."""
        with self._changed:
            self._is_draining = is_draining

    def close(self, timeout_seconds: float) -> bool:
        """Abort what is at work after its round and end the thread; return whether it ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _num_free(self) -> int:
        return max(self._max_running - len(self._running), 0)

    def _run(self) -> None:
        while self._admit():
            if self._running:
                self._take_turn()
        for ticket in [*self._running, *self._waiting]:
            ticket.is_aborted = True
            ticket.listener(Progress(error=NotServingError("the server has shut down")))
        while self._running:
            self._take_turn()
        self._waiting.clear()
        for _, done in self._orders:
            done.set_exception(NotServingError("the server has shut down"))

    def _admit(self) -> bool:
        """Wait until there is work, let in what may run; False once closed."""
        with self._changed:
            while not (self._is_closed or self._running or self._waiting or self._orders):
                self._changed.wait()
            if self._is_closed:
                return False
            orders, self._orders = self._orders, deque()
            while self._waiting and len(self._running) < self._max_running:
                self._running.append(self._waiting.popleft())
        for act, done in orders:
            try:
                act(self._worker)
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(None)
        return True

    def _take_turn(self) -> None:
        """Let the next request play one round, or end it."""
        ticket = self._running[0]
        is_over = True
        try:
            is_over = self._play(ticket)
        except Exception as error:
            self._fail(ticket, error)
        finally:
            with self._changed:
                # In one step: whoever counts meanwhile must not find one too few.
                if is_over:
                    self._running.popleft()
                else:
                    self._running.rotate(-1)

    def _play(self, ticket: Ticket) -> bool:
        """Play one round; return whether the request is over."""
        if ticket.is_aborted:
            if ticket.work is not None:
                ticket.work.abort()
                ticket.work.close()
            return True
        if ticket.work is None:
            ticket.begin(self._worker)
        assert ticket.work is not None
        progress = ticket.progress(ticket.work.step(), ticket.work)
        if progress.completion is not None:
            # Told first, reported then: the client does not wait for the event.
            ticket.listener(progress)
            ticket.work.close()
            self._on_finished(progress.completion)
            return True
        ticket.listener(progress)
        return False

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        """End one request; the others go on."""
        self.num_failed += 1
        logger.error("request %s failed: %s", ticket.request.request_id, type(error).__name__)
        if ticket.work is not None:
            ticket.work.fail()
            try:
                ticket.work.close()
            except Exception as second:
                logger.error("its event is lost: %s", type(second).__name__)
        ticket.listener(Progress(error=error))
