"""Record: serve prompts with a pool whose drafters are all scored, straight to a Parquet log.

The worker is the one that serves in production, so rounds and seconds are real ones; nothing is
dropped, and nothing learns from what is recorded. ``draftloop replay`` reads the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from inference.engine import EngineOptions, PromptTooLongError
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.sampling import SamplingParams
from inference.target import Target
from inference.worker import Completion, Request, Worker, WorkerOptions
from pipeline.archive.recording_log import RecordingExistsError, RecordingLog
from pipeline.bench.conversations import Conversation
from pipeline.json_files import write_json
from pipeline.locks import only_one
from schemas.events import FinishReason, PolicyPublished

FORECAST_AFTER = 5
"""Conversations after which it is said how long the rest will take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordingOptions:
    """How a recording is made.

    Attributes:
        out: Folder of the recording.
        sampling: Temperature and most tokens per answer; its seed seeds all requests.
        policy: Selection policy inside a request.
        engine: How to speculate; ``score_block`` >= 1.
        segment_tokens: Tokens after which a segment of a request is an event of its own.
        consenting_streams: Streams whose content is recorded too.
        resume: Go on with a recording of the same kind that was interrupted.
    """

    out: Path
    sampling: SamplingParams
    policy: str
    engine: EngineOptions
    segment_tokens: int = 64
    consenting_streams: frozenset[str] = frozenset()
    resume: bool = False


@dataclass(slots=True)
class Recorded:
    """What was recorded, in this run; ``seconds`` is wall time without loading the target."""

    num_conversations: int = 0
    num_requests: int = 0
    num_tokens: int = 0
    num_rounds: int = 0
    num_windows: int = 0
    num_already_there: int = 0
    is_interrupted: bool = False
    seconds: float = 0.0
    score_seconds: float = 0.0
    left_out: list[str] = field(default_factory=list)

    def add(self, completions: Sequence[Completion]) -> None:
        """Count one conversation."""
        rounds = [one for completion in completions for one in completion.rounds]
        self.num_conversations += 1
        self.num_requests += len(completions)
        self.num_tokens += sum(len(completion.token_ids) for completion in completions)
        self.num_rounds += len(rounds)
        self.num_windows += sum(one.num_scored_windows for one in rounds)
        self.score_seconds += sum(one.score_seconds for one in rounds)


def record(
    target: Target,
    drafters: Sequence[Drafter],
    conversations: Sequence[Conversation],
    options: RecordingOptions,
    *,
    stop: threading.Event,
    console: Console,
    json_file: Path | None = None,
) -> Recorded:
    """Serve all conversations in order and log every round and every scored window.

    When ``stop`` is set, the conversation at work is given up and leaves nothing; all before it
    are in the log. What does not fit the target's context is named and left out.

    Args:
        target: The verifying model.
        drafters: The pool; all are scored.
        conversations: What to serve.
        options: How.
        stop: Ends the run early.
        console: Where progress and the result go.
        json_file: Where to write the result.

    Raises:
        RecordingExistsError: If the folder holds a log and ``options.resume`` is False, or the
            log to go on with was made otherwise.
        LockError: If another recording goes to the same folder.
    """
    with only_one(options.out, "recording", cure="end it, or record to another folder"):
        log = RecordingLog(options.out, resume=options.resume)
        done = _finished_requests(log, drafters, options) if options.resume else set()
        worker = Worker(
            target, DrafterPool(drafters), _worker_options(options), sink=log, inbox=_EmptyInbox()
        )
        result = Recorded()
        began = time.perf_counter()
        try:
            _record(worker, conversations, options, log, done, result, stop, console)
        finally:
            log.close()
        result.seconds = time.perf_counter() - began
    _show(result, options.out, console)
    if json_file is not None:
        write_json(json_file, asdict(result))
    return result


