"""A worker whose outside is in memory: events, hidden states, and what the learner sends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from inference.engine import EngineOptions
from inference.pool import DrafterPool
from inference.ports import Drafter
from inference.sampling import SamplingParams
from inference.target import Target
from inference.worker import Request, Worker, WorkerOptions
from schemas.events import FeatureReference, PolicyPublished, VerificationEvent


@dataclass
class Outbox:
    """Keeps events; what was put into ``policies`` and ``drafters`` is taken once."""

    events: list[VerificationEvent] = field(default_factory=list)
    policies: list[PolicyPublished] = field(default_factory=list)
    drafters: list[Drafter] = field(default_factory=list)

    def emit(self, event: VerificationEvent) -> None:
        """Keep an event."""
        self.events.append(event)

    def take_policies(self) -> Sequence[PolicyPublished]:
        """Hand over and forget."""
        taken, self.policies = self.policies, []
        return taken

    def take_drafters(self) -> Sequence[Drafter]:
        """Hand over and forget."""
        taken, self.drafters = self.drafters, []
        return taken


@dataclass
class HiddenStates:
    """Recorded hidden states (``inference.worker.HiddenStateRecorder``, ``FeatureStore``)."""

    uri_to_rows: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def record(self, hidden: torch.Tensor) -> FeatureReference | None:
        """Keep the rows."""
        rows = hidden.float().cpu().numpy()
        uri = f"memory://{len(self.uri_to_rows)}"
        self.uri_to_rows[uri] = rows
        digest = hashlib.sha256(rows.tobytes()).hexdigest()
        return FeatureReference(uri=uri, first_row=0, num_rows=len(rows), sha256=digest)

    def read(self, reference: FeatureReference) -> NDArray[np.float32]:
        """Return the rows, or raise ``KeyError``."""
        return self.uri_to_rows[reference.uri]


def new_worker(
    target: Target,
    drafters: Sequence[Drafter],
    outbox: Outbox,
    *,
    states: HiddenStates | None = None,
    policy: str = "normal_hedge",
    segment_tokens: int = 16,
    num_speculative_tokens: int = 4,
    draws_drafts: bool = False,
) -> Worker:
    """Return a worker that reports short segments."""
    options = WorkerOptions(
        worker_id="worker-0",
        worker_epoch=1,
        policy=policy,
        segment_tokens=segment_tokens,
        engine=EngineOptions(
            num_speculative_tokens=num_speculative_tokens,
            score_block=5,
            draws_drafts=draws_drafts,
        ),
    )
    return Worker(
        target, DrafterPool(drafters), options, sink=outbox, inbox=outbox, recorder=states
    )


def request_of(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    *,
    request_id: str = "request-0",
    stream: str = "stream-a",
    has_consent: bool = True,
) -> Request:
    """Return a request."""
    return Request(
        request_id=request_id,
        stream=stream,
        prompt_token_ids=prompt_token_ids,
        params=params,
        has_consent=has_consent,
    )
