"""The worker: serves requests with the target and its drafters and reports what it saw.

Serving never waits for the log, the learner or a disk: events go to a sink that returns at once,
new policies and new weights are taken from an inbox that somebody else fills.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from inference.arm_streams import StreamArms
from inference.engine import EngineOptions, RequestRun
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.recording import RequestFacts, Round, SegmentRecorder
from inference.sampling import SamplingParams
from inference.selection import Begun, DrafterSelection, Selection
from inference.target import Target
from learner.selection import DEFAULT_POLICY, parse_policy
from schemas.events import FeatureReference, FinishReason, PolicyPublished, VerificationEvent


class EventSink(Protocol):
    """Takes events and returns at once."""

    def emit(self, event: VerificationEvent) -> None:
        """Queue the event; the oldest is dropped if there is no room."""


class HiddenStateRecorder(Protocol):
    """Takes hidden states and returns at once."""

    def record(self, hidden: torch.Tensor) -> FeatureReference | None:
        """Return where the rows (P, H) will be found, or None if they cannot be kept."""


class Inbox(Protocol):
    """What has arrived from the learner since the last look; both calls return at once."""

    def take_policies(self) -> Sequence[PolicyPublished]:
        """Return the newest policy of every stream that has a new one."""

    def take_drafters(self) -> Sequence[Drafter]:
        """Return drafters, loaded and checked, that are to replace those of the same id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOptions:
    """How a worker serves.

    Attributes:
        worker_id, worker_epoch: Who it is; the epoch is never used twice by one id.
        policy: Selection policy, as ``learner.selection.parse_policy`` reads it.
        segment_tokens: Tokens after which a segment is reported and new weights are taken up.
        num_kept_tokens: C, tokens of the target's distribution recorded per position.
        engine: How it speculates.
        seed: Seeds requests that bring no seed.
    """

    worker_id: str
    worker_epoch: int
    policy: str = DEFAULT_POLICY
    segment_tokens: int = 64
    num_kept_tokens: int = 8
    engine: EngineOptions = field(default_factory=EngineOptions)
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One request; ``has_consent`` allows its content to be recorded."""

    request_id: str
    stream: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    has_consent: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What a request gave.

    Attributes:
        token_ids: Emitted tokens.
        text: Their text, cut before a stop string.
        finish_reason: Why it ended.
        rounds: Every verification, the prompt's own first.
        seconds: Wall time.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    rounds: tuple[Round, ...]
    seconds: float


def selection_of(options: WorkerOptions) -> Selection:
    """Return the selection that a worker's policy asks for.

    Raises:
        ValueError: If the policy is unknown, or counts seconds where nothing is drafted or scored.
    """
    spec, engine = parse_policy(options.policy), options.engine
    if spec.objective == "tokens":
        key = f"{options.worker_id}/{options.worker_epoch}"
        return DrafterSelection(spec, engine.num_speculative_tokens, key)
    if min(engine.num_speculative_tokens, engine.score_block) < 1:
        raise ValueError(
            f"policy {options.policy!r}: num_speculative_tokens={engine.num_speculative_tokens}, "
            f"score_block={engine.score_block}, expected at least 1 of both: arms are learned from "
            "scored drafts"
        )
    return StreamArms(spec, engine.num_speculative_tokens)


class Worker:
    """Serves requests, one at a time or with rounds that take turns, all in one thread.

    Args:
        target: The verifying model.
        pool: The drafters.
        options: How to serve.
        sink: Where events go.
        inbox: Where new policies and weights come from.
        recorder: Where hidden states of consenting streams go; None records none.

    Attributes:
        emission_seconds: Time that recording and emitting have cost the serving thread.
    """

    def __init__(
        self,
        target: Target,
        pool: DrafterPool,
        options: WorkerOptions,
        *,
        sink: EventSink,
        inbox: Inbox,
        recorder: HiddenStateRecorder | None = None,
    ) -> None:
        self.target = target
        self.pool = pool
        self._options = options
        self._sink = sink
        self._inbox = inbox
        self._recorder = recorder
        self._selection = selection_of(options)
        self._sequence = 0
        self.emission_seconds = 0.0
        self._seeds = np.random.SeedSequence(options.seed)

    def serve(
        self,
        request: Request,
        *,
        is_aborted: Callable[[], bool] = lambda: False,
        on_round: Callable[[Round], None] = lambda _: None,
    ) -> Completion:
        """Serve one request to its end.

        Args:
            request: What to serve.
            is_aborted: Asked after every round; True ends the request.
            on_round: Told every round as it ends.

        Raises:
            PromptTooLongError: If the prompt does not fit the target's context.
        """
        work = self.begin(request)
        try:
            while not work.is_finished:
                on_round(work.step())
                if is_aborted():
                    work.abort()
        except Exception:
            work.fail()
            raise
        finally:
            work.close()
        return work.completion

    def begin(
        self, request: Request, *, on_logits: Callable[[torch.Tensor], None] | None = None
    ) -> RequestAtWork:
        """Begin a request, to be played round by round; several may take turns.

        Args:
            request: What to serve.
            on_logits: Told every round's logits at the emitted positions, (emitted, V).

        Raises:
            PromptTooLongError: If the prompt does not fit the target's context.
        """
        began = time.perf_counter()
        self.look_into_inbox()
        run, recorder, begun = self._start(request, on_logits)
        return RequestAtWork(self, request, run, recorder, begun, began)

    def change_policy(self, policy: str) -> None:
        """Select by another policy from the next request on.

        Raises:
            ValueError: If it is unknown, or cannot be used as this worker speculates.
        """
        options = replace(self._options, policy=policy)
        self._selection = selection_of(options)
        self._options = options

    @property
    def policy(self) -> str:
        """The selection policy in force."""
        return self._options.policy

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens of a draft."""
        return self._options.engine.num_speculative_tokens

    def _start(
        self, request: Request, on_logits: Callable[[torch.Tensor], None] | None
    ) -> tuple[RequestRun, SegmentRecorder, Begun]:
        options, engine = self._options, self._options.engine
        ids = [version.drafter_id for version in self.pool.versions]
        begun = self._selection.begin(request.stream, ids, request.prompt_token_ids)
        run = RequestRun(
            self.target,
            self.pool.of_request(request.request_id),
            request.prompt_token_ids,
            request.params,
            engine,
            begun.selector,
            stream=request.stream,
            seed=self._seed(request.params),
        )
        facts = RequestFacts(
            worker_id=options.worker_id,
            worker_epoch=options.worker_epoch,
            stream=request.stream,
            request_id=request.request_id,
            target_id=self.target.target_id,
            target_fingerprint=self.target.fingerprint,
            tokenizer_hash=self.target.tokenizer_hash,
            policy_name=str(parse_policy(options.policy)),
            policy_version=begun.policy_version,
            prior_probabilities=begun.prior,
            policy_table=begun.table,
            policy_numbers=begun.numbers,
            sampling=request.params.rule(draws_drafts=engine.draws_drafts),
            num_speculative_tokens=engine.num_speculative_tokens,
            has_content=request.has_consent,
            num_kept_tokens=min(options.num_kept_tokens, self.target.vocab_size),
        )
        return run, SegmentRecorder(facts, run.trajectory, on_logits=on_logits), begun

    def _seed(self, params: SamplingParams) -> np.random.SeedSequence:
        if params.seed is not None:
            return np.random.SeedSequence(params.seed)
        return self._seeds.spawn(1)[0]

    def report(self, run: RequestRun, recorder: SegmentRecorder) -> None:
        """Close the segment and emit its event."""
        event, hidden = recorder.cut(
            run.drafters.versions, run.finish_reason, sequence=self._sequence
        )
        self._selection.emitted(event)
        self._sequence += 1
        began = time.perf_counter()
        if hidden is not None and self._recorder is not None and event.content is not None:
            features = self._recorder.record(hidden)
            event = replace(event, content=replace(event.content, features=features))
        self._sink.emit(event)
        self.emission_seconds += time.perf_counter() - began

    def is_full(self, recorder: SegmentRecorder) -> bool:
        """Whether a segment is long enough to be reported."""
        return recorder.num_positions >= self._options.segment_tokens

    def take_up_versions(self, run: RequestRun) -> None:
        """Let a running request use new weights from here on."""
        self.look_into_inbox()
        if run.drafters.renew():
            run.scorer.skip_incomplete()

    def look_into_inbox(self) -> None:
        """Take what the learner has sent."""
        for policy in self._inbox.take_policies():
            self._selection.update(policy)
        for drafter in self._inbox.take_drafters():
            self.pool.replace(drafter)


