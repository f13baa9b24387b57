"""The life of a drafter's versions: candidate, shadow, canary, live, and the ways back.

Pure: events go in, steps come out, and whoever asked publishes them. At most two versions of a
drafter are at work at a time: the live one in its own place, and one *beside* it, which is either a
newer one on trial or the predecessor of a live one that has just been promoted. Both are scored on
the same windows, so the same gate that lets a version in throws it out again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from learner.gate import Decision, GateSettings, break_even_verifications
from learner.trial import Trial, has_failed
from schemas.errors import KnownError
from schemas.events import GateEvidence, ReleaseState, VerificationEvent

ALLOWED: Mapping[ReleaseState, frozenset[ReleaseState]] = {
    ReleaseState.CANDIDATE: frozenset({ReleaseState.SHADOW, ReleaseState.LIVE}),
    ReleaseState.SHADOW: frozenset({ReleaseState.CANARY, ReleaseState.LIVE}),
    ReleaseState.CANARY: frozenset({ReleaseState.LIVE, ReleaseState.ROLLED_BACK}),
    ReleaseState.LIVE: frozenset({ReleaseState.SHADOW, ReleaseState.ROLLED_BACK}),
    ReleaseState.RETIRED: frozenset({ReleaseState.SHADOW, ReleaseState.LIVE}),
    ReleaseState.ROLLED_BACK: frozenset({ReleaseState.LIVE}),
}
"""Where a version may go from each state; every one but a retired one may also be retired."""


class TransitionError(KnownError):
    """A version cannot go from its state to another; the message names all three."""


def refuse_transition(drafter_id: str, version: int, old: ReleaseState, new: ReleaseState) -> None:
    """Refuse a step that the life of a version does not have.

    Raises:
        TransitionError: If ``new`` does not follow ``old``.
    """
    allowed = set(ALLOWED[old])
    if old is not ReleaseState.RETIRED:
        allowed.add(ReleaseState.RETIRED)
    if new not in allowed:
        raise TransitionError(
            f"drafter {drafter_id} version {version} is {old}: it cannot become {new}, only "
            f"{', '.join(sorted(allowed))}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One version changes its state."""

    version: int
    state: ReleaseState
    evidence: GateEvidence | None
    reason: str


