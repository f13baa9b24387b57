"""Re-runs under scope ``both``: requests of many streams, in order, each from a mixed start."""

from __future__ import annotations

from collections.abc import Sequence

from learner.prior import PriorSettings, StreamPrior
from learner.request_selector import FIRST_WINDOWS
from learner.request_start import StartExperts
from learner.selection.registry import PolicySpec
from learner.shared_prior import SharedPrior
from learner.walk import PreparedTrace, WalkedRounds, Walker

_DEFAULT_SETTINGS = PriorSettings()


class StreamEvidence:
    """What a learner would know of the streams of a log by now, one for all policies.

    Args:
        settings: How evidence becomes a prior.

    Attributes:
        shared: The priors.
    """

    def __init__(self, settings: PriorSettings = _DEFAULT_SETTINGS) -> None:
        self._settings = settings
        self._stream_to_known: dict[str, tuple[tuple[str, ...], StreamPrior]] = {}
        self.shared = SharedPrior(settings)

    def learn(self, stream: str, drafter_ids: Sequence[str], trace: PreparedTrace) -> None:
        """Learn a request over its stream's pool, to which drafters are only ever added."""
        ids, known = self._stream_to_known.get(stream, ((), StreamPrior.empty(0)))
        known = known.with_new(len(drafter_ids) - len(ids))
        losses = trace.loss_to_losses["length"]
        for first in range(0, len(losses), FIRST_WINDOWS):
            known = known.learned(losses[first : first + FIRST_WINDOWS], self._settings)
        self._stream_to_known[stream] = tuple(drafter_ids), known
        self.shared.update(stream, drafter_ids, known)


class StartedWalks:
    """Walks requests of many streams with one policy, each from what its experts say.

    Args:
        spec: The policy, of scope ``both``.
        evidence: What is known of the streams; whoever walks teaches it.
    """

    def __init__(self, spec: PolicySpec, evidence: StreamEvidence) -> None:
        self._spec = spec
        self._evidence = evidence
        self._started: set[str] = set()
        self.experts = StartExperts(spec)

    def walk(
        self,
        stream: str,
        drafter_ids: Sequence[str],
        walker: Walker,
        trace: PreparedTrace,
        *,
        prompt_token_ids: Sequence[int] = (),
        block: int | None = None,
    ) -> WalkedRounds:
        """Walk one request.

        Args:
            stream: Its stream.
            drafter_ids: The pool that ``walker`` and ``trace`` are over, (N,).
            walker: The stream's own.
            trace: The request.
            prompt_token_ids: Of its prompt; empty if unknown.
            block: As ``Walker.walk`` has it.
        """
        carried = walker.policy if stream in self._started else None
        self._started.add(stream)
        shared = self._evidence.shared.of(stream, drafter_ids)
        start = self.experts.start(drafter_ids, carried, shared, prompt_token_ids)
        walker.start_from(start.policy)
        walked = walker.walk(trace, block=block)
        self.experts.learned(start, trace.loss_to_losses[self._spec.loss])
        return walked
