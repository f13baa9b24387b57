"""One learning run: a stream of recorded requests served and learned from by the real parts.

Every request is served with the weights that are live at that moment and scored before anything is
learned from it (prequentially). Its event then travels for as long as the arrivals say and is
handed to the trainer of production, which steps, gates and releases; what it publishes changes the
pool before the next request.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inference.pool import DrafterPool
from learner.selection import DEFAULT_POLICY, parse_policy
from learner.spawning import family_of
from learner.walk import Coins, Walker, prepare
from pipeline.bench.learning.service import ReplayedService
from pipeline.bench.learning.streams import Arrivals, Stream
from pipeline.bench.learning.traces import RequestTrace
from pipeline.bench.learning.worker import (
    NUM_SPECULATIVE_TOKENS,
    Scores,
    Sender,
    Served,
    scores,
    shuffled,
    verification_event,
    window_trace,
)
from schemas.events import ReleaseState, VerificationEvent

NOT_COMPARED = -1
"""``snapshot_rounds`` of a request that was not compared."""


@dataclass(kw_only=True, slots=True)
class RunResult:
    """What a run gave, one element per request of the stream.

    Attributes:
        num_rounds: Verifications.
        num_tokens: Tokens they emitted.
        learning_seconds: Thread CPU time that feedback took to be learned; what arrived before
            this request was served counts here.
        versions: Weights version of the head that was live.
        snapshot_rounds: Verifications with the head as it was at the end of the first visit to
            this domain; ``NOT_COMPARED`` in that visit, and where it was not asked for.
        facts: Numbers of the run as a whole.
    """

    num_rounds: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    learning_seconds: NDArray[np.float64]
    versions: NDArray[np.int64]
    snapshot_rounds: NDArray[np.int64]
    facts: dict[str, float] = field(default_factory=dict)


class Selection:
    """Who drafts which round: the one head, or the default policy over a head and its experts.

    Args:
        rng: Tosses the coins of the selection.
    """

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._walker: Walker | None = None

    def serve(self, found: Scores, num_prompt: int) -> Served:
        """Play the rounds of a request whose drafters are scored."""
        ids = tuple(one.drafter_id for one in found.versions[: found.num_own])
        if len(ids) == 1 and self._walker is None:
            return Served.by_one(found.accepted[:, 0])
        if self._walker is None:
            self._walker = Walker(
                parse_policy(DEFAULT_POLICY),
                1,
                drafter_ids=ids[:1],
                num_speculative_tokens=NUM_SPECULATIVE_TOKENS,
            )
        self._walker.change_pool(ids)
        trace = window_trace(found, num_prompt)
        coins = Coins.toss(self._rng, trace.num_positions, NUM_SPECULATIVE_TOKENS)
        walked = self._walker.walk(prepare(trace, coins))
        return Served(drafters=walked.drafter, lengths=walked.length)


class FirstVisits:
    """The head as it was at the end of the first visit to a domain, on later visits.

    Args:
        service: Whose head.
        stream: Which request is of which visit.
    """

    def __init__(self, service: ReplayedService, stream: Stream) -> None:
        self._service = service
        self._stream = stream
        self._domain_to_pool: dict[str, DrafterPool] = {}
        self._last = -1

    def rounds(self, index: int, trace: RequestTrace) -> int:
        """Return the verifications that such a head needs for a request."""
        stream = self._stream
        if index and stream.visits[index] != stream.visits[index - 1]:
            head = self._service.pool.drafters[0]
            self._domain_to_pool.setdefault(stream.domains[index - 1], DrafterPool([head]))
        pool = self._domain_to_pool.get(stream.domains[index])
        if pool is None:
            return NOT_COMPARED
        found = scores(pool, f"request-{index}", trace, self._service.ground.rows)
        return Served.by_one(found.accepted[:, 0]).num_rounds


def run_stream(
    service: ReplayedService,
    stream: Stream,
    traces: Sequence[RequestTrace],
    order: Arrivals,
    rng: np.random.Generator,
) -> RunResult:
    """Serve a stream and learn from it.

    Args:
        service: Fresh.
        stream: Which request when.
        traces: Of every request, (Q,).
        order: When feedback arrives.
        rng: Shuffles the labels of poisoned events, and tosses the coins of the selection.
    """
    size = len(traces)
    result = RunResult(
        num_rounds=np.zeros(size, dtype=np.int64),
        num_tokens=np.zeros(size, dtype=np.int64),
        learning_seconds=np.zeros(size),
        versions=np.zeros(size, dtype=np.int64),
        snapshot_rounds=np.full(size, NOT_COMPARED, dtype=np.int64),
    )
    poison, coins = rng.spawn(2)
    selection, visits = Selection(coins), FirstVisits(service, stream)
    events: list[VerificationEvent] = []
    senders = Counter[int]()
    for index, trace in enumerate(traces):
        seconds = sum(service.deliver(events[due]) for due in order.due[index])
        request_id = f"request-{index}"
        found = service.score(request_id, trace)
        served = selection.serve(found, len(trace.prompt_token_ids))
        _note(result, index, found, served, seconds)
        result.snapshot_rounds[index] = visits.rounds(index, trace)
        worker = order.workers[index]
        sender = Sender(worker_id=f"worker-{worker}", sequence=senders[worker])
        senders[worker] += 1
        labels = shuffled(trace, poison) if stream.is_poisoned[index] else None
        events.append(
            verification_event(
                request_id, trace, found, served, sender, service.ground.facts, labels=labels
            )
        )
    began = time.thread_time()
    for due in order.due[size]:
        service.deliver(events[due])
    result.facts = _facts(service) | {"last_learning_seconds": time.thread_time() - began}
    return result


def _note(result: RunResult, index: int, found: Scores, served: Served, seconds: float) -> None:
    result.num_rounds[index], result.num_tokens[index] = served.num_rounds, served.num_tokens
    result.learning_seconds[index] = seconds
    result.versions[index] = found.versions[0].weights_version


def _facts(service: ReplayedService) -> dict[str, float]:
    states = Counter(one.state for one in service.board.history[service.num_past_releases :])
    trainer = service.trainer
    return {
        "num_updates": float(trainer.num_updates),
        "num_refused_steps": float(trainer.num_refused_steps),
        "num_live": float(states[ReleaseState.LIVE]),
        "num_shadows": float(states[ReleaseState.CANDIDATE]),
        "num_rolled_back": float(states[ReleaseState.ROLLED_BACK]),
        "num_experts": float(
            sum(family_of(one.drafter_id) is not None for one in service.pool.versions)
        ),
    }
