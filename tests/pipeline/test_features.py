from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from inference.emission import Emitter
from learner.ports import FeatureStore
from pipeline.features import FeatureRecorder, RecordedFeatures
from schemas.codec import encode
from schemas.events import FeatureReference, VerificationEvent
from tests.schemas.builders import make_event

torch.set_num_threads(1)

NOW = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
EVENT = make_event(num_windows=3, with_content=True)
NUM_ROWS = EVENT.num_positions


def recorder(
    root: str | Path, *, max_bytes: int = 10**9, max_waiting_bytes: int = 10**9, epoch: int = 1
) -> FeatureRecorder:
    return FeatureRecorder(
        str(root),
        worker_id="worker-0",
        worker_epoch=epoch,
        max_bytes=max_bytes,
        max_waiting_bytes=max_waiting_bytes,
        now=lambda: NOW,
    )


def hidden_states(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(size=(NUM_ROWS, 8)).astype(np.float32)


def event_with(reference: FeatureReference | None) -> VerificationEvent:
    assert EVENT.content is not None
    return replace(EVENT, content=replace(EVENT.content, features=reference))


def recorded(rec: FeatureRecorder, hidden: NDArray[np.float32]) -> FeatureReference:
    reference = rec.record(hidden)
    assert reference is not None
    return reference


def stored(rec: FeatureRecorder, hidden: NDArray[np.float32]) -> FeatureReference:
    reference = recorded(rec, hidden)
    assert prepared_features(rec, [event_with(reference)]) == [reference]
    return reference


def features_of(event: VerificationEvent) -> FeatureReference | None:
    assert event.content is not None
    return event.content.features


def prepared_features(
    rec: FeatureRecorder, events: Sequence[VerificationEvent]
) -> list[FeatureReference | None]:
    return [features_of(event) for event in rec.prepare(events)]


@pytest.fixture(params=["local", "memory"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path / "data")
        return
    name = f"/features-{uuid.uuid4().hex}"
    yield f"memory:/{name}"
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(name):
        filesystem.rm(name, recursive=True)


def test_recorded_rows_are_read_back_in_half_precision(root: str) -> None:
    reference = stored(recorder(root), hidden_states())
    store: FeatureStore = RecordedFeatures(root)
    rows = store.read(reference)
    assert rows.dtype == np.float32
    np.testing.assert_array_equal(rows, hidden_states().astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_any_float_type_and_layout_are_recorded(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    hidden = torch.randn(8, NUM_ROWS, generator=torch.Generator().manual_seed(1)).to(dtype).T
    rec = recorder(tmp_path)
    reference = rec.record(hidden.requires_grad_())
    assert reference is not None
    rec.prepare([event_with(reference)])
    rows = RecordedFeatures(str(tmp_path)).read(reference)
    np.testing.assert_array_equal(rows, hidden.detach().half().float().numpy())


def test_changing_the_hidden_states_after_recording_changes_nothing(tmp_path: Path) -> None:
    rec, hidden = recorder(tmp_path), torch.ones(NUM_ROWS, 8, dtype=torch.float16)
    reference = rec.record(hidden)
    hidden.zero_()
    assert reference is not None
    rec.prepare([event_with(reference)])
    assert RecordedFeatures(str(tmp_path)).read(reference).min() == 1.0


def test_a_reference_may_name_some_rows_of_a_file(tmp_path: Path) -> None:
    whole = stored(recorder(tmp_path), hidden_states())
    rows = hidden_states().astype(np.float16)[2:5]
    some = recorded(recorder(tmp_path / "elsewhere"), rows.astype(np.float32))
    part = replace(some, uri=whole.uri, first_row=2)
    np.testing.assert_array_equal(RecordedFeatures(str(tmp_path)).read(part), rows)


def test_recording_touches_no_disk_and_the_file_is_there_before_the_event_is_sent(
    tmp_path: Path,
) -> None:
    rec = recorder(tmp_path)
    reference = recorded(rec, hidden_states())
    assert os.listdir(tmp_path) == []
    found: list[NDArray[np.float32]] = []

    def send(events: Sequence[VerificationEvent]) -> None:
        for event in events:
            features = features_of(event)
            assert features is not None
            found.append(RecordedFeatures(str(tmp_path)).read(features))

    emitter = Emitter(send, capacity=10, prepare=rec.prepare)
    emitter.emit(event_with(reference))
    assert emitter.close(10.0) == 0
    assert len(found) == 1
    assert emitter.num_send_errors == 0


def test_recording_a_segment_takes_milliseconds(tmp_path: Path) -> None:
    rec = recorder(tmp_path)
    hidden = torch.randn(64, 576, dtype=torch.bfloat16)
    taken_seconds = []
    for _ in range(50):
        before = time.monotonic()
        rec.record(hidden)
        taken_seconds.append(time.monotonic() - before)
    assert sorted(taken_seconds)[25] < 0.005


def test_files_lie_under_date_and_worker_and_no_temporary_ones_remain(tmp_path: Path) -> None:
    rec = recorder(tmp_path, epoch=7)
    first, second = (stored(rec, hidden_states(seed)) for seed in (1, 2))
    folder = tmp_path / "features" / "2026-03-01" / "worker-0"
    assert sorted(os.listdir(folder)) == [first.uri.split("/")[-1], second.uri.split("/")[-1]]
    assert first.uri < second.uri


def test_events_without_features_pass_through_unchanged(tmp_path: Path) -> None:
    rec = recorder(tmp_path)
    plain = make_event(num_windows=1)
    without = event_with(None)
    prepared = rec.prepare([plain, without])
    assert prepared[0] is plain
    assert prepared[1] is without
    assert (rec.num_written, rec.num_failed) == (0, 0)


def test_an_unwritable_folder_costs_the_features_but_not_the_event(tmp_path: Path) -> None:
    (tmp_path / "features").write_text("in the way")
    rec = recorder(tmp_path)
    (event,) = rec.prepare([event_with(recorded(rec, hidden_states()))])
    assert encode(event) == encode(event_with(None))
    assert (rec.num_recorded, rec.num_written, rec.num_failed) == (1, 0, 1)


def test_a_full_disk_costs_the_features_but_not_the_event_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = recorder(tmp_path)
    reference = recorded(rec, hidden_states())

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        assert prepared_features(rec, [event_with(reference)]) == [None]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    again = stored(rec, hidden_states())
    assert RecordedFeatures(str(tmp_path)).read(again).shape == (NUM_ROWS, 8)


def test_the_oldest_files_go_first_when_the_quota_is_reached(tmp_path: Path) -> None:
    size = _file_size(tmp_path / "probe")
    rec = recorder(tmp_path, max_bytes=3 * size)
    references = [stored(rec, hidden_states(seed)) for seed in range(5)]
    reader = RecordedFeatures(str(tmp_path))
    for reference in references[:2]:
        with pytest.raises(LookupError):
            reader.read(reference)
    for reference in references[2:]:
        reader.read(reference)
    assert (rec.num_written, rec.num_removed) == (5, 2)


def test_the_quota_counts_what_an_earlier_run_of_the_worker_left(tmp_path: Path) -> None:
    size = _file_size(tmp_path / "probe")
    old = [stored(recorder(tmp_path, epoch=9), hidden_states(0))]
    other = FeatureRecorder(
        str(tmp_path), worker_id="worker-1", worker_epoch=1, max_bytes=10**9, now=lambda: NOW
    )
    foreign = stored(other, hidden_states(1))
    rec = recorder(tmp_path, max_bytes=2 * size, epoch=10)
    new = [stored(rec, hidden_states(seed)) for seed in (2, 3)]
    reader = RecordedFeatures(str(tmp_path))
    with pytest.raises(LookupError):
        reader.read(old[0])
    for reference in (foreign, *new):
        reader.read(reference)


def test_what_a_crash_left_half_written_is_removed_at_the_next_start(tmp_path: Path) -> None:
    stored(recorder(tmp_path, epoch=1), hidden_states())
    folder = tmp_path / "features" / "2026-03-01" / "worker-0"
    for name, age_seconds in (("_old", 10**6), ("_fresh", 0)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age_seconds,) * 2)
    stored(recorder(tmp_path, epoch=2), hidden_states())
    assert not (folder / "_old").exists()
    assert (folder / "_fresh").exists()


def _file_size(root: Path) -> int:
    reference = stored(recorder(root), hidden_states())
    return (root / reference.uri).stat().st_size


def test_a_segment_larger_than_the_quota_is_not_stored_and_evicts_nothing(tmp_path: Path) -> None:
    rec = recorder(tmp_path, max_bytes=_file_size(tmp_path / "probe"))
    kept = stored(rec, hidden_states())
    large = recorded(rec, np.zeros((NUM_ROWS, 500), np.float32))
    assert prepared_features(rec, [event_with(large)]) == [None]
    RecordedFeatures(str(tmp_path)).read(kept)
    assert (rec.num_failed, rec.num_removed) == (1, 0)


def test_rows_whose_event_is_never_sent_do_not_fill_the_memory(tmp_path: Path) -> None:
    size = hidden_states().astype(np.float16).nbytes
    rec = recorder(tmp_path, max_waiting_bytes=2 * size)
    first, second, third = (recorded(rec, hidden_states(seed)) for seed in range(3))
    events = [event_with(reference) for reference in (first, second, third)]
    assert prepared_features(rec, events) == [None, second, third]
    assert rec.num_failed == 1
    later = [event_with(recorded(rec, hidden_states(seed))) for seed in (3, 4)]
    assert None not in prepared_features(rec, later)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e6])
def test_invalid_values_for_half_precision_are_refused_and_counted(
    tmp_path: Path, value: float
) -> None:
    rec = recorder(tmp_path)
    hidden = hidden_states()
    hidden[1, 1] = value
    assert rec.record(hidden) is None
    assert rec.record(torch.from_numpy(hidden)) is None
    assert (rec.num_recorded, rec.num_refused) == (0, 2)


def test_invalid_shapes_and_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"shape \(8,\), expected \(P, H\)"):
        recorder(tmp_path).record(np.zeros(8, np.float32))
    for sizes in ({"max_bytes": 0}, {"max_waiting_bytes": 0}):
        with pytest.raises(ValueError, match=r"=0 outside 1\.\."):
            recorder(tmp_path, **sizes)
    with pytest.raises(ValueError, match="worker_id"):
        FeatureRecorder(str(tmp_path), worker_id="../x", worker_epoch=1, max_bytes=1)


