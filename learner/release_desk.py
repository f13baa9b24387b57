"""The desk where a trainer hands in versions: it writes, numbers, gates, announces and withdraws.

One trainer per drafter writes. Before every announcement the board is read again: if what stands
in the drafter's own place is not what this desk knows, another trainer or an operator has moved it,
and whoever holds the older view must begin again from the board (``FencedError``). A version is
written, then announced, and only then are older ones pruned: never one that the board names.

A drafter's first version goes live at once: it replaces a drafter that proposes nothing, and
nothing can be compared with that. Every later one passes the gate, if there is one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import torch

from learner.gate import GateSettings
from learner.lifecycle import Lifecycle, Step
from learner.ports import ArtifactStore, FencedError, ReleaseBoard, StoredVersion
from schemas.events import DrafterReleased, ReleaseState, VerificationEvent, Watermark

logger = logging.getLogger(__name__)

ON_TRIAL = (ReleaseState.CANDIDATE, ReleaseState.SHADOW, ReleaseState.CANARY)
"""States of a version beside the live one that is at work."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterIdentity:
    """What every release of one drafter has in common."""

    drafter_id: str
    architecture: str
    target_fingerprint: str
    tokenizer_hash: str
    draft_vocabulary_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedWeights:
    """A version as it is handed in: what serving needs, its config, and what training needs."""

    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    training_state: Mapping[str, torch.Tensor]


