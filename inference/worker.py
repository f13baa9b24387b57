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
    """Serves one request at a time.

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
        began = time.perf_counter()
        self._look_into_inbox()
        run, recorder, begun = self._start(request)
        try:
            rounds = self._play(run, recorder, request.stream, is_aborted, on_round)
        except Exception:
            run.end(FinishReason.ERROR)
            raise
        finally:
            self._report(run, recorder, request.stream)
            ids = [version.drafter_id for version in run.drafters.versions]
            begun.hand_back(ids)
            self.emission_seconds += recorder.seconds
        return Completion(
            request_id=request.request_id,
            token_ids=tuple(run.output_token_ids),
            text=run.text,
            finish_reason=run.finish_reason,
            rounds=tuple(rounds),
            seconds=time.perf_counter() - began,
        )

    def _play(
        self,
        run: RequestRun,
        recorder: SegmentRecorder,
        stream: str,
        is_aborted: Callable[[], bool],
        on_round: Callable[[Round], None],
    ) -> list[Round]:
        """Play the rounds of a request, and report and renew between its segments."""
        rounds: list[Round] = []
        while run.finish_reason is FinishReason.UNFINISHED:
            rounds.append(run.step(recorder))
            on_round(rounds[-1])
            if run.finish_reason is not FinishReason.UNFINISHED:
                break
            if is_aborted():
                run.end(FinishReason.ABORTED)
            elif recorder.num_positions >= self._options.segment_tokens:
                self._report(run, recorder, stream)
                self._take_up_versions(run)
        return rounds

    def _start(self, request: Request) -> tuple[RequestRun, SegmentRecorder, Begun]:
        options, engine = self._options, self._options.engine
        ids = [version.drafter_id for version in self.pool.versions]
        begun = self._selection.begin(request.stream, ids)
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
        return run, SegmentRecorder(facts, run.trajectory), begun

    def _seed(self, params: SamplingParams) -> np.random.SeedSequence:
        if params.seed is not None:
            return np.random.SeedSequence(params.seed)
        return self._seeds.spawn(1)[0]

    def _report(self, run: RequestRun, recorder: SegmentRecorder, stream: str) -> None:
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

    def _take_up_versions(self, run: RequestRun) -> None:
        """Let a running request use new weights from here on."""
        self._look_into_inbox()
        if run.drafters.renew():
            run.scorer.skip_incomplete()

    def _look_into_inbox(self) -> None:
        for policy in self._inbox.take_policies():
            self._selection.update(policy)
        for drafter in self._inbox.take_drafters():
            self.pool.replace(drafter)