def test_invalid_changed_rows_are_refused_with_both_hashes(tmp_path: Path) -> None:
    reference = stored(recorder(tmp_path), hidden_states())
    file = tmp_path / reference.uri
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.unlink()
    file.write_bytes(bytes(data))
    with pytest.raises(LookupError, match=f"found sha256 .*expected {reference.sha256}"):
        RecordedFeatures(str(tmp_path)).read(reference)


@pytest.mark.parametrize("size", [0, 4, 50, -1])
def test_invalid_truncated_files_are_refused(tmp_path: Path, size: int) -> None:
    reference = stored(recorder(tmp_path), hidden_states())
    file = tmp_path / reference.uri
    data = file.read_bytes()
    file.unlink()
    file.write_bytes(data[:size])
    with pytest.raises(LookupError, match="features/"):
        RecordedFeatures(str(tmp_path)).read(reference)


@pytest.mark.parametrize(
    "change",
    [
        {"uri": "features/2026-03-01/worker-0/absent.safetensors"},
        {"uri": "../../etc/passwd"},
        {"uri": "/etc/passwd"},
        {"uri": "file:///etc/passwd"},
        {"uri": "features/%2e%2e/x"},
        {"first_row": 1},
        {"num_rows": NUM_ROWS + 1},
        {"num_rows": NUM_ROWS - 1},
        {"sha256": "0" * 64},
    ],
)
def test_invalid_references_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    reference = stored(recorder(tmp_path), hidden_states())
    with pytest.raises(LookupError):
        RecordedFeatures(str(tmp_path)).read(replace(reference, **change))