def _record(
    worker: Worker,
    conversations: Sequence[Conversation],
    options: RecordingOptions,
    log: RecordingLog,
    done: set[str],
    result: Recorded,
    stop: threading.Event,
    console: Console,
) -> None:
    began = time.perf_counter()
    for number, conversation in enumerate(track(conversations, "recording", console=console)):
        last_request = conversation.request_id(len(conversation.turns) - 1)
        if last_request in done:
            result.num_already_there += 1
            continue
        try:
            completions = _serve(worker, conversation, number, options, stop)
        except PromptTooLongError as error:
            log.discard()
            result.left_out.append(conversation.conversation_id)
            console.print(f"{conversation.conversation_id} left out: {error}")
            continue
        if completions is None:
            log.discard()
            result.is_interrupted = True
            return
        log.commit()
        result.add(completions)
        if result.num_conversations == FORECAST_AFTER:
            share = _num_tokens(conversations[number + 1 :], options) / _num_tokens(
                conversations[result.num_already_there : number + 1], options
            )
            minutes = (time.perf_counter() - began) * share / 60.0
            console.print(f"at this pace about {minutes:.0f} more minutes")


def _num_tokens(conversations: Sequence[Conversation], options: RecordingOptions) -> int:
    """Return the most tokens that these can have."""
    default = options.sampling.max_tokens
    return sum(len(one.turns) * (one.max_tokens or default) for one in conversations)


def _serve(
    worker: Worker,
    conversation: Conversation,
    number: int,
    options: RecordingOptions,
    stop: threading.Event,
) -> list[Completion] | None:
    """Serve every turn with the ones before it in its prompt; None if told to stop."""
    texts: list[str] = []
    completions: list[Completion] = []
    for turn, text in enumerate(conversation.turns):
        if stop.is_set():
            return None
        texts.append(text)
        request = Request(
            request_id=conversation.request_id(turn),
            stream=conversation.stream,
            prompt_token_ids=worker.target.encode_conversation(texts),
            params=_params(conversation, number, turn, options.sampling),
            has_consent=conversation.stream in options.consenting_streams,
        )
        completion = worker.serve(request, is_aborted=stop.is_set)
        if completion.finish_reason is FinishReason.ABORTED:
            return None
        completions.append(completion)
        texts.append(completion.text)
    return completions


def _params(
    conversation: Conversation, number: int, turn: int, sampling: SamplingParams
) -> SamplingParams:
    """Seed each request by its place, so that a resumed recording draws what one run would."""
    entropy = np.random.SeedSequence([sampling.seed or 0, number, turn])
    return replace(
        sampling,
        max_tokens=conversation.max_tokens or sampling.max_tokens,
        seed=int(entropy.generate_state(1)[0]),
    )


def _worker_options(options: RecordingOptions) -> WorkerOptions:
    return WorkerOptions(
        worker_id="recording",
        # Replay takes events of one epoch and sequence for one: every run needs its own.
        worker_epoch=time.time_ns() // 1000,
        policy=options.policy,
        segment_tokens=options.segment_tokens,
        engine=options.engine,
    )


def _finished_requests(
    log: RecordingLog, drafters: Sequence[Drafter], options: RecordingOptions
) -> set[str]:
    """Return the requests of an earlier run, which must have been made in the same way."""
    rule = options.sampling.rule(draws_drafts=options.engine.draws_drafts)
    expected = (tuple(drafter.version for drafter in drafters), rule)
    finished = set()
    for event in log.recorded():
        if (event.drafters, event.sampling) != expected:
            raise RecordingExistsError(
                f"{options.out}: recorded with {len(event.drafters)} drafters, "
                f"{event.sampling.acceptance_rule} at temperature {event.sampling.temperature}, "
                f"now {len(drafters)} drafters, {rule.acceptance_rule} at {rule.temperature}, or "
                "other weights: record to another folder"
            )
        if event.is_final:
            finished.add(event.request_id)
    return finished


class _EmptyInbox:
    """Nothing ever arrives: a recording is made with the weights it began with."""

    def take_policies(self) -> Sequence[PolicyPublished]:
        """Return nothing."""
        return ()

    def take_drafters(self) -> Sequence[Drafter]:
        """Return nothing."""
        return ()


def _show(result: Recorded, out: Path, console: Console) -> None:
    if result.is_interrupted:
        console.print("interrupted; what is complete can be read, --resume goes on")
    if result.num_already_there:
        console.print(f"{result.num_already_there} conversations were there already")
    console.print(
        f"recorded {result.num_requests} requests ({result.num_conversations} conversations): "
        f"{result.num_tokens:,} tokens, {result.num_rounds:,} rounds, "
        f"{result.num_windows:,} windows, {result.seconds:.0f} s, of which "
        f"{result.score_seconds:.0f} s scoring, to {out}",
        soft_wrap=True,
    )