class RequestAtWork:
    """A request that a worker plays round by round and reports.

    Args:
        worker: Whose it is.
        request: What is served.
        run: Its rounds.
        recorder: Its events.
        begun: What selection started it from.
        began: When it began, by the performance counter.

    Attributes:
        rounds: Every verification so far, the prompt's own first.
    """

    def __init__(
        self,
        worker: Worker,
        request: Request,
        run: RequestRun,
        recorder: SegmentRecorder,
        begun: Begun,
        began: float,
    ) -> None:
        self._worker = worker
        self._request = request
        self._run = run
        self._recorder = recorder
        self._begun = begun
        self._began = began
        self._is_closed = False
        self.rounds: list[Round] = []

    @property
    def is_finished(self) -> bool:
        """Whether no round is left to play."""
        return self._run.finish_reason is not FinishReason.UNFINISHED

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens emitted so far."""
        return self._run.output_token_ids

    def step(self) -> Round:
        """Play one round; a segment that is full is reported before it."""
        if self._worker.is_full(self._recorder):
            self._worker.report(self._run, self._recorder)
            self._worker.take_up_versions(self._run)
        self.rounds.append(self._run.step(self._recorder))
        return self.rounds[-1]

    def abort(self) -> None:
        """End where it is, if it has not ended by itself: nobody waits for the rest."""
        if not self.is_finished:
            self._run.end(FinishReason.ABORTED)

    def fail(self) -> None:
        """End where it is: a round has raised."""
        self._run.end(FinishReason.ERROR)

    def close(self) -> None:
        """Report what has not been reported; call once the request has ended, in any way."""
        if self._is_closed:
            return
        self._is_closed = True
        self._worker.report(self._run, self._recorder)
        self._begun.hand_back([version.drafter_id for version in self._run.drafters.versions])
        self._worker.emission_seconds += self._recorder.seconds

    @property
    def completion(self) -> Completion:
        """What the request gave."""
        return Completion(
            request_id=self._request.request_id,
            token_ids=tuple(self._run.output_token_ids),
            text=self._run.text,
            finish_reason=self._run.finish_reason,
            rounds=tuple(self.rounds),
            seconds=time.perf_counter() - self._began,
        )
