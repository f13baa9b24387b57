"""Whole, durable, never rewritten files on a local folder or any other fsspec store.

References are relative to the root (``drafters/head-a/7``), so a store can be mounted elsewhere
or moved without touching the messages that name its files. Names that begin with ``_`` are
temporary: nothing reads them, and a crash leaves nothing else behind.

On a local folder, files are synced and one rename makes them visible. On an object store the
file that makes a folder visible is created last, exclusively where the store can do that.
"""

from __future__ import annotations

import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from learner.ports import StoreError
from schemas import checks
from schemas.errors import ContractError

READ_ONLY = 0o444
FEATURES_FOLDER = "features"
"""Holds a folder per day of recorded hidden states (``pipeline.features``)."""

LEFTOVER_SECONDS = 3600.0
"""No write takes this long, so a temporary name older than this was left behind by a crash."""


class ArtifactError(StoreError):
    """A stored file or folder is not what it should be, or could not be stored.

    Attributes:
        path: The file or folder, with the part of it where that helps.
        found: What was found, as text.
        expected: What should have been there, as text.
    """

    def __init__(self, path: str, *, found: object, expected: object) -> None:
        self.path = path
        self.found = str(found)
        self.expected = str(expected)
        super().__init__(f"{path}: found {self.found}, expected {self.expected}")


class NameTakenError(ArtifactError, FileExistsError):
    """Another writer has published under this name."""


