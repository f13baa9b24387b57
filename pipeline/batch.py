"""Serve a file of prompts with a worker: the smallest client, for trials and for tests."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

from rich.console import Console
from rich.progress import track

from inference.sampling import SamplingParams
from inference.worker import Request
from pipeline.prompts import read_prompts
from pipeline.settings import Settings
from pipeline.wiring import open_target, start_worker


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

    Args:
        settings: Of the worker.
        path: The prompts.
        stream: Stream of all requests; empty = each prompt's domain.
        max_tokens: Tokens per answer.
        temperature: 0 is greedy.
        stop: Ends the run after the present round.
        console: Where progress goes.
        out: Where the answers go.
    """
    prompts = read_prompts(path)
    target = open_target(settings, progress=console.log)
    running = start_worker(settings, target)
    consenting = settings.content.consenting_streams
    try:
        for prompt in track(prompts, "serving", console=console):
            key = stream or prompt.domain
            request = Request(
                request_id=uuid.uuid4().hex,
                stream=key,
                prompt_token_ids=target.encode(prompt.text),
                params=SamplingParams(max_tokens=max_tokens, temperature=temperature),
                has_consent=key in consenting,
            )
            completion = running.worker.serve(request, is_aborted=stop.is_set)
            out.print(completion.text, markup=False, highlight=False)
            if stop.is_set():
                break
    finally:
        unsent = running.close()
        if unsent:
            console.print(f"{unsent} events could not be sent")
