"""The record command: a prompts file, the target and the pool of the settings."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console

from inference.engine import EngineOptions
from inference.model_files import resolve_target
from inference.ports import Drafter
from inference.sampling import SamplingParams
from inference.target import Target
from pipeline.archive.recording_log import refuse_existing
from pipeline.bench.conversations import read_conversations
from pipeline.configuration.settings import Settings
from pipeline.messaging.event_logs import open_log
from pipeline.messaging.inbox import LogInbox
from pipeline.recording import Recorded, RecordingOptions, record
from pipeline.releases.drafters import pool_drafters
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import DrafterRegistry
from pipeline.wiring import open_target


def record_prompts(
    settings: Settings,
    prompts: Path,
    out: Path,
    *,
    max_tokens: int,
    temperature: float,
    resume: bool,
    stop: threading.Event,
    console: Console,
    json_file: Path | None = None,
) -> Recorded:
    """Record a prompts file with the worker that the settings describe.

    Args:
        settings: Of the target, the pool and the worker.
        prompts: As ``read_conversations`` reads them.
        out: Folder of the recording.
        max_tokens: Tokens per answer, where the file says nothing else.
        temperature: 0 is greedy.
        resume: Go on with what is in ``out``.
        stop: Ends the run early.
        console: Where progress and the result go.
        json_file: Where to write the result.

    Raises:
        PromptsError: If the file cannot be used.
        RecordingExistsError: If ``out`` holds a log, or one that was made otherwise.
    """
    conversations = read_conversations(prompts)
    if not resume:  # told before the model costs its time
        refuse_existing(out)
    worker = settings.worker
    options = RecordingOptions(
        out=out,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature),
        policy=worker.policy,
        engine=EngineOptions(
            num_speculative_tokens=worker.num_speculative_tokens, score_block=worker.score_block
        ),
        segment_tokens=worker.segment_tokens,
        consenting_streams=frozenset(settings.content.consenting_streams),
        resume=resume,
    )
    with console.status("loading the target"):
        target = open_target(settings, progress=console.log)
        drafters = _drafters(settings, target, console)
    return record(
        target, drafters, conversations, options, stop=stop, console=console, json_file=json_file
    )


def _drafters(settings: Settings, target: Target, console: Console) -> list[Drafter]:
    """Build the pool with the weights released last; a head without any proposes nothing."""
    drafters = pool_drafters(
        settings.drafters,
        target,
        resolve=lambda path: resolve_target(path, settings.cache),
        dtype=target.dtype,
    )
    heads = [one.drafter_id for one in settings.drafters if one.is_trained]
    released = _released(settings, target, heads) if heads else {}
    for drafter_id in heads:
        if drafter_id not in released:
            console.print(f"{drafter_id} was never released: it is recorded as proposing nothing")
    return [released.get(one.version.drafter_id, one) for one in drafters]


def _released(settings: Settings, target: Target, heads: list[str]) -> dict[str, Drafter]:
    if not settings.event_log.url and not settings.data.exists():
        return {}  # nothing was ever released, and a recording leaves no data folder behind
    inbox = LogInbox(
        lambda: open_log(settings),
        HeadLoader(target, DrafterRegistry(str(settings.data))),
        heads,
        poll_seconds=settings.worker.poll_seconds,
    )
    inbox.start()
    inbox.close()
    return {drafter.version.drafter_id: drafter for drafter in inbox.take_drafters()}
