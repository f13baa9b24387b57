"""What an operator does with the versions of a drafter: look, promote, roll back, retire, move.

Every act is one or two releases on the same board that the learner writes to. A learner that is
running notices before its own next release and begins again from what it finds there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from learner.lifecycle import refuse_transition
from learner.ports import ReleaseBoard
from learner.release_desk import ON_TRIAL
from pipeline.releases.registry import ArtifactError, DrafterRegistry, Json
from pipeline.releases.release_history import ReleaseHistory, ReleaseStep
from schemas.errors import KnownError
from schemas.events import DrafterReleased, ReleaseState, Watermark

MANIFEST = "manifest.json"


class DrafterVersionError(KnownError):
    """A version is not there, or not in a state that allows the act; the message says which."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRow:
    """One stored version as it is listed; ``release`` is what the board says of it, if anything."""

    drafter_id: str
    version: int
    state: str
    release: DrafterReleased | None


class DrafterVersions:
    """The versions of all drafters, and what may be done with them.

    Args:
        registry: Artifacts.
        board: Releases.
        now: Returns the time in UTC.
        history: The steps of releases; None = only what is on the board is known.
    """

    def __init__(
        self,
        registry: DrafterRegistry,
        board: ReleaseBoard,
        *,
        now: Callable[[], datetime],
        history: ReleaseHistory | None = None,
    ) -> None:
        self._registry = registry
        self._board = board
        self._now = now
        self._history = history

    def rows(self, drafter_id: str | None = None) -> list[VersionRow]:
        """Return the stored versions of one drafter or of all, in order.

        Raises:
            DrafterVersionError: If there is no such drafter.
        """
        ids = self._registry.drafter_ids()
        if drafter_id is not None and drafter_id not in ids:
            raise DrafterVersionError(
                f"drafter {drafter_id}: nothing of it is stored, known are {', '.join(ids) or '-'}"
            )
        wanted = ids if drafter_id is None else [drafter_id]
        return [self._row(one, version) for one in wanted for version in self._versions(one)]

    def history(self, drafter_id: str, *, last: int | None = None) -> list[ReleaseStep]:
        """Return the steps that the releases of a drafter have taken, the oldest first.

        Args:
            drafter_id: Of the drafter.
            last: Only so many, the newest; None = all.
        """
        kept = [] if self._history is None else self._history.steps(drafter_id, last=last)
        places = (self._own(drafter_id), self._beside(drafter_id))
        order_to_step = {
            step.order: step
            for step in (*kept, *(ReleaseStep.of(one) for one in places if one is not None))
        }
        steps = [order_to_step[order] for order in sorted(order_to_step)]
        return steps if last is None else steps[-last:]

    def _versions(self, drafter_id: str) -> list[int]:
        return self._registry.versions(drafter_id)

    def _row(self, drafter_id: str, version: int) -> VersionRow:
        places = (self._own(drafter_id), self._beside(drafter_id))
        for release in places:
            if release is not None and release.version == version:
                return VersionRow(
                    drafter_id=drafter_id,
                    version=version,
                    state=release.state.value,
                    release=release,
                )
        return VersionRow(drafter_id=drafter_id, version=version, state="-", release=None)

    def promote(self, drafter_id: str, version: int, reason: str) -> DrafterReleased:
        """Make a stored version live, whatever the gate says.

        Raises:
            DrafterVersionError: If it is live already.
            ArtifactError: If it is not stored, or damaged.
        """
        own, beside = self._own(drafter_id), self._beside(drafter_id)
        state = ReleaseState.RETIRED
        for place in (beside, own):
            if place is not None and place.version == version:
                state = place.state
        if state is ReleaseState.LIVE:
            raise DrafterVersionError(f"drafter {drafter_id} version {version} is live already")
        refuse_transition(drafter_id, version, state, ReleaseState.LIVE)
        release = self.stored(drafter_id, version)
        taken = own.training_window if own is not None and own.version > version else None
        self._publish(release, ReleaseState.LIVE, reason, window=taken)
        if beside is not None and beside.state in ON_TRIAL:
            self._board.publish_beside(self._changed(beside, ReleaseState.RETIRED, reason))
        return release

    def rollback(self, drafter_id: str, to: int | None, reason: str) -> tuple[int, int]:
        """Withdraw the live version and bring an older one back.

        Args:
            drafter_id: Of the drafter.
            to: The older version; None = the newest stored below the live one.
            reason: Why.

        Returns:
            The withdrawn and the restored version.

        Raises:
            DrafterVersionError: If nothing is live, or there is no older version.
        """
        own = self._own(drafter_id)
        if own is None or own.state is not ReleaseState.LIVE:
            raise DrafterVersionError(f"drafter {drafter_id}: no version is live")
        older = [one for one in self._versions(drafter_id) if one < own.version]
        chosen = to if to is not None else max(older, default=None)
        if chosen is None or chosen not in older:
            raise DrafterVersionError(
                f"drafter {drafter_id}: cannot go back from version {own.version} to "
                f"{'an older one' if chosen is None else chosen}, stored below it are {older}"
            )
        back = self.stored(drafter_id, chosen)
        self._publish(back, ReleaseState.LIVE, reason, window=own.training_window)
        self._board.publish_beside(self._changed(own, ReleaseState.ROLLED_BACK, reason))
        return own.version, chosen

    def retire(self, drafter_id: str, reason: str) -> int:
        """Take a drafter out of service; it proposes nothing and learns nothing from then on.

        Returns:
            The version that was live.

        Raises:
            DrafterVersionError: If nothing is live.
        """
        own, beside = self._own(drafter_id), self._beside(drafter_id)
        if own is None or own.state is not ReleaseState.LIVE:
            raise DrafterVersionError(f"drafter {drafter_id}: no version is live")
        self._publish(own, ReleaseState.RETIRED, reason)
        if beside is not None and beside.state in ON_TRIAL:
            self._board.publish_beside(self._changed(beside, ReleaseState.RETIRED, reason))
        return own.version

    def export(self, drafter_id: str, version: int, folder: Path) -> list[Path]:
        """Copy a version, checked, with everything that training needs, to a new folder.

        Raises:
            DrafterVersionError: If the folder exists and is not empty.
            ArtifactError: If the version is not stored, or damaged.
        """
        refuse_filled(folder)
        stored = self._registry.find(drafter_id, version)
        files = self._registry.files(stored)
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return [folder / name for name in files]

    def bring(self, folder: Path, drafter_id: str | None) -> tuple[str, int]:
        """Store an exported version under the next number; it does not go live by that.

        Args:
            folder: That ``export`` has written.
            drafter_id: Another drafter than the one it names; None = the same.

        Returns:
            Drafter and number of the version.

        Raises:
            ArtifactError: If a file is not what the manifest says.
            DrafterVersionError: If the drafter is of another target, tokenizer or vocabulary.
        """
        manifest, files = _read_export(folder)
        name = drafter_id or str(manifest["drafter_id"])
        config: Json = json.loads(files["config"])
        self._refuse_other(name, config)
        own = self._own(name)
        known = [*self._versions(name), -1 if own is None else own.version]
        version = max(known) + 1
        state = files.get("training_state")
        self._registry.write(
            name,
            version,
            _tensors(folder, files["weights"]),
            config,
            training_state=None if state is None else _tensors(folder, state),
            card=files["card"].decode(errors="replace") if "card" in files else "",
        )
        return name, version

    def _refuse_other(self, drafter_id: str, config: Json) -> None:
        own = self._own(drafter_id)
        if own is None:
            return
        for key in (
            "architecture",
            "target_fingerprint",
            "tokenizer_hash",
            "draft_vocabulary_hash",
        ):
            if config.get(key) != getattr(own, key):
                raise DrafterVersionError(
                    f"drafter {drafter_id}: {key} of the import is {config.get(key)}, of the "
                    f"released drafter {getattr(own, key)}; import it under another id with --as"
                )

    def stored(self, drafter_id: str, version: int) -> DrafterReleased:
        """Return a release of a stored version, its facts read from its own config.

        Raises:
            ArtifactError: If the version is not stored, or damaged.
        """
        stored = self._registry.find(drafter_id, version)
        config = self._registry.read_config(stored.uri, manifest_sha256=stored.manifest_sha256)
        older = [one for one in self._versions(drafter_id) if one < version]
        contained = config.get("contained", {})
        try:
            return DrafterReleased(
                drafter_id=drafter_id,
                version=version,
                parent_version=max(older, default=-1),
                state=ReleaseState.CANDIDATE,
                produced_at=self._now(),
                artifact_uri=stored.uri,
                manifest_sha256=stored.manifest_sha256,
                architecture=config["architecture"],
                target_fingerprint=config["target_fingerprint"],
                tokenizer_hash=config["tokenizer_hash"],
                draft_vocabulary_hash=config["draft_vocabulary_hash"],
                training_window=Watermark(
                    partition_to_offset={int(p): int(one["offset"]) for p, one in contained.items()}
                ),
                evidence=None,
                reason="",
            )
        except KeyError as error:
            raise ArtifactError(
                f"{stored.uri}/config", found=sorted(config), expected=f"a value for {error}"
            ) from error

    def _publish(
        self,
        release: DrafterReleased,
        state: ReleaseState,
        reason: str,
        *,
        window: Watermark | None = None,
    ) -> None:
        changed = self._changed(release, state, reason)
        self._board.publish(replace(changed, training_window=window or changed.training_window))

    def _changed(
        self, release: DrafterReleased, state: ReleaseState, reason: str
    ) -> DrafterReleased:
        text = f"by hand: {reason}" if reason else "by hand"
        return replace(release, state=state, produced_at=self._now(), reason=text)

    def _own(self, drafter_id: str) -> DrafterReleased | None:
        found = {one.drafter_id: one for one in self._board.read_all()}
        return found.get(drafter_id)

    def _beside(self, drafter_id: str) -> DrafterReleased | None:
        found = {one.drafter_id: one for one in self._board.read_beside()}
        return found.get(drafter_id)


def refuse_filled(folder: Path) -> None:
    """Refuse to write a version among other files.

    Raises:
        DrafterVersionError: If the folder exists and is not empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DrafterVersionError(f"{folder}: not empty, name a folder that does not exist")


def _read_export(folder: Path) -> tuple[Json, dict[str, bytes]]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        files = {}
        for role, entry in manifest["files"].items():
            data = (folder / Path(str(entry["name"])).name).read_bytes()
            digest = sha256(data).hexdigest()
            if digest != entry["sha256"]:
                raise ArtifactError(
                    str(folder / entry["name"]),
                    found=f"sha256 {digest}",
                    expected=f"sha256 {entry['sha256']}",
                )
            files[role] = data
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            str(folder / MANIFEST), found=error, expected="a folder that export has written"
        ) from error
    if not {"weights", "config"} <= files.keys():
        raise ArtifactError(
            str(folder / MANIFEST), found=sorted(files), expected="weights and a config"
        )
    return manifest, files


def _tensors(folder: Path, data: bytes) -> dict[str, torch.Tensor]:
    try:
        return dict(safetensors.torch.load(data))
    except SafetensorError as error:
        raise ArtifactError(str(folder), found=error, expected="safetensors") from error