@settings(max_examples=30, deadline=None)
@given(
    hidden=npst.arrays(
        np.float16,
        npst.array_shapes(min_dims=2, max_dims=2, min_side=1, max_side=6),
        elements=npst.from_dtype(np.dtype(np.float16), allow_nan=False, allow_infinity=False),
    ),
    data=st.data(),
)
def test_any_finite_rows_come_back_bit_for_bit(
    hidden: NDArray[np.float16], data: st.DataObject
) -> None:
    root = f"memory://features-{uuid.uuid4().hex}"
    rec = recorder(root)
    reference = rec.record(hidden if data.draw(st.booleans()) else torch.from_numpy(hidden.copy()))
    assert reference is not None
    rec.prepare([event_with(replace(reference, num_rows=NUM_ROWS))])
    rows = RecordedFeatures(root).read(reference)
    assert rows.astype(np.float16).tobytes() == hidden.tobytes()


@pytest.mark.parametrize(("share", "expected"), [(1.0, 20), (0.25, 5), (0.6, 12)])
def test_a_share_of_the_segments_is_recorded_evenly(
    tmp_path: Path, share: float, expected: int
) -> None:
    recorder = FeatureRecorder(
        str(tmp_path), worker_id="worker-0", worker_epoch=1, max_bytes=2**20, share=share
    )
    found = [recorder.record(np.ones((2, 3), np.float32)) is not None for _ in range(20)]
    assert found[0]
    assert sum(found) == expected == recorder.num_recorded
    assert recorder.num_left_out == 20 - expected
    assert abs(sum(found[:10]) - sum(found[10:])) <= 1


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_invalid_shares_are_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ValueError, match="share="):
        FeatureRecorder(
            str(tmp_path), worker_id="worker-0", worker_epoch=1, max_bytes=1, share=share
        )
