"""The keeper of a head's experts: it watches the events, and releases and retires what is kept.

An expert is a copy of an older version of the head, released live under an id of its own. What is
decided is a function of the events that the head's weights contain, and its state travels in the
artifact with them. Its acts may be repeated: after a crash between an act and the next release of
the head the same events are read again, the same is decided, and what is done already is seen on
the board.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

import numpy as np

from learner.ports import ArtifactStore, ReleaseBoard, StoreError
from learner.release_desk import DrafterIdentity
from learner.spawning import ExpertFamily, Snapshots, Spawn, SpawnSettings
from learner.trial import window_lengths
from schemas.events import DrafterReleased, ReleaseState, VerificationEvent, Watermark

logger = logging.getLogger(__name__)


class ExpertKeeper:
    """Keeps what a head was good at.

    Args:
        identity: Of the head.
        settings: When to keep, and how many.
        store: Artifacts.
        board: Releases.
        now: Returns the time in UTC.
        refuse_if_fenced: Raises if somebody else has moved the head.

    Attributes:
        num_failed: Experts that could not be stored.
    """

    def __init__(
        self,
        identity: DrafterIdentity,
        settings: SpawnSettings,
        *,
        store: ArtifactStore,
        board: ReleaseBoard,
        now: Callable[[], datetime],
        refuse_if_fenced: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._settings = settings
        self._store = store
        self._board = board
        self._now = now
        self._refuse_if_fenced = refuse_if_fenced
        self._family = ExpertFamily(identity.drafter_id, settings)
        self._snapshots: Snapshots[int] = Snapshots()
        self.num_failed = 0

    @property
    def expert_ids(self) -> tuple[str, ...]:
        """Experts that are kept, the oldest first."""
        return self._family.expert_ids

    @property
    def kept_versions(self) -> frozenset[int]:
        """Versions of the head that may still become an expert."""
        return frozenset(version for _, version in self._snapshots.points)

    def observe(
        self, event: VerificationEvent, live_version: int, window: Callable[[], Watermark]
    ) -> None:
        """Let an event bear on what is kept.

        Args:
            event: Each once, in order.
            live_version: Of the head, when the event was taken.
            window: Returns what the head was trained on until now.

        Raises:
            FencedError: If something is to be kept, but somebody else has moved the head.
        """
        self._snapshots.note(self._family.num_events, live_version)
        spawn = self._family.observe(event.stream, family_lengths(event, self._family.ids))
        if spawn is not None:
            self._refuse_if_fenced()
            self._carry_out(spawn, live_version, window())

    def _carry_out(self, spawn: Spawn, live_version: int, window: Watermark) -> None:
        placed = {one.drafter_id: one for one in self._board.read_all()}
        known = placed.get(spawn.expert_id)
        if known is None:
            before = self._snapshots.before(spawn.since)
            version = live_version if before is None else before
            try:
                self._release(spawn, version, window)
            except StoreError as error:
                self.num_failed += 1
                self._family.forget(spawn.expert_id)
                logger.error("expert %s is not kept: %s", spawn.expert_id, error)
                return
        if spawn.retired_id is not None:
            self._retire(placed.get(spawn.retired_id), spawn.expert_id)

    def _release(self, spawn: Spawn, version: int, window: Watermark) -> None:
        head = self._identity
        stored = self._store.copy(head.drafter_id, version, as_drafter_id=spawn.expert_id)
        logger.info("drafter %s version %d is kept: %s", head.drafter_id, version, spawn.reason)
        self._board.publish(
            DrafterReleased(
                drafter_id=spawn.expert_id,
                version=stored.version,
                parent_version=-1,
                state=ReleaseState.LIVE,
                produced_at=self._now(),
                artifact_uri=stored.uri,
                manifest_sha256=stored.manifest_sha256,
                architecture=head.architecture,
                target_fingerprint=head.target_fingerprint,
                tokenizer_hash=head.tokenizer_hash,
                draft_vocabulary_hash=head.draft_vocabulary_hash,
                training_window=window,
                evidence=None,
                reason=f"{head.drafter_id} version {version}, kept: {spawn.reason}",
            )
        )

    def _retire(self, release: DrafterReleased | None, successor_id: str) -> None:
        if release is None or release.state is ReleaseState.RETIRED:
            return
        logger.info("expert %s retires, %s is kept", release.drafter_id, successor_id)
        reason = f"contributed least, makes room for {successor_id}"
        self._board.publish(
            replace(release, state=ReleaseState.RETIRED, produced_at=self._now(), reason=reason)
        )

    def state(self) -> dict[str, Any]:
        """Return what continues it, as JSON."""
        points = [list(point) for point in self._snapshots.points]
        return {"family": self._family.state(), "snapshots": points}

    def resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a state, without the experts that somebody has retired by hand.

        Args:
            state: None = the head has had no experts so far.
        """
        if state is not None:
            head_id = self._identity.drafter_id
            self._family = ExpertFamily.from_state(head_id, self._settings, state["family"])
            self._snapshots.points = [(int(i), int(version)) for i, version in state["snapshots"]]
        for release in self._board.read_all():
            if release.state is ReleaseState.RETIRED:
                self._family.forget(release.drafter_id)


def family_lengths(event: VerificationEvent, ids: tuple[str, ...]) -> dict[str, float]:
    """Return the mean acceptance length of each of ``ids`` on the windows that all had in common.

    Who is not in the event is left out; empty if nothing was scored.
    """
    places = [place for place, one in enumerate(event.drafters) if one.drafter_id in ids]
    if not places or event.num_speculative_tokens == 0:
        return {}
    lengths = window_lengths(event, places)
    if not len(lengths):
        return {}
    means = np.asarray(lengths.mean(axis=0))
    return {
        event.drafters[place].drafter_id: float(mean)
        for place, mean in zip(places, means, strict=True)
    }
