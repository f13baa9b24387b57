"""A vLLM of arrays: rows that move, requests that end, prompts in chunks; verification is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from inference.ports import Drafter
from inference.vllm_plugin.ports import (
    Connection,
    PluginOptions,
    PoolMember,
    RequestFacts,
    StepFacts,
    TargetFacts,
)
from schemas.events import (
    AcceptanceRule,
    DrafterVersion,
    PolicyPublished,
    SamplingRule,
    VerificationEvent,
)

GREEDY = SamplingRule(acceptance_rule=AcceptanceRule.GREEDY, temperature=0.0)
END = 99
HIDDEN_SIZE = 32

NextToken = Callable[[Sequence[int]], int]
"""The target: what follows these tokens."""


def member(drafter_id: str, kind: str) -> PoolMember:
    """Return a drafter of the pool as it stands before any release."""
    return PoolMember(version=DrafterVersion(drafter_id=drafter_id, weights_version=0), kind=kind)


LOOKUPS = (member("none", "none"), member("lookup", "prompt_lookup"), member("suffix", "suffix"))


@dataclass
class Kept:
    """Takes events, releases and counts, as sink, inbox, recorder and counters at once."""

    events: list[VerificationEvent] = field(default_factory=list)
    waiting: list[Drafter] = field(default_factory=list)
    policies: list[PolicyPublished] = field(default_factory=list)
    counts: dict[tuple[str, str], float] = field(default_factory=dict)
    fails_to_emit: bool = False

    def emit(self, event: VerificationEvent) -> None:
        """Keep the event, or fail."""
        if self.fails_to_emit:
            raise OSError("the disk is full")
        self.events.append(event)

    def take_policies(self) -> Sequence[PolicyPublished]:
        """Bring what waits."""
        taken, self.policies = self.policies, []
        return taken

    def take_drafters(self) -> Sequence[Drafter]:
        """Bring what waits."""
        taken, self.waiting = self.waiting, []
        return taken

    def count(self, name: str, value: float = 1.0, *, drafter: str = "") -> None:
        """Add up."""
        self.counts[name, drafter] = self.counts.get((name, drafter), 0.0) + value

    def of_request(self, request_id: str) -> list[VerificationEvent]:
        """Return the events of a request, in order."""
        found = [event for event in self.events if event.request_id == request_id]
        return sorted(found, key=lambda event: event.segment_index)


def connection(kept: Kept, pool: Sequence[PoolMember] = LOOKUPS, **options: Any) -> Connection:
    """Return a connection to ``kept``."""
    plain = PluginOptions(worker_id="worker-0", worker_epoch=1, pool=tuple(pool))
    return Connection(
        options=replace(plain, **options),
        target=TargetFacts(
            target_id="target",
            fingerprint="f",
            tokenizer_hash="t",
            vocab_size=100,
            eos_token_ids=frozenset({END}),
        ),
        sink=kept,
        inbox=kept,
        recorder=None,
        counters=kept,
        close=lambda: None,
    )


@dataclass
class FakeRequest:
    """One request of the fake engine."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    facts: RequestFacts = field(default_factory=lambda: RequestFacts(sampling=GREEDY))
    written: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    unread: int = 0

    @property
    def output(self) -> list[int]:
        """Tokens written so far."""
        return self.tokens[self.num_prompt_tokens :]


