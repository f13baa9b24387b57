"""Requests take turns fairly, disturb nobody, and leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import cast

import pytest

from inference.drafters.nothing import NothingDrafter
from inference.recording import Round
from inference.sampling import SamplingParams
from inference.scheduler import NotServingError, Progress, QueueFullError, Scheduler, Ticket
from inference.worker import Completion, Request, Worker
from schemas.events import FinishReason
from tests.inference import fakes
from tests.inference.http import wait_until
from tests.inference.segments import check_segments, drafters_of
from tests.inference.serving import Outbox, new_worker, request_of
from tests.inference.tiny import plain_greedy, random_prompts, tiny_llama

GREEDY = SamplingParams(max_tokens=24)


class Told:
    """Keeps the progress of one request."""

    def __init__(self, order: list[str], name: str) -> None:
        self._order, self._name = order, name
        self.progress: list[Progress] = []

    def __call__(self, progress: Progress) -> None:
        self.progress.append(progress)
        self._order.append(self._name)

    @property
    def is_over(self) -> bool:
        last = self.progress[-1] if self.progress else Progress()
        return last.completion is not None or last.error is not None

    @property
    def token_ids(self) -> list[int]:
        return [token for one in self.progress for token in one.token_ids]


@contextmanager
def started(worker: Worker, *, max_running: int = 8, max_waiting: int = 100) -> Iterator[Scheduler]:
    scheduler = Scheduler(worker, max_running=max_running, max_waiting=max_waiting)
    yield scheduler
    assert scheduler.close(60.0)


def held(scheduler: Scheduler) -> Callable[[], None]:
    """Start a scheduler and keep it between two rounds until the returned function is called."""
    scheduler.start()
    reached, go = Event(), Event()

    def hold(_: Worker) -> None:
        reached.set()
        go.wait(60.0)

    scheduler.order(hold)
    assert reached.wait(60.0)
    return go.set


@pytest.mark.parametrize("count", [1, 2, 8])
def test_requests_at_once_write_what_each_writes_alone_in_equal_turns(count: int) -> None:
    target, outbox = tiny_llama(1), Outbox()
    prompts = random_prompts(4, count=count, length=12)
    order: list[str] = []
    told = [Told(order, str(index)) for index in range(count)]
    with started(new_worker(target, drafters_of(target), outbox)) as scheduler:
        go = held(scheduler)
        for index, prompt in enumerate(prompts):
            request = request_of(prompt, GREEDY, request_id=str(index))
            scheduler.submit(request, told[index])
        go()
        wait_until(lambda: all(one.is_over for one in told))
    assert [one.token_ids for one in told] == plain_greedy(target, prompts, 24)
    # The first token of the last comes after one round of every other: its fair share.
    assert order[:count] == [str(index) for index in range(count)]
    for index in range(count):
        own = [event for event in outbox.events if event.request_id == str(index)]
        # Of one request alone, the worker's sequence has gaps where the others reported.
        check_segments([replace(event, sequence=place) for place, event in enumerate(own)])
    assert [event.sequence for event in outbox.events] == list(range(len(outbox.events)))


def test_a_newcomer_waits_one_round_of_every_other() -> None:
    target = tiny_llama(1)
    order: list[str] = []
    with started(new_worker(target, [NothingDrafter()], Outbox())) as scheduler:
        first, second = Told(order, "first"), Told(order, "second")

        def bring(progress: Progress) -> None:
            first(progress)
            if len(first.progress) == 5:
                scheduler.submit(request_of([4, 5], GREEDY), second)

        scheduler.start()
        scheduler.submit(request_of([1, 2], GREEDY), bring)
        wait_until(lambda: first.is_over and second.is_over)
    assert order[5:9] in (["second", "first"] * 2, ["first", "second"] * 2)


class Watched(deque[Ticket]):
    """Counts how often something leaves: between two rounds nothing may, even for a moment."""

    num_removed = 0

    def popleft(self) -> Ticket:
        """Count, too."""
        self.num_removed += 1
        return super().popleft()


def test_a_request_at_work_is_never_counted_as_gone() -> None:
    told, watched = Told([], "it"), Watched()
    with started(new_worker(tiny_llama(1), [NothingDrafter()], Outbox())) as scheduler:
        scheduler._running = watched
        scheduler.start()
        scheduler.submit(request_of([1, 2], GREEDY), told)
        wait_until(lambda: told.is_over and scheduler.num_running == 0)
    assert len(told.progress) == 24
    assert watched.num_removed == 1


def test_an_aborted_request_stops_within_one_round_and_says_so() -> None:
    target, outbox = tiny_llama(1, context_length=4096), Outbox()
    told = Told([], "it")
    with started(new_worker(target, [NothingDrafter()], outbox)) as scheduler:
        go = held(scheduler)

        def leave_after_two(progress: Progress) -> None:
            told(progress)
            if len(told.progress) == 2:
                ticket.abort()

        endless = SamplingParams(max_tokens=4000)
        ticket = scheduler.submit(request_of([1, 2, 3], endless), leave_after_two)
        go()
        # Reported first, counted as gone then: to wait for the event alone would be too early.
        wait_until(lambda: bool(told.progress) and scheduler.num_running == 0)
    assert outbox.events[-1].finish_reason is FinishReason.ABORTED
    assert len(told.token_ids) == 2
    assert sum(event.num_positions for event in outbox.events) == len(told.token_ids)


def test_the_queue_is_bounded_and_aborted_requests_make_room() -> None:
    worker = new_worker(tiny_llama(1), [NothingDrafter()], Outbox())
    with started(worker, max_running=1, max_waiting=2) as scheduler:
        go = held(scheduler)
        told = [Told([], str(index)) for index in range(5)]
        tickets = [scheduler.submit(request_of([1, 2], GREEDY), told[i]) for i in range(3)]
        with pytest.raises(QueueFullError, match="3 requests wait"):
            scheduler.submit(request_of([1, 2], GREEDY), told[3])
        tickets[1].abort()
        scheduler.submit(request_of([1, 2], GREEDY), told[4])
        go()
        wait_until(lambda: told[0].is_over and told[2].is_over and told[4].is_over)
    assert told[1].progress == []
    assert scheduler.num_refused == 1


def test_one_that_fails_is_told_and_the_others_go_on() -> None:
    target, outbox = tiny_llama(1, context_length=32), Outbox()
    good, bad = Told([], "good"), Told([], "bad")
    with started(new_worker(target, [NothingDrafter()], outbox)) as scheduler:
        go = held(scheduler)
        scheduler.submit(request_of([1] * 40, GREEDY), bad)
        scheduler.submit(request_of([1] * 4, GREEDY), good)
        go()
        wait_until(lambda: good.is_over and bad.is_over)
    assert bad.progress[-1].error is not None
    assert len(good.token_ids) == 24
    assert scheduler.num_failed == 1


def test_a_drafter_that_raises_costs_the_client_nothing() -> None:
    """H7."""
    target = tiny_llama(1)
    broken = fakes.raising(RuntimeError("at the third draft"), after=2)
    told = Told([], "it")
    with started(new_worker(target, [broken], Outbox(), policy="hedge")) as scheduler:
        scheduler.start()
        scheduler.submit(request_of([1, 2, 3], GREEDY), told)
        wait_until(lambda: told.is_over)
    assert told.token_ids == plain_greedy(target, [[1, 2, 3]], 24)[0]


def test_a_drained_scheduler_finishes_what_it_has_and_takes_nothing() -> None:
    worker = new_worker(tiny_llama(1), [NothingDrafter()], Outbox())
    told = Told([], "it")
    with started(worker) as scheduler:
        go = held(scheduler)
        scheduler.submit(request_of([1, 2], GREEDY), told)
        scheduler.drain()
        with pytest.raises(NotServingError):
            scheduler.submit(request_of([1, 2], GREEDY), told)
        go()
        wait_until(lambda: told.is_over)
        scheduler.drain(is_draining=False)
        assert scheduler.is_ready
    assert told.progress[-1].completion is not None


def test_closing_ends_what_is_at_work_and_tells_its_client() -> None:
    target, outbox = tiny_llama(1, context_length=4096), Outbox()
    told = [Told([], "one"), Told([], "two")]
    with started(new_worker(target, [NothingDrafter()], outbox), max_running=1) as scheduler:
        scheduler.start()
        for one in told:
            scheduler.submit(request_of([1, 2], SamplingParams(max_tokens=4000)), one)
        wait_until(lambda: bool(told[0].progress))
    assert all(isinstance(one.progress[-1].error, NotServingError) for one in told)
    assert outbox.events[-1].finish_reason is FinishReason.ABORTED


class InstantWorker:
    """Serves every request in one round without a model, to count what is left behind."""

    def begin(self, request: Request, *, on_logits: object = None) -> InstantWorker:
        """Begin nothing."""
        return self

    is_finished = True
    output_token_ids: Sequence[int] = (1,)
    completion = Completion(
        request_id="it",
        token_ids=(1,),
        text="a",
        finish_reason=FinishReason.LENGTH,
        rounds=(),
        seconds=0.0,
    )

    def step(self) -> Round:
        """Emit one token."""
        return Round(
            first_position=1,
            drafter_index=-1,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            num_emitted_tokens=1,
            num_scored_windows=0,
            selection_probability=1.0,
            draft_seconds=0.0,
            verify_seconds=0.0,
            score_seconds=0.0,
        )

    def close(self) -> None:
        """Report nothing."""


def test_ten_thousand_short_requests_leave_no_record() -> None:
    """H2."""
    finished: list[Completion] = []
    scheduler = Scheduler(
        cast(Worker, InstantWorker()),
        max_running=8,
        max_waiting=10_000,
        on_finished=finished.append,
    )
    go = held(scheduler)
    for _ in range(10_000):
        ticket = scheduler.submit(request_of([1], GREEDY), lambda _: None)
    last = weakref.ref(ticket)
    del ticket
    go()
    wait_until(lambda: len(finished) == 10_000)
    assert scheduler.close(60.0)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
    gc.collect()
    assert last() is None


def test_orders_run_between_rounds_and_report_what_they_raise() -> None:
    worker = new_worker(tiny_llama(1), [NothingDrafter()], Outbox())
    with started(worker) as scheduler:
        scheduler.start()
        scheduler.order(lambda one: one.change_policy("hedge")).result(60.0)
        assert worker.policy == "hedge"
        with pytest.raises(ValueError, match="nonsense"):
            scheduler.order(lambda one: one.change_policy("nonsense")).result(60.0)
        assert scheduler.is_ready
