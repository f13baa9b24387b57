"""The drafter registry: every version of every drafter's weights, written once, checked on load.

``drafters/<drafter_id>/<version>/`` holds safetensors, the config, a model card and
``manifest.json``, which names every file with its size and sha256. A release carries the sha256
of the manifest, so one hash in a message proves the whole folder. Pickle is never read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, TypeAlias

import safetensors.torch
import torch
from safetensors import SafetensorError

from pipeline.storage import ArtifactError, NameTakenError, Storage, temporary_name
from schemas import checks
from schemas.errors import ContractError

__all__ = [
    "ArtifactError",
    "DrafterRegistry",
    "Json",
    "LoadedArtifact",
    "NameTakenError",
    "StoredArtifact",
    "TensorSpec",
]

FORMAT = "draftloop-drafter"
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
FILE_NAMES = {
    "weights": "weights.safetensors",
    "training_state": "training_state.safetensors",
    "config": "config.json",
    "card": "README.md",
}

Json: TypeAlias = Any
"""A value of a config: None, bool, number, text, list or mapping of these."""

TensorSpec: TypeAlias = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype that a tensor must have."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredArtifact:
    """A version as it was published; ``uri`` is relative to the registry's root."""

    uri: str
    manifest_sha256: str
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedArtifact:
    """A version in memory: its config and its tensors, sharing no memory with any file."""

    config: Mapping[str, Json]
    tensors: Mapping[str, torch.Tensor]