class FakeEngine:
    """Runs requests through a proposer's step, verifying every draft exactly as vLLM does.

    Args:
        step: The proposer's.
        next_token: The target.
        num_rows: Most requests at a time.
        tells: Whether the runner's facts are handed over.
        chunk: Prompt tokens that a step reads of a request.
        max_positions: Length of the context.
        state_of: The target's state behind some tokens, (H,); None = all zero.
    """

    def __init__(
        self,
        step: Callable[..., list[list[int]]],
        next_token: NextToken,
        *,
        num_rows: int = 4,
        tells: bool = True,
        chunk: int = 1000,
        max_positions: int = 512,
        state_of: Callable[[Sequence[int]], torch.Tensor] | None = None,
    ) -> None:
        self._step = step
        self._next_token = next_token
        self._tells = tells
        self._chunk = chunk
        self._max_positions = max_positions
        self._state_of = state_of
        self.num_rows = num_rows
        self.rows: list[FakeRequest] = []
        self.waiting: list[FakeRequest] = []
        self.done: dict[str, FakeRequest] = {}
        self.num_steps = self.num_drafted = self.num_accepted = 0
        self._ids = np.zeros((num_rows, max_positions), dtype=np.int32)
        self._sizes = np.zeros(num_rows, dtype=np.int32)

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, **facts: Any
    ) -> FakeRequest:
        """Queue a request."""
        request = FakeRequest(request_id, list(prompt), len(prompt), max_tokens)
        request.facts = replace(
            RequestFacts(sampling=GREEDY, max_tokens=max_tokens, num_prompt_tokens=len(prompt)),
            written=request.written,
            **facts,
        )
        request.unread = len(prompt)
        self.waiting.append(request)
        return request

    def abort(self, request: FakeRequest) -> None:
        """End a request where it is; the last row moves into its place."""
        self.done[request.request_id] = request
        place = self.rows.index(request)
        self.rows[place] = self.rows[-1]
        self.rows.pop()

    def preempt(self, request: FakeRequest) -> None:
        """Send a request back to the queue; its tokens will be read again."""
        place = self.rows.index(request)
        self.rows[place] = self.rows[-1]
        self.rows.pop()
        request.draft, request.unread = [], len(request.tokens)
        self.waiting.insert(0, request)

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.rows and not self.waiting:
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def step(self) -> None:
        """Play one step of all rows, then ask for drafts."""
        self.num_steps += 1
        while self.waiting and len(self.rows) < self.num_rows:
            self.rows.append(self.waiting.pop(0))
        num_drafts = [len(request.draft) for request in self.rows]
        verified = {one.request_id: list(one.draft) for one in self.rows if one.draft}
        sampled = [self._emit(request) for request in self.rows]
        scheduled = sum(num_drafts) + len(self.rows)
        for place, request in enumerate(self.rows):
            self._ids[place, : len(request.tokens)] = request.tokens
            self._sizes[place] = len(request.tokens)
        drafts = self._step(
            sampled,
            self._sizes,
            self._ids,
            replace(self._facts(num_drafts, scheduled, sampled), draft_token_ids=verified)
            if self._tells
            else None,
        )
        assert len(drafts) == len(self.rows)
        for request, draft in zip(list(self.rows), drafts, strict=True):
            request.draft = list(draft)
            self._finish(request)

    def _emit(self, request: FakeRequest) -> list[int]:
        if request.unread > self._chunk:
            request.unread -= self._chunk
            return []
        request.unread = 0
        emitted = []
        self.num_drafted += len(request.draft)
        for token in [*request.draft, None]:
            wanted = self._next_token(request.tokens)
            request.tokens.append(wanted)
            request.written.append(wanted)
            emitted.append(wanted)
            if token != wanted:
                break
            self.num_accepted += 1
        request.draft = []
        return emitted

    def _finish(self, request: FakeRequest) -> None:
        """Cut what stands behind the end, and take the request out if it has ended."""
        output = request.output[: request.max_tokens]
        if END in output:
            output = output[: output.index(END) + 1]
        has_ended = END in output or len(output) >= request.max_tokens
        if has_ended or len(request.tokens) >= self._max_positions - 1:
            kept = request.num_prompt_tokens + len(output)
            request.tokens = request.tokens[: min(kept, self._max_positions)]
            self.abort(request)

    def _states(self, num_drafts: list[int], sampled: list[list[int]]) -> torch.Tensor:
        """Return one state per sampled position: of every draft and the token behind them."""
        state_of = self._state_of
        if state_of is None:
            return torch.zeros((sum(num_drafts) + len(num_drafts), HIDDEN_SIZE))
        states = []
        for request, count, emitted in zip(self.rows, num_drafts, sampled, strict=True):
            before = len(request.tokens) - len(emitted)
            kept = [state_of(request.tokens[: before + j]) for j in range(max(len(emitted), 1))]
            states += kept + [torch.zeros_like(kept[0])] * (count + 1 - len(kept))
        return torch.stack(states)

    def _facts(self, num_drafts: list[int], scheduled: int, sampled: list[list[int]]) -> StepFacts:
        running = {one.request_id: one for one in [*self.rows, *self.waiting]}
        return StepFacts(
            request_ids=[request.request_id for request in self.rows],
            num_draft_tokens=num_drafts,
            states=self._states(num_drafts, sampled),
            is_running=lambda request_id: any(
                one.request_id == request_id for one in [*self.rows, *self.waiting]
            ),
            request=lambda request_id: running[request_id].facts,
            num_scheduled_tokens=scheduled,
        )


def repeating(period: int = 7, base: int = 10) -> NextToken:
    """Return a target that counts in circles."""
    return lambda tokens: base + (tokens[-1] - base + 1) % period


def noisy(seed: int, *, vocab_size: int = 60, order: int = 2, end_share: float = 0.0) -> NextToken:
    """Return a target whose next token depends on the last ``order`` tokens, at random."""

    def next_token(tokens: Sequence[int]) -> int:
        rng = np.random.default_rng([seed, *tokens[-order:]])
        if rng.random() < end_share:
            return END
        return int(rng.integers(2, vocab_size))

    return next_token
