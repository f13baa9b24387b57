"""Recorded features: the target's hidden states of consenting streams, beside the event log.

One file per segment, ``features/<date>/<worker_id>/<epoch>-<number>.safetensors``, with one
float16 tensor ``hidden`` (P, H). The reference that travels in the event carries the sha256 of
the referenced rows (float16, little-endian, row by row), so it proves the numbers themselves.

The order is: file durable, then event sent. The serving path only converts and hashes the rows;
the emitter's thread writes them just before it sends the event that refers to them.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from pipeline.storage import FEATURES_FOLDER, ArtifactError, Storage
from schemas import checks
from schemas.events import FeatureReference, VerificationEvent

TENSOR = "hidden"
_ROW_DTYPE = np.dtype("<f2")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StoredFile:
    reference: str
    size_bytes: int


class FeatureRecorder:
    """Records the hidden states of one worker, never at the cost of serving.

    ``record`` runs on the serving path and touches no disk. ``prepare`` runs in the emitter's
    thread (it is the emitter's ``prepare`` hook). Where features cannot be stored, the event goes
    out without them and is counted.

    Args:
        root: Folder or fsspec URL that holds ``features/``.
        worker_id: An identifier; only files of this worker count towards, and are removed for,
            its quota.
        worker_epoch: Start of this worker, never used before by it.
        max_bytes: Most bytes of recorded features to keep, >= 1; the oldest files go first.
        max_waiting_bytes: Most bytes recorded but not yet written; the oldest rows go first,
            as their events have been dropped or wait behind a log that does not answer.
        share: Share of the segments that are recorded, in (0, 1]: evenly, the first among them.
        now: The clock that dates the folders, in UTC.

    Attributes:
        num_left_out: Segments that were not of the share.
        num_recorded: Segments handed in with usable rows.
        num_written: Segments stored.
        num_refused: Segments with a value that is NaN or that float16 cannot hold.
        num_failed: Segments whose event went out without features.
        num_removed: Files removed to keep the quota.
    """

    def __init__(
        self,
        root: str,
        *,
        worker_id: str,
        worker_epoch: int,
        max_bytes: int,
        max_waiting_bytes: int = 256 * 2**20,
        share: float = 1.0,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        checks.identifier("worker_id", worker_id)
        for name, value in (("max_bytes", max_bytes), ("max_waiting_bytes", max_waiting_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value} outside 1..")
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share={share} outside (0, 1]")
        self._storage = Storage(root)
        self._share = share
        self._due = 1.0 - share
        self.num_left_out = 0
        self._worker_id = worker_id
        self._worker_epoch = worker_epoch
        self._max_bytes = max_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._now = now
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, NDArray[np.float16]] = OrderedDict()
        self._waiting_bytes = 0
        self._stored: deque[_StoredFile] | None = None
        self._stored_bytes = 0
        self.num_recorded = 0
        self.num_written = 0
        self.num_refused = 0
        self.num_failed = 0
        self.num_removed = 0

    def record(self, hidden: torch.Tensor | NDArray[np.floating]) -> FeatureReference | None:
        """Take over the rows of one segment and return the reference for its event.

        Args:
            hidden: Last hidden states, shape (P, H), on any device and of any float type.

        Returns:
            The reference, or None if the segment is not of the share, or float16 cannot hold a
            value (or one is NaN).

        Raises:
            ValueError: If ``hidden`` is not two-dimensional.
        """
        rows = _half_precision(hidden)
        if rows.ndim != 2:
            raise ValueError(f"hidden has shape {rows.shape}, expected (P, H)")
        with self._lock:
            if not self._is_of_the_share():
                return None
            if not np.isfinite(rows).all():
                self.num_refused += 1
                return None
            reference = self._reference(rows)
            self.num_recorded += 1
            self._waiting[reference.uri] = rows
            self._waiting_bytes += rows.nbytes
            while self._waiting_bytes > self._max_waiting_bytes:
                _, oldest = self._waiting.popitem(last=False)
                self._waiting_bytes -= oldest.nbytes
            return reference

    def _is_of_the_share(self) -> bool:
        self._due += self._share
        if self._due < 1.0:
            self.num_left_out += 1
            return False
        self._due -= 1.0
        return True

    def _reference(self, rows: NDArray[np.float16]) -> FeatureReference:
        date = self._now().date().isoformat()
        name = f"{self._worker_epoch:020d}-{self.num_recorded:012d}.safetensors"
        return FeatureReference(
            uri=f"{FEATURES_FOLDER}/{date}/{self._worker_id}/{name}",
            first_row=0,
            num_rows=rows.shape[0],
            sha256=_digest(rows),
        )

    def prepare(self, events: Sequence[VerificationEvent]) -> Sequence[VerificationEvent]:
        """Store the features that the events refer to; strip the reference where that fails."""
        return [self._prepare(event) for event in events]

    def _prepare(self, event: VerificationEvent) -> VerificationEvent:
        content = event.content
        if content is None or content.features is None:
            return event
        try:
            self._write(content.features.uri)
        except ArtifactError as error:
            self.num_failed += 1
            logger.warning("event %s goes out without features: %s", event.event_id, error)
            return replace(event, content=replace(content, features=None))
        self.num_written += 1
        return event

    def _write(self, uri: str) -> None:
        with self._lock:
            rows = self._waiting.pop(uri, None)
            if rows is None:
                raise ArtifactError(uri, found="nothing waiting", expected="recorded rows")
            self._waiting_bytes -= rows.nbytes
        data = safetensors.numpy.save({TENSOR: rows})
        stored = self._stored_files()
        self._make_room(stored, len(data))
        self._storage.publish_file(uri, data)
        stored.append(_StoredFile(reference=uri, size_bytes=len(data)))
        self._stored_bytes += len(data)

    def _make_room(self, stored: deque[_StoredFile], size_bytes: int) -> None:
        if size_bytes > self._max_bytes:
            raise ArtifactError(
                FEATURES_FOLDER,
                found=f"{size_bytes} bytes",
                expected=f"at most {self._max_bytes} bytes",
            )
        while stored and self._stored_bytes + size_bytes > self._max_bytes:
            oldest = stored[0]
            self._storage.delete_file(oldest.reference)
            stored.popleft()
            self._stored_bytes -= oldest.size_bytes
            self.num_removed += 1

    def _stored_files(self) -> deque[_StoredFile]:
        """List this worker's files once, oldest first: their padded names sort by age."""
        if self._stored is None:
            folders = [
                f"{FEATURES_FOLDER}/{date}/{self._worker_id}"
                for date in self._storage.children(FEATURES_FOLDER)
            ]
            for folder in folders:
                self._storage.delete_leftovers(folder)
            references = [
                f"{folder}/{name}" for folder in folders for name in self._storage.children(folder)
            ]
            self._stored = deque(
                _StoredFile(reference=reference, size_bytes=self._storage.size_bytes(reference))
                for reference in references
            )
            self._stored_bytes = sum(file.size_bytes for file in self._stored)
        return self._stored


class RecordedFeatures:
    """Reads recorded features back (``learner.ports.FeatureStore``).

    Args:
        root: The root that the recorders write under.
    """

    def __init__(self, root: str) -> None:
        self._storage = Storage(root)

    def read(self, reference: FeatureReference) -> NDArray[np.float32]:
        """Return the referenced rows, shape (num_rows, H).

        Raises:
            LookupError: If they are gone or do not match their hash.
        """
        try:
            data = self._storage.read(reference.uri)
            hidden = safetensors.numpy.load(data)[TENSOR]
        except (ArtifactError, SafetensorError, KeyError) as error:
            raise LookupError(f"features {reference.uri}: {error}") from error
        first, last = reference.first_row, reference.first_row + reference.num_rows
        if hidden.dtype != _ROW_DTYPE or hidden.ndim != 2 or not 0 <= first <= last <= len(hidden):
            raise LookupError(
                f"features {reference.uri}: found {hidden.dtype} of shape {hidden.shape}, "
                f"expected float16 with rows {first}..{last - 1}"
            )
        rows: NDArray[np.float16] = hidden[first:last]
        if _digest(rows) != reference.sha256:
            raise LookupError(
                f"features {reference.uri} rows {first}..{last - 1}: found sha256 "
                f"{_digest(rows)}, expected {reference.sha256}"
            )
        return rows.astype(np.float32)


def _half_precision(hidden: torch.Tensor | NDArray[np.floating]) -> NDArray[np.float16]:
    """Copy to float16 in memory; what overflows becomes infinite and is refused by the caller."""
    if isinstance(hidden, torch.Tensor):
        array = hidden.detach().to("cpu", torch.float16, copy=True).contiguous().numpy()
    else:
        with np.errstate(over="ignore"):
            array = np.array(hidden, dtype=_ROW_DTYPE, order="C")
    return array.astype(_ROW_DTYPE, copy=False)


def _digest(rows: NDArray[np.float16]) -> str:
    return sha256(np.ascontiguousarray(rows, dtype=_ROW_DTYPE).data).hexdigest()
