"""One process at a time where two would undo each other's work; a lock dies with its holder."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from schemas.errors import KnownError


class LockError(KnownError):
    """A lock could not be had; the message names the folder and the cure."""


@contextmanager
def only_one(folder: Path, name: str, *, cure: str) -> Iterator[None]:
    """Hold the lock ``name`` of a folder while the block runs.

    Args:
        folder: Created where missing.
        name: Who holds it, as in ``worker worker-0``; the file is ``_worker-worker-0.lock``.
        cure: What to do if another process holds it.

    Raises:
        LockError: If another process holds it, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / f"_{name.replace(' ', '-')}.lock").open("ab")
    except OSError as error:
        raise LockError(f"{folder}: {error}; use a data folder that can be written") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise LockError(f"{folder}: another {name} is at work here; {cure}") from error
        yield