class Lifecycle:
    """Decides what becomes of a drafter's versions.

    Args:
        drafter_id: Of the drafter.
        settings: When a version is good enough.
        live: Version in the drafter's own place.
        beside: Version beside it and its state, shadow or canary; None = nothing is.

    Attributes:
        live: Version in the drafter's own place.
        previous: Version that was live before it and may be again; None = not known.
        worker_to_version: Version in force at each worker, as its newest event has it: the
            acknowledgement of a swap.
    """

    def __init__(
        self,
        drafter_id: str,
        settings: GateSettings,
        *,
        live: int,
        beside: tuple[int, ReleaseState] | None = None,
    ) -> None:
        self._drafter_id = drafter_id
        self._settings = settings
        self.live = live
        self.previous: int | None = None
        self.worker_to_version: dict[str, int] = {}
        self._trial: Trial | None = None
        self._state = ReleaseState.SHADOW
        self._failed_requests: set[str] = set()
        self._update_seconds = 0.0
        self._patience = settings.min_requests
        if beside is not None:
            version, self._state = beside
            newer, older = max(version, live), min(version, live)
            self._trial = Trial(drafter_id=drafter_id, new=newer, old=older)
            self.previous = version if version < live else None

    @property
    def candidate(self) -> int | None:
        """Version on trial, or None."""
        trial = self._trial
        return trial.new if trial is not None and trial.new != self.live else None

    @property
    def is_open(self) -> bool:
        """Whether a new version may go on trial.

        It may not while another one is within its time, nor before its predecessor's comparison
        with the live one has had a first look. The time is one look for the first version after a
        promotion, and twice that of the one before for every other that nothing came of: while much
        is learned, a newer version need not wait for one that has fallen behind, and where little
        is learned, little gains get the requests that it takes to see them.
        """
        trial = self._trial
        if trial is None:
            return True
        if trial.new == self.live:
            return trial.num_looks > 0
        return trial.num_requests >= self._patience

    def offer(self, version: int, reason: str, *, update_seconds: float = 0.0) -> list[Step]:
        """Put a version on trial, in place of what is beside the live one.

        Args:
            version: The newer one.
            reason: Why it was made.
            update_seconds: What training it has taken since the live one.
        """
        self._update_seconds = update_seconds
        if self.candidate is not None:
            self._patience = min(2 * self._patience, self._settings.max_requests)
        steps = self._end_of_trial("a newer version is on trial")
        self._trial = Trial(drafter_id=self._drafter_id, new=version, old=self.live)
        self._state = ReleaseState.SHADOW
        for state in (ReleaseState.CANDIDATE, ReleaseState.SHADOW):
            steps.append(Step(version=version, state=state, evidence=None, reason=reason))
        return steps

    def observe(self, event: VerificationEvent) -> list[Step]:
        """Take an event in and return what follows from it, in the order to be published."""
        self._note_live(event)
        trial = self._trial
        if trial is not None:
            trial.add(event)
        if len(self._failed_requests) > self._settings.max_failed_requests:
            reason = f"no usable answer in {len(self._failed_requests)} requests"
            return self._rolled_back(reason)
        if trial is None:
            return []
        return self._guarded(trial) if trial.new == self.live else self._judged(trial)

    def _note_live(self, event: VerificationEvent) -> None:
        for place, one in enumerate(event.drafters):
            if one.drafter_id == self._drafter_id:
                self.worker_to_version[event.worker_id] = one.weights_version
                if one.weights_version == self.live and has_failed(event, place):
                    self._failed_requests.add(f"{event.worker_id}/{event.request_id}")

    def _judged(self, trial: Trial) -> list[Step]:
        """Advance or refuse a version on trial."""
        if trial.failed_requests:
            return self._refused(trial, "no usable answer in a request")
        verdict = trial.look(self._settings)
        if verdict is not None and verdict.decision is Decision.REFUSE:
            return self._refused(trial, verdict.reason)
        if self._state is ReleaseState.CANARY:
            return self._after_canary(trial)
        if verdict is None or verdict.decision is Decision.WAIT:
            return []
        if self._settings.canary_share == 0.0:
            return self._promoted(trial, verdict.reason)
        self._state = ReleaseState.CANARY
        return [
            Step(
                version=trial.new,
                state=ReleaseState.CANARY,
                evidence=verdict.evidence,
                reason=_with_streams(verdict.reason, trial),
            )
        ]

    def _after_canary(self, trial: Trial) -> list[Step]:
        count = len(trial.canary_requests)
        evidence = trial.evidence(self._settings)
        # What it takes, only a canary shows: beside the live version nobody drafts.
        needed = evidence.old_acceptance_length * max(1.0, trial.cost_ratio)
        has_gained = evidence.new_acceptance_length > needed
        if count < self._settings.min_canary_requests or not has_gained:
            return []
        return self._promoted(trial, f"held as a canary for {count} requests")

    def _promoted(self, trial: Trial, reason: str) -> list[Step]:
        evidence = trial.evidence(self._settings)
        reason = f"{_with_streams(reason, trial)}; {self._break_even(trial, evidence)}"
        self.live, self.previous = trial.new, trial.old
        self._patience = self._settings.min_requests
        self._trial = Trial(drafter_id=self._drafter_id, new=trial.new, old=trial.old)
        self._state = ReleaseState.SHADOW
        self._failed_requests.clear()
        return [
            Step(version=trial.new, state=ReleaseState.LIVE, evidence=evidence, reason=reason),
            Step(
                version=trial.old,
                state=ReleaseState.SHADOW,
                evidence=None,
                reason=f"kept beside its successor {trial.new}",
            ),
        ]

    def _break_even(self, trial: Trial, evidence: GateEvidence) -> str:
        """Say after how many verifications the training of a version has paid for itself."""
        verifications = break_even_verifications(
            update_seconds=self._update_seconds,
            round_seconds=trial.costs.mean_round_seconds,
            old_length=evidence.old_acceptance_length,
            new_length=evidence.new_acceptance_length / max(1.0, trial.cost_ratio),
        )
        if not math.isfinite(verifications):
            return f"{self._update_seconds:.1f} s of training, seconds of rounds not measured"
        return (
            f"{self._update_seconds:.1f} s of training are paid back after "
            f"{verifications:.0f} verifications"
        )

    def _refused(self, trial: Trial, reason: str) -> list[Step]:
        was_canary = self._state is ReleaseState.CANARY
        self._trial = None
        return [
            Step(
                version=trial.new,
                state=ReleaseState.ROLLED_BACK if was_canary else ReleaseState.RETIRED,
                evidence=trial.evidence(self._settings),
                reason=_with_streams(reason, trial),
            )
        ]

    def _guarded(self, trial: Trial) -> list[Step]:
        """Compare the live version with its predecessor for as long as a trial lasts."""
        verdict = trial.is_worse(self._settings)
        if verdict is not None:
            return self._rolled_back(verdict.reason)
        if trial.num_requests >= self._settings.max_requests:
            return self._end_of_trial(f"its successor {trial.new} holds")
        return []

    def _rolled_back(self, reason: str) -> list[Step]:
        """Go back to the previous version, if it is known; the withdrawn one is told last.

        Should the process die between the two, the good version is live already.
        """
        self._failed_requests.clear()
        if self.previous is None:
            return []
        withdrawn, trial = self.live, self._trial
        evidence = trial.evidence(self._settings) if trial is not None else None
        steps = [
            Step(version=self.previous, state=ReleaseState.LIVE, evidence=evidence, reason=reason),
            Step(
                version=withdrawn, state=ReleaseState.ROLLED_BACK, evidence=evidence, reason=reason
            ),
        ]
        self.live, self.previous, self._trial = self.previous, None, None
        return steps

    def _end_of_trial(self, reason: str) -> list[Step]:
        trial, self._trial = self._trial, None
        if trial is None:
            return []
        version = trial.old if trial.new == self.live else trial.new
        return [
            Step(
                version=version,
                state=ReleaseState.RETIRED,
                evidence=trial.evidence(self._settings),
                reason=reason,
            )
        ]


def _with_streams(reason: str, trial: Trial) -> str:
    streams = trial.by_stream()
    return f"{reason}; by stream: {streams}" if streams else reason