class ReleaseDesk:
    """Releases the versions of one drafter.

    Args:
        identity: Of the drafter.
        store: Artifacts.
        board: Releases.
        now: Returns the time in UTC.
        gate: When a version is good enough; None = every version goes live.
        keep_versions: Versions kept in the store beside those in use, >= 1.

    Attributes:
        live: Release in the drafter's own place; None before the first.
        continued: Version that training goes on from; -1 before the first.
        wanted_besides: Returns versions that others need and that are not to be pruned.
    """

    def __init__(
        self,
        identity: DrafterIdentity,
        *,
        store: ArtifactStore,
        board: ReleaseBoard,
        now: Callable[[], datetime],
        gate: GateSettings | None,
        keep_versions: int,
    ) -> None:
        self._identity = identity
        self._store = store
        self._board = board
        self._now = now
        self._gate = gate
        self._keep_versions = keep_versions
        self._life: Lifecycle | None = None
        self._version_to_release: dict[int, DrafterReleased] = {}
        self.live: DrafterReleased | None = None
        self.continued = -1
        self.wanted_besides: Callable[[], Collection[int]] = tuple

    @property
    def is_open(self) -> bool:
        """Whether a version that is handed in now can go live or on trial."""
        return self._life is None or self._life.is_open

    def resume(self) -> DrafterReleased | None:
        """Read the board and return the release that training goes on from.

        It is the version on trial, else the live one; None if nothing was ever released.

        Raises:
            FencedError: If the drafter is retired.
        """
        live = self.live = self._own_place()
        if live is None:
            return None
        if live.state is ReleaseState.RETIRED:
            raise FencedError(
                f"drafter {live.drafter_id}: version {live.version} is retired ({live.reason}); "
                f"'draftloop drafters promote {live.drafter_id} {live.version}' brings it back"
            )
        beside = self._beside_place()
        is_busy = beside is not None and beside.state in ON_TRIAL
        is_busy = is_busy and beside is not None and beside.version != live.version
        self._version_to_release = {live.version: live}
        self.continued = live.version
        if beside is not None and is_busy:
            self._version_to_release[beside.version] = beside
            self._resume_trial(live, beside)
        if self._gate is not None and self._life is None:
            self._life = Lifecycle(live.drafter_id, self._gate, live=live.version)
        return self._version_to_release[self.continued]

    def _resume_trial(self, live: DrafterReleased, beside: DrafterReleased) -> None:
        if self._gate is None:
            self._announce(_step(beside, ReleaseState.RETIRED, "the gate is off"))
            return
        if beside.state is ReleaseState.CANDIDATE:
            self._announce(_step(beside, ReleaseState.SHADOW, beside.reason))
        state = ReleaseState.CANARY if beside.state is ReleaseState.CANARY else ReleaseState.SHADOW
        place = (beside.version, state)
        self._life = Lifecycle(live.drafter_id, self._gate, live=live.version, beside=place)
        self.continued = max(self.continued, beside.version)

    def next_version(self) -> int:
        """Return a number that no version of the drafter has had."""
        known = [self.continued, *self._version_to_release]
        return max([*known, *self._store.versions(self._identity.drafter_id)]) + 1

    def release(
        self,
        version: int,
        weights: TrainedWeights,
        window: Watermark,
        reason: str,
        *,
        update_seconds: float = 0.0,
    ) -> DrafterReleased:
        """Write a version and announce it, live or on trial.

        Args:
            version: As ``next_version`` returned.
            weights: The version.
            window: The events that trained it.
            reason: Why it was made.
            update_seconds: What training it has taken since the live version.

        Raises:
            FencedError: If somebody else has moved the drafter.
            StoreError: If it could not be stored; nothing has changed then.
        """
        stored = self._written(version, weights)
        release = DrafterReleased(
            drafter_id=self._identity.drafter_id,
            version=version,
            parent_version=self.continued,
            state=ReleaseState.CANDIDATE,
            produced_at=self._now(),
            artifact_uri=stored.uri,
            manifest_sha256=stored.manifest_sha256,
            architecture=self._identity.architecture,
            target_fingerprint=self._identity.target_fingerprint,
            tokenizer_hash=self._identity.tokenizer_hash,
            draft_vocabulary_hash=self._identity.draft_vocabulary_hash,
            training_window=window,
            evidence=None,
            reason=reason,
        )
        self.refuse_if_fenced()
        self._version_to_release[version] = release
        if self.live is None or self._life is None:
            self._announce(_step(release, ReleaseState.LIVE, reason))
            if self._gate is not None:
                self._life = Lifecycle(release.drafter_id, self._gate, live=version)
        else:
            for step in self._life.offer(version, reason, update_seconds=update_seconds):
                self._announce(step)
        self.continued = version
        self._forget_old_versions()
        return self._version_to_release[version]

    def _written(self, version: int, weights: TrainedWeights) -> StoredVersion:
        try:
            return self._store.write(
                self._identity.drafter_id,
                version,
                weights.tensors,
                weights.config,
                training_state=weights.training_state,
            )
        except FileExistsError as error:
            raise FencedError(
                f"drafter {self._identity.drafter_id}: version {version} was written by another "
                f"trainer, this one continues {self.continued}; begin again from the board"
            ) from error

    def observe(self, event: VerificationEvent, window: Callable[[], Watermark]) -> bool:
        """Let an event bear on the versions at work.

        Args:
            event: Each once, in order.
            window: Returns what was trained on until now. A version that comes back carries it:
                what the withdrawn one was trained on is not trained on again.

        Returns:
            Whether training must go back to the live version: what it made was refused.

        Raises:
            FencedError: If something follows, but somebody else has moved the drafter.
        """
        if self._life is None:
            return False
        steps = self._life.observe(event)
        if not steps:
            return False
        self.refuse_if_fenced()
        for step in steps:
            logger.log(
                logging.WARNING if self._is_refusal(step) else logging.INFO,
                "drafter %s version %d is %s: %s",
                self._identity.drafter_id,
                step.version,
                step.state,
                step.reason,
            )
            is_back = step.state is ReleaseState.LIVE and step.version < self._live_version()
            self._announce(step, window() if is_back else None)
        goes_back = any(self._is_refusal(step) for step in steps)
        if goes_back:
            self.continued = self._live_version()
        self._forget_old_versions()
        return goes_back

    def _is_refusal(self, step: Step) -> bool:
        """Tell a newer version that was refused from an older one that is no longer needed."""
        is_gone = step.state in (ReleaseState.RETIRED, ReleaseState.ROLLED_BACK)
        return is_gone and step.version > self._live_version()

    def _live_version(self) -> int:
        return -1 if self.live is None else self.live.version

    def _announce(self, step: Step, window: Watermark | None = None) -> None:
        known = self._version_to_release[step.version]
        release = replace(
            known,
            state=step.state,
            produced_at=self._now(),
            evidence=step.evidence,
            reason=step.reason,
            training_window=window or known.training_window,
        )
        self._version_to_release[step.version] = release
        if step.state is ReleaseState.LIVE:
            self._board.publish(release)
            self.live = release
        else:
            self._board.publish_beside(release)

    def refuse_if_fenced(self) -> None:
        """Raise ``FencedError`` if somebody else has moved the drafter."""
        found = self._own_place()
        if _mark(found) != _mark(self.live):
            version = None if found is None else found.version
            raise FencedError(
                f"drafter {self._identity.drafter_id}: version {version} was released by another "
                f"trainer or by hand, this one continues {self.continued}; begin again from there"
            )

    def _own_place(self) -> DrafterReleased | None:
        return _of(self._identity.drafter_id, self._board.read_all())

    def _beside_place(self) -> DrafterReleased | None:
        return _of(self._identity.drafter_id, self._board.read_beside())

    def _forget_old_versions(self) -> None:
        life = self._life
        wanted = {self._live_version(), self.continued}
        if life is not None:
            wanted |= {one for one in (life.previous, life.candidate) if one is not None}
        self._version_to_release = {
            version: one for version, one in self._version_to_release.items() if version in wanted
        }
        named = [one for one in (self._own_place(), self._beside_place()) if one is not None]
        if _mark(self.live) not in map(_mark, named):
            return  # moved meanwhile: whoever did it prunes
        wanted |= {version for one in named for version in (one.version, one.parent_version)}
        protected = wanted | set(self.wanted_besides())
        self._store.prune(self._identity.drafter_id, self._keep_versions, protected)


def _step(release: DrafterReleased, state: ReleaseState, reason: str) -> Step:
    return Step(version=release.version, state=state, evidence=release.evidence, reason=reason)


def _of(drafter_id: str, releases: Sequence[DrafterReleased]) -> DrafterReleased | None:
    return {release.drafter_id: release for release in releases}.get(drafter_id)


def _mark(release: DrafterReleased | None) -> tuple[int, ReleaseState, datetime] | None:
    """Return what tells one announcement from another."""
    return None if release is None else (release.version, release.state, release.produced_at)