class DrafterRegistry:
    """Writes, reads, lists and prunes versions.

    Args:
        root: Folder or fsspec URL that holds ``drafters/``.
        now: The clock for the manifest's ``created``, in UTC.
        keep_seconds: A version is not pruned before its successor has been there for so long.
            Until then somebody may still ask for it: a worker that loads slowly, or whoever reads
            an announcement that arrived late, or the last one left by a broker that forgot others.
    """

    def __init__(
        self,
        root: str,
        *,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        keep_seconds: float = 0.0,
    ) -> None:
        self._storage = Storage(root)
        self._now = now
        self._keep_seconds = keep_seconds

    def write(
        self,
        drafter_id: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        config: Mapping[str, Json],
        *,
        training_state: Mapping[str, torch.Tensor] | None = None,
        card: str = "",
    ) -> StoredArtifact:
        """Publish one version, durable and visible as a whole when this returns.

        Args:
            drafter_id: An identifier.
            version: >= 0, never published before for this drafter.
            tensors: The weights; tied and non-contiguous ones are stored as copies.
            config: What is needed to build the drafter; JSON without NaN.
            training_state: Optimizer and master weights, read by the trainer alone.
            card: Model card in Markdown; a short one is written if empty.

        Raises:
            NameTakenError: If the version exists: another publisher has written it.
            ArtifactError: If a value is not finite, or the store refuses.
        """
        folder = _version_folder(drafter_id, version)
        contents = {
            "weights": _tensor_bytes(f"{folder}/{FILE_NAMES['weights']}", tensors),
            "config": _config_bytes(f"{folder}/{FILE_NAMES['config']}", config),
            "card": (card or f"# {drafter_id}, version {version}\n").encode(),
        }
        if training_state is not None:
            where = f"{folder}/{FILE_NAMES['training_state']}"
            contents["training_state"] = _tensor_bytes(where, training_state)
        # Objects cannot be renamed as a folder: unique names keep two publishers apart there.
        prefix = "" if self._storage.is_local else f"{temporary_name()[1:13]}-"
        names = {role: prefix + FILE_NAMES[role] for role in contents}
        manifest = _manifest_bytes(drafter_id, version, self._now(), names, contents)
        files = {names[role]: data for role, data in contents.items()} | {MANIFEST: manifest}
        self._storage.publish_folder(folder, files, visible_by=MANIFEST)
        return StoredArtifact(uri=folder, manifest_sha256=_digest(manifest), version=version)

    def read(
        self,
        uri: str,
        *,
        manifest_sha256: str,
        expected: Mapping[str, TensorSpec] | None = None,
    ) -> LoadedArtifact:
        """Load a version after checking everything that can be checked.

        Args:
            uri: Folder of the version, as published.
            manifest_sha256: From the release.
            expected: Name to shape and dtype of every tensor, or None to take what is there.

        Raises:
            ArtifactError: If a hash, size, name, shape, dtype or value is not as expected.
        """
        manifest = self._manifest(uri, manifest_sha256)
        config = _parse_json(f"{uri}/config", self._file(uri, manifest, "config"))
        tensors = self._tensors(uri, manifest, "weights")
        if expected is not None:
            _check_specs(uri, tensors, expected)
        return LoadedArtifact(config=config, tensors=tensors)

    def read_config(self, uri: str, *, manifest_sha256: str) -> Mapping[str, Json]:
        """Load the config alone, to learn which tensors to expect."""
        manifest = self._manifest(uri, manifest_sha256)
        return _parse_json(f"{uri}/config", self._file(uri, manifest, "config"))

    def read_training_state(self, uri: str, *, manifest_sha256: str) -> Mapping[str, torch.Tensor]:
        """Load the trainer's tensors, checked like the weights."""
        return self._tensors(uri, self._manifest(uri, manifest_sha256), "training_state")

    def copy(self, drafter_id: str, version: int, *, as_drafter_id: str) -> StoredArtifact:
        """Publish a version, checked, under another drafter's id, once.

        Returns:
            The copy: the next version of that drafter, or the one that has the same weights.

        Raises:
            ArtifactError: If the version is not there, or damaged, or the store refuses.
        """
        source = self.find(drafter_id, version)
        manifest = self._manifest(source.uri, source.manifest_sha256)
        wanted = manifest["files"]["weights"]["sha256"]
        known = self.versions(as_drafter_id)
        for one in known:
            copy = self.find(as_drafter_id, one)
            files = self._manifest(copy.uri, copy.manifest_sha256)["files"]
            if files["weights"]["sha256"] == wanted:
                return copy
        state = "training_state" in manifest["files"]
        return self.write(
            as_drafter_id,
            max(known, default=-1) + 1,
            self._tensors(source.uri, manifest, "weights"),
            _parse_json(f"{source.uri}/config", self._file(source.uri, manifest, "config")),
            training_state=self._tensors(source.uri, manifest, "training_state") if state else None,
        )

    def versions(self, drafter_id: str) -> list[int]:
        """Return the published versions in ascending order, as their manifests number them.

        A folder whose manifest cannot be read or names something else is left out and logged.
        """
        folder = _drafter_folder(drafter_id)
        found = []
        for name in self._storage.children(folder):
            uri = f"{folder}/{name}"
            if not self._storage.exists(f"{uri}/{MANIFEST}"):
                continue
            try:
                found.append(int(self._manifest(uri, None)["version"]))
            except ArtifactError as error:
                logger.warning("not a version, left out: %s", error)
        return sorted(found)

    def drafter_ids(self) -> list[str]:
        """Return the drafters that have versions, in order."""
        return sorted(name for name in self._storage.children("drafters") if self.versions(name))

    def find(self, drafter_id: str, version: int) -> StoredArtifact:
        """Return a version by its number.

        Raises:
            ArtifactError: If it was never published, or its manifest is damaged.
        """
        uri = _version_folder(drafter_id, version)
        if not self._storage.exists(f"{uri}/{MANIFEST}"):
            raise ArtifactError(
                f"drafter {drafter_id} version {version}",
                found="no such version",
                expected=f"one of {self.versions(drafter_id)}",
            )
        self._manifest(uri, None)
        digest = _digest(self._storage.read(f"{uri}/{MANIFEST}"))
        return StoredArtifact(uri=uri, manifest_sha256=digest, version=version)

    def files(self, stored: StoredArtifact) -> Mapping[str, bytes]:
        """Return all files of a version by their plain names, each checked; its manifest last."""
        manifest = self._manifest(stored.uri, stored.manifest_sha256)
        roles = sorted(manifest["files"])
        contents = {role: self._file(stored.uri, manifest, role) for role in roles}
        named = {FILE_NAMES.get(role, role): data for role, data in contents.items()}
        plain = {**manifest, "files": {r: _entry(FILE_NAMES.get(r, r), contents[r]) for r in roles}}
        return named | {MANIFEST: json.dumps(plain, indent=2, sort_keys=True).encode()}

    def prune(self, drafter_id: str, keep: int, protected: Collection[int]) -> list[int]:
        """Delete all but the newest ``keep`` versions, the protected ones, and the recent ones.

        Args:
            drafter_id: An identifier.
            keep: >= 1.
            protected: Versions in use anywhere; never deleted.

        Returns:
            The deleted versions, ascending.
        """
        if keep < 1:
            raise ValueError(f"keep={keep} outside 1..: it would delete every version")
        versions = self.versions(drafter_id)
        doomed = [
            version
            for place, version in enumerate(versions[:-keep])
            if version not in protected and self._is_settled(drafter_id, versions[place + 1])
        ]
        for version in doomed:
            self._storage.delete_folder(_version_folder(drafter_id, version), visible_by=MANIFEST)
        self._storage.delete_leftovers(_drafter_folder(drafter_id))
        return doomed

    def _is_settled(self, drafter_id: str, version: int) -> bool:
        """Tell whether a version is there for long enough to prune what came before it."""
        if not self._keep_seconds:
            return True
        manifest = self._manifest(_version_folder(drafter_id, version), None)
        age = self._now() - datetime.fromisoformat(str(manifest["created"]))
        return age.total_seconds() >= self._keep_seconds

    def _manifest(self, uri: str, manifest_sha256: str | None) -> Mapping[str, Json]:
        path = self._storage.resolve(uri)
        data = self._storage.read(f"{uri.rstrip('/')}/{MANIFEST}")
        if manifest_sha256 is not None and _digest(data) != manifest_sha256:
            raise ArtifactError(
                f"{path}/{MANIFEST}",
                found=f"sha256 {_digest(data)}",
                expected=f"sha256 {manifest_sha256}",
            )
        manifest = _parse_json(f"{path}/{MANIFEST}", data)
        _check_manifest(path, manifest)
        return manifest

    def _file(self, uri: str, manifest: Mapping[str, Json], role: str) -> bytes:
        if role not in manifest["files"]:
            raise ArtifactError(
                self._storage.resolve(uri), found=sorted(manifest["files"]), expected=f"a {role}"
            )
        entry = manifest["files"][role]
        reference = f"{uri.rstrip('/')}/{entry['name']}"
        data = self._storage.read(reference)
        for what, found, expected in (
            ("size", len(data), entry["size_bytes"]),
            ("sha256", _digest(data), entry["sha256"]),
        ):
            if found != expected:
                raise ArtifactError(
                    self._storage.resolve(reference),
                    found=f"{what} {found}",
                    expected=f"{what} {expected}",
                )
        return data

    def _tensors(
        self, uri: str, manifest: Mapping[str, Json], role: str
    ) -> Mapping[str, torch.Tensor]:
        data = self._file(uri, manifest, role)
        where = f"{self._storage.resolve(uri)}/{manifest['files'][role]['name']}"
        try:
            tensors = safetensors.torch.load(data)
        except SafetensorError as error:
            raise ArtifactError(where, found=error, expected="safetensors") from error
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        _check_finite(where, copies)
        return copies


