"""Every step that a release has taken, kept where compaction does not reach: beside the artifacts.

The topic of releases keeps the newest step of a place. Whoever announces one also writes it to
``releases/<drafter_id>/<microseconds>-<version>-<state>.json``, a small file that is there as a
whole and is never changed. The board stays the truth: it is told first, a step that could not be
written is written with the next one, and what a writer that died left out is found on the board.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from typing import Any

from learner.ports import ReleaseBoard
from pipeline.configuration.settings import Settings
from pipeline.eventlog.ports import EventLog
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.storage import ArtifactError, NameTakenError, Storage
from schemas import checks
from schemas.errors import ContractError
from schemas.events import DrafterReleased, GateEvidence, ReleaseState
from schemas.packing import microseconds

FOLDER = "releases"
_STATE_TO_RANK = {state.value: rank for rank, state in enumerate(ReleaseState)}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseStep:
    """One step of one version, as the history keeps it.

    Attributes:
        produced_at: When it was announced, ISO 8601, UTC.
        version: Of the drafter.
        parent_version: That it was trained from; -1 for the first.
        state: What the version became.
        reason: Why.
        evidence: The gate's numbers by name, null where nothing was compared, and under
            ``streams`` the same of single streams; None = no gate.
        manifest_sha256: Of the artifact.
    """

    produced_at: str
    version: int
    parent_version: int
    state: str
    reason: str
    evidence: dict[str, Any] | None
    manifest_sha256: str

    @classmethod
    def of(cls, release: DrafterReleased) -> ReleaseStep:
        """Return what is kept of a release."""
        return cls(
            produced_at=release.produced_at.astimezone(UTC).isoformat(timespec="microseconds"),
            version=release.version,
            parent_version=release.parent_version,
            state=release.state.value,
            reason=release.reason,
            evidence=None if release.evidence is None else _finite(release.evidence),
            manifest_sha256=release.manifest_sha256,
        )

    @property
    def order(self) -> tuple[datetime, int, int]:
        """What steps are sorted by: time, then version, then how far it has come."""
        rank = _STATE_TO_RANK.get(self.state, -1)
        return datetime.fromisoformat(self.produced_at), self.version, rank


class ReleaseHistory:
    """The steps of all drafters.

    Args:
        root: Folder or fsspec URL that holds ``releases/``.
    """

    def __init__(self, root: str) -> None:
        self._storage = Storage(root)

    def add(self, release: DrafterReleased) -> None:
        """Keep a step, durable when this returns; one that is there already is kept once.

        Raises:
            ArtifactError: If it cannot be stored.
        """
        moment = microseconds(release.produced_at)
        name = f"{moment:020d}-{release.version}-{release.state.value}.json"
        text = json.dumps(asdict(ReleaseStep.of(release)), indent=2, allow_nan=False)
        with suppress(NameTakenError):
            self._storage.publish_file(f"{_folder(release.drafter_id)}/{name}", text.encode())

    def drafter_ids(self) -> list[str]:
        """Return the drafters that have taken a step, in order."""
        return sorted(self._storage.children(FOLDER))

    def steps(self, drafter_id: str, *, last: int | None = None) -> list[ReleaseStep]:
        """Return the steps of a drafter, the oldest first; a file that is damaged is left out.

        Args:
            drafter_id: An identifier.
            last: Only so many, the newest; None = all.
        """
        folder = _folder(drafter_id)
        names = self._storage.children(folder)
        found = []
        for name in names if last is None else names[-last:]:
            try:
                found.append(_parsed(self._storage.read(f"{folder}/{name}")))
            except (ArtifactError, ValueError, TypeError) as error:
                logger.warning("%s/%s: no release step, left out: %s", folder, name, error)
        return sorted(found, key=lambda step: step.order)


class RecordedReleases:
    """A board of releases whose steps are also kept (``learner.ports.ReleaseBoard``).

    Args:
        board: The releases.
        history: Where their steps are kept. If it refuses, releases go on; what it lacks is kept
            with the next step, or by the next writer if it is still on the board then.
    """

    def __init__(self, board: ReleaseBoard, history: ReleaseHistory) -> None:
        self._board = board
        self._history = history
        self._waiting: list[DrafterReleased] | None = None

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter in its own place."""
        return self._board.read_all()

    def read_beside(self) -> Sequence[DrafterReleased]:
        """Return the newest release of the version beside every drafter that has had one."""
        return self._board.read_beside()

    def publish(self, release: DrafterReleased) -> None:
        """Publish what stands in the drafter's own place, then keep the step."""
        self._catch_up()
        self._board.publish(release)
        self._keep(release)

    def publish_beside(self, release: DrafterReleased) -> None:
        """Publish what becomes of the version beside it, then keep the step."""
        self._catch_up()
        self._board.publish_beside(release)
        self._keep(release)

    def _catch_up(self) -> None:
        """Take up, once, what is on the board: its writer may have died before keeping it."""
        if self._waiting is None:
            self._waiting = [*self._board.read_all(), *self._board.read_beside()]
            self._write_waiting()

    def _keep(self, release: DrafterReleased) -> None:
        self._waiting = [*(self._waiting or ()), release]
        self._write_waiting()

    def _write_waiting(self) -> None:
        waiting = self._waiting or []
        try:
            while waiting:
                self._history.add(waiting[0])
                del waiting[0]
        except ArtifactError as error:
            logger.warning("%d release steps are not in the history: %s", len(waiting), error)


def _folder(drafter_id: str) -> str:
    try:
        checks.identifier("drafter_id", drafter_id)
    except ContractError as error:
        raise ArtifactError(error.path, found=error.found, expected=error.expected) from error
    return f"{FOLDER}/{drafter_id}"


def _finite(evidence: GateEvidence) -> dict[str, Any]:
    numbers = asdict(evidence)
    streams = [_without_nan(one) for one in numbers.pop("streams")]
    return _without_nan(numbers) | {"streams": streams}


def _without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    is_nan = {name for name, one in values.items() if isinstance(one, float) and math.isnan(one)}
    return {name: None if name in is_nan else value for name, value in values.items()}


def _parsed(data: bytes) -> ReleaseStep:
    values: Any = json.loads(data)
    if not isinstance(values, dict):
        raise ValueError(f"found {type(values).__name__}, expected an object")
    names = [one.name for one in fields(ReleaseStep)]
    missing = [name for name in names if name not in values]
    if missing:
        raise ValueError(f"found {sorted(values)}, expected also {', '.join(missing)}")
    step = ReleaseStep(**{name: values[name] for name in names})
    _ = step.order  # A time that is none is found here, not when steps are sorted.
    return step


def release_board(settings: Settings, log: EventLog, source: str = "") -> ReleaseBoard:
    """Return the board that versions are announced on, with the history of their steps.

    Args:
        settings: Say where the history is.
        log: Has the topic of releases.
        source: Who announces; empty = this learner.
    """
    board = LogReleaseBoard(log, source=source or settings.learner.learner_id)
    return RecordedReleases(board, ReleaseHistory(str(settings.data)))