class Storage:
    """The files under one root.

    Args:
        root: A folder or an fsspec URL (``memory://x``, ``s3://bucket/x``). A local root is
            created with the first write. A remote store is used by the process that opened it.
    """

    def __init__(self, root: str) -> None:
        # Other processes publish and prune: a remembered listing would be a wrong one.
        filesystem, path = fsspec.core.url_to_fs(root, use_listings_cache=False)
        self.root = str(path).rstrip("/")
        self.is_local = isinstance(filesystem, LocalFileSystem)
        self._filesystem = filesystem

    def resolve(self, reference: str) -> str:
        """Return the path of a reference, which must stay under the root.

        Args:
            reference: Relative to the root, or a full URL below it. Every part must be an
                identifier, which leaves no way to write ``..``, a NUL or an escape.

        Raises:
            ArtifactError: If a part is no identifier or a symbolic link leads out of the root.
        """
        shown = repr(reference[:220])
        relative = self._relative(reference)
        for part in relative.split("/"):
            try:
                checks.identifier("name", part)
            except ContractError as error:
                raise ArtifactError(
                    shown, found=f"the part {part[:80]!r}", expected="identifiers joined by '/'"
                ) from error
        path = f"{self.root}/{relative}"
        if self.is_local:
            real, real_root = Path(path).resolve(), Path(self.root).resolve()
            if not real.is_relative_to(real_root):
                raise ArtifactError(shown, found=real, expected=f"a path under {real_root}")
        return path

    def _relative(self, reference: str) -> str:
        if "://" not in reference and not reference.startswith("/"):
            return reference.rstrip("/")
        path = str(self._filesystem._strip_protocol(reference))
        if not path.startswith(f"{self.root}/"):
            raise ArtifactError(
                repr(reference[:220]), found="a path elsewhere", expected=f"one under {self.root}"
            )
        return path[len(self.root) + 1 :]

    def read(self, reference: str) -> bytes:
        """Return a whole file, copied into memory.

        Raises:
            ArtifactError: If it cannot be read.
        """
        path = self.resolve(reference)
        with _refusals(path, "a readable file"):
            data: bytes = self._filesystem.cat_file(path)
            return data

    def exists(self, reference: str) -> bool:
        """Tell whether a file or folder is there."""
        return bool(self._filesystem.exists(self.resolve(reference)))

    def children(self, reference: str) -> list[str]:
        """Return the names in a folder, sorted, temporary ones left out; none if it is absent."""
        path = self.resolve(reference)
        with _refusals(path, "a readable folder"):
            if not self._filesystem.isdir(path):
                return []
            names = self._filesystem.ls(path, detail=False)
        bare = (str(name).rstrip("/").rsplit("/", 1)[-1] for name in names)
        return sorted(name for name in bare if not name.startswith("_"))

    def size_bytes(self, reference: str) -> int:
        """Return the size of a file."""
        path = self.resolve(reference)
        with _refusals(path, "a readable file"):
            return int(self._filesystem.size(path))

    def publish_file(self, reference: str, data: bytes) -> None:
        """Store one file, durable when this returns.

        Raises:
            NameTakenError: If the name is taken.
            ArtifactError: If the file cannot be written.
        """
        path = self.resolve(reference)
        with _refusals(path, "a name never used in a writable store"):
            if self._filesystem.exists(path):
                raise FileExistsError("a published file")
            if self.is_local:
                self._publish_local_file(Path(path), data)
            else:
                self._filesystem.pipe_file(path, data, mode="create")

    def publish_folder(
        self, reference: str, files: Mapping[str, bytes], *, visible_by: str
    ) -> None:
        """Store a folder whose files become visible together, durable when this returns.

        Args:
            reference: The folder; it must never have been published.
            files: Name to content; ``visible_by`` is one of the names, read first by readers.
            visible_by: The file that makes the folder count as published.

        Raises:
            NameTakenError: If the folder is published already.
            ArtifactError: If it cannot be written.
        """
        path = self.resolve(reference)
        with _refusals(path, "a folder never published in a writable store"):
            if self._filesystem.exists(f"{path}/{visible_by}"):
                raise FileExistsError("a published folder")
            if self.is_local:
                self._publish_local_folder(Path(path), files)
            else:
                self._publish_objects(path, files, visible_by)

    def _publish_local_file(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(temporary_name())
        try:
            _write_synced(staged, data)
            staged.rename(path)
        except OSError:
            staged.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def _publish_local_folder(self, path: Path, files: Mapping[str, bytes]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(temporary_name())
        staged.mkdir()
        try:
            for name, data in files.items():
                _write_synced(staged / name, data)
            _sync_folder(staged)
            _rename_to_new(staged, path)
        except OSError:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        _sync_folder(path.parent)
        _sync_folder(path.parent.parent)

    def _publish_objects(self, path: str, files: Mapping[str, bytes], visible_by: str) -> None:
        for name in sorted(files, key=lambda name: name == visible_by):
            self._filesystem.pipe_file(f"{path}/{name}", files[name], mode="create")
        # Not every store can create exclusively, so the loser of a race finds out here.
        if self._filesystem.cat_file(f"{path}/{visible_by}") != files[visible_by]:
            raise FileExistsError("a folder that another writer has just published")

    def delete_file(self, reference: str) -> None:
        """Delete one file if it is there."""
        path = self.resolve(reference)
        with _refusals(path, "a deletable file"):
            if self._filesystem.exists(path):
                self._filesystem.rm_file(path)

    def delete_folder(self, reference: str, *, visible_by: str | None) -> None:
        """Delete a folder; readers see all of it or none of it.

        Args:
            reference: The folder.
            visible_by: The file that makes it count as published; None = each file is by itself.
        """
        path = self.resolve(reference)
        with _refusals(path, "a deletable folder"):
            if self.is_local:
                hidden = Path(path).with_name(temporary_name())
                Path(path).rename(hidden)
                shutil.rmtree(hidden)
            else:
                if visible_by is not None:
                    self._filesystem.rm_file(f"{path}/{visible_by}")
                if self._filesystem.exists(path):
                    self._filesystem.rm(path, recursive=True)

    def delete_leftovers(self, reference: str) -> None:
        """Delete the temporary files and folders that crashed writers left in a local folder."""
        path = Path(self.resolve(reference))
        if not self.is_local or not path.is_dir():
            return
        latest = time.time() - LEFTOVER_SECONDS
        with _refusals(str(path), "a deletable folder"):
            for leftover in path.glob("_*"):
                if leftover.stat().st_mtime >= latest:
                    continue
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()


@contextmanager
def _refusals(path: str, expected: str) -> Iterator[None]:
    """Turn what the store raises into one error; every kind of store has exceptions of its own."""
    try:
        yield
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        kind = NameTakenError if isinstance(error, FileExistsError) else ArtifactError
        raise kind(path, found=found, expected=expected) from error


def temporary_name() -> str:
    """Return a name that no other writer uses and no reader looks at."""
    return f"_{uuid.uuid4().hex}"


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    path.chmod(READ_ONLY)


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_to_new(source: Path, destination: Path) -> None:
    """Rename a folder; a folder with content at the destination is never replaced."""
    try:
        source.rename(destination)
    except OSError as error:
        if destination.exists():
            raise FileExistsError("a published folder") from error
        raise