def _drafter_folder(drafter_id: str) -> str:
    try:
        checks.identifier("drafter_id", drafter_id)
    except ContractError as error:
        raise ArtifactError(error.path, found=error.found, expected=error.expected) from error
    return f"drafters/{drafter_id}"


def _version_folder(drafter_id: str, version: int) -> str:
    folder = _drafter_folder(drafter_id)
    if version < 0:
        raise ArtifactError(f"{folder}: version", found=version, expected=">= 0")
    return f"{folder}/{version}"


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def _tensor_bytes(where: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Serialise copies, so that tied and strided tensors are stored as they read."""
    copies = {
        name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()
    }
    _check_finite(where, copies)
    return safetensors.torch.save(copies)


def _config_bytes(where: str, config: Mapping[str, Json]) -> bytes:
    try:
        return json.dumps(dict(config), indent=2, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ArtifactError(where, found=error, expected="JSON without NaN") from error


def _manifest_bytes(
    drafter_id: str,
    version: int,
    created: datetime,
    names: Mapping[str, str],
    contents: Mapping[str, bytes],
) -> bytes:
    files = {role: _entry(names[role], data) for role, data in contents.items()}
    manifest = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "drafter_id": drafter_id,
        "version": version,
        "created": created.isoformat(),
        "files": files,
    }
    return json.dumps(manifest, indent=2, sort_keys=True).encode()


def _entry(name: str, data: bytes) -> dict[str, Json]:
    return {"name": name, "size_bytes": len(data), "sha256": _digest(data)}


def _parse_json(where: str, data: bytes) -> Mapping[str, Json]:
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise ArtifactError(where, found=error, expected="JSON") from error
    if not isinstance(parsed, dict):
        raise ArtifactError(where, found=type(parsed).__name__, expected="a JSON object")
    return parsed


def _check_manifest(path: str, manifest: Mapping[str, Json]) -> None:
    """Refuse a manifest of another format, a newer one, or one of another folder."""
    where = f"{path}/{MANIFEST}"
    drafter_id, version = path.split("/")[-2:]
    for key, expected in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
        if manifest.get(key) != expected:
            raise ArtifactError(f"{where}: {key}", found=manifest.get(key), expected=expected)
    named = f"{manifest.get('drafter_id')}/{manifest.get('version')}"
    if named != f"{drafter_id}/{version}":
        raise ArtifactError(
            where, found=f"the manifest of {named}", expected=f"of {drafter_id}/{version}"
        )
    files = manifest.get("files")
    keys = {"name", "size_bytes", "sha256"}
    if not isinstance(files, dict) or not all(
        isinstance(entry, dict) and keys <= entry.keys() for entry in files.values()
    ):
        raise ArtifactError(f"{where}: files", found=files, expected=f"entries of {sorted(keys)}")


def _check_finite(where: str, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ArtifactError(
                f"{where}: {name}", found=f"{bad} values NaN or infinite", expected="finite values"
            )


def _check_specs(
    where: str, tensors: Mapping[str, torch.Tensor], expected: Mapping[str, TensorSpec]
) -> None:
    if tensors.keys() != expected.keys():
        raise ArtifactError(
            where,
            found=f"tensors {sorted(tensors.keys() - expected.keys())} not expected",
            expected=f"tensors {sorted(expected.keys() - tensors.keys())} not found",
        )
    for name, (shape, dtype) in expected.items():
        tensor = tensors[name]
        found: TensorSpec = (tuple(tensor.shape), tensor.dtype)
        if found != (shape, dtype):
            raise ArtifactError(f"{where}: {name}", found=found, expected=(shape, dtype))
