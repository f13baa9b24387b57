"""Serve a file of prompts with a worker: the smallest client, for trials and for tests."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import track

from inference.engine import PromptTooLongError
from inference.sampling import SamplingParams
from inference.worker import Request
from pipeline.configuration.settings import Settings
from pipeline.locks import only_one
from pipeline.messaging.event_logs import open_log
from pipeline.prompts import Prompt, read_prompts
from pipeline.wiring import RunningWorker, open_target, start_worker
from schemas import checks
from schemas.errors import KnownError


class UnsentEventsError(KnownError):
    """Answers were written, but what they taught did not reach the event log."""


def serve_prompts(
    settings: Settings,
    path: Path,
    *,
    stream: str,
    max_tokens: int,
    temperature: float,
    stop: threading.Event,
    console: Console,
    out: Console,
) -> None:
    """Serve every prompt of a file in order, until ``stop`` is set.

    A prompt that does not fit the target's context is named and left out.

    Args:
        settings: Of the worker.
        path: The prompts.
        stream: Stream of all requests; empty = each prompt's domain.
        max_tokens: Tokens per answer.
        temperature: 0 is greedy.
        stop: Ends the run after the present round.
        console: Where progress goes.
        out: Where the answers go.

    Raises:
        LockError: If another worker of this name is at work on the data folder.
        UnsentEventsError: If events could not be sent; every answer has been written.
    """
    prompts = read_prompts(path)
    if stream:
        checks.identifier("--stream", stream)
    # A log that cannot be written is told before the model costs its time, and not by every event.
    open_log(settings).close()
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    # Events of two workers of one name look like repetitions, and are learned from by half.
    worker_id = settings.worker.worker_id
    with only_one(settings.data, f"worker {worker_id}", cure="set another worker.worker_id"):
        _serve(settings, prompts, stream, params, stop, console, out)


def _serve(
    settings: Settings,
    prompts: Sequence[Prompt],
    stream: str,
    params: SamplingParams,
    stop: threading.Event,
    console: Console,
    out: Console,
) -> None:
    with console.status("loading the target"):
        target = open_target(settings, progress=console.log)
        running = start_worker(settings, target)
    try:
        for number, prompt in enumerate(track(prompts, "serving", console=console), start=1):
            if stop.is_set():
                break
            request = _request(settings, running, prompt, stream or prompt.domain, params)
            try:
                completion = running.worker.serve(request, is_aborted=stop.is_set)
            except PromptTooLongError as error:
                console.print(f"prompt {number} of {len(prompts)} left out: {error}")
            else:
                out.print(completion.text, markup=False, highlight=False, soft_wrap=True)
    finally:
        num_unsent = running.close()
    if num_unsent:
        raise UnsentEventsError(
            f"{num_unsent} events could not be sent to the event log: the answers are complete, "
            "but nothing will be learned from those events; see the warnings above"
        )


def _request(
    settings: Settings, running: RunningWorker, prompt: Prompt, stream: str, params: SamplingParams
) -> Request:
    return Request(
        request_id=uuid.uuid4().hex,
        stream=stream,
        prompt_token_ids=running.worker.target.encode(prompt.text),
        params=params,
        has_consent=stream in settings.content.consenting_streams,
    )
