"""Releases and artifacts in memory: where the trainer of a learning run publishes to.

The learning benchmark runs the production trainer thousands of updates long on replayed requests;
a file per update would measure the disk. What a version holds is kept by reference and never
changed, as the registry would.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import torch

from learner.updates.rule import WEIGHT
from schemas.events import DrafterReleased


@dataclass(frozen=True, slots=True)
class MemoryVersion:
    """One version (``learner.ports.StoredVersion``)."""

    version: int
    uri: str
    manifest_sha256: str
    tensors: Mapping[str, torch.Tensor]
    config: Mapping[str, Any]
    training_state: Mapping[str, torch.Tensor]


@dataclass(slots=True)
class MemoryStore:
    """Versions of drafter weights (``learner.ports.ArtifactStore``)."""

    uri_to_version: dict[str, MemoryVersion] = field(default_factory=dict)

    def write(
        self,
        drafter_id: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Any],
        *,
        training_state: Mapping[str, torch.Tensor] | None = None,
    ) -> MemoryVersion:
        """Keep a version; it must not exist yet.

        Raises:
            FileExistsError: If it does.
        """
        uri = _uri(drafter_id, version)
        if uri in self.uri_to_version:
            raise FileExistsError(f"{uri} exists already")
        proof = sha256(uri.encode()).hexdigest()
        stored = MemoryVersion(
            version, uri, proof, dict(tensors), dict(config), dict(training_state or {})
        )
        self.uri_to_version[uri] = stored
        return stored

    def copy(self, drafter_id: str, version: int, *, as_drafter_id: str) -> MemoryVersion:
        """Publish a version under another drafter's id."""
        source = self.uri_to_version[_uri(drafter_id, version)]
        number = max(self.versions(as_drafter_id), default=-1) + 1
        return self.write(
            as_drafter_id,
            number,
            source.tensors,
            source.config,
            training_state=source.training_state,
        )

    def add_to_training_state(self, uri: str, moments: Mapping[str, torch.Tensor]) -> None:
        """Let an optimizer go on that has stepped before, in every expert of the rule.

        Args:
            uri: Of a version whose rule has not stepped yet.
            moments: As an online gradient's state names them.
        """
        version = self.uri_to_version[uri]
        known = version.training_state
        prefixes = {name.partition(WEIGHT)[0] for name in known if WEIGHT in name}
        more = {prefix + name: tensor for prefix in prefixes for name, tensor in moments.items()}
        self.uri_to_version[uri] = replace(version, training_state={**known, **more})

    def read_config(self, uri: str, *, manifest_sha256: str) -> Mapping[str, Any]:
        """Return the config of a version."""
        return self.uri_to_version[uri].config

    def read_training_state(self, uri: str, *, manifest_sha256: str) -> Mapping[str, torch.Tensor]:
        """Return the training state of a version."""
        return self.uri_to_version[uri].training_state

    def versions(self, drafter_id: str) -> Sequence[int]:
        """Return the versions that exist, ascending."""
        start = _uri(drafter_id, "")
        found = [uri.removeprefix(start) for uri in self.uri_to_version if uri.startswith(start)]
        return sorted(map(int, found))

    def prune(self, drafter_id: str, keep: int, protected: Collection[int]) -> Sequence[int]:
        """Delete all but the newest ``keep`` and the protected versions."""
        known = self.versions(drafter_id)
        gone = [version for version in known[:-keep] if version not in protected]
        for version in gone:
            del self.uri_to_version[_uri(drafter_id, version)]
        return gone


@dataclass(slots=True)
class MemoryBoard:
    """What stands in every drafter's own place and beside it (``learner.ports.ReleaseBoard``).

    Attributes:
        history: Every release, in the order of publishing.
    """

    id_to_live: dict[str, DrafterReleased] = field(default_factory=dict)
    id_to_beside: dict[str, DrafterReleased] = field(default_factory=dict)
    history: list[DrafterReleased] = field(default_factory=list)
    _num_taken: int = 0

    def read_all(self) -> Sequence[DrafterReleased]:
        """Return the newest release of every drafter in its own place."""
        return list(self.id_to_live.values())

    def read_beside(self) -> Sequence[DrafterReleased]:
        """Return the newest release of the version beside every drafter that has had one."""
        return list(self.id_to_beside.values())

    def publish(self, release: DrafterReleased) -> None:
        """Publish what stands in the drafter's own place."""
        self.id_to_live[release.drafter_id] = release
        self.history.append(release)

    def publish_beside(self, release: DrafterReleased) -> None:
        """Publish what becomes of the version beside it."""
        self.id_to_beside[release.drafter_id] = release
        self.history.append(release)

    def take(self) -> Sequence[DrafterReleased]:
        """Return what was published since the last call, in order."""
        taken = self.history[self._num_taken :]
        self._num_taken = len(self.history)
        return taken


def _uri(drafter_id: str, version: int | str) -> str:
    return f"memory://{drafter_id}/{version}"
