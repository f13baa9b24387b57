"""Versions of drafters: written once, whole or not at all, and read back as they were."""

from __future__ import annotations

import json
import os
import shutil
import threading
import uuid
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.releases.registry import ArtifactError, DrafterRegistry, StoredArtifact
from tests.pipeline.artifacts import CONFIG, specs, weights

torch.set_num_threads(1)


def test_what_was_written_is_read_back(root: str) -> None:
    registry = DrafterRegistry(root)
    stored = registry.write("head-a", 3, weights(), CONFIG)
    loaded = registry.read(
        stored.uri, manifest_sha256=stored.manifest_sha256, expected=specs(weights())
    )
    assert loaded.config == CONFIG
    assert loaded.tensors.keys() == weights().keys()
    for name, tensor in weights().items():
        assert torch.equal(loaded.tensors[name], tensor)
    assert stored.version == 3
    assert stored.uri == "drafters/head-a/3"


def test_another_registry_over_the_same_store_reads_it_by_reference_or_full_url(
    tmp_path: Path,
) -> None:
    stored = DrafterRegistry(str(tmp_path)).write("head-a", 0, weights(), CONFIG)
    other = DrafterRegistry(f"file://{tmp_path}")
    for uri in (
        stored.uri,
        f"{stored.uri}/",
        f"{tmp_path}/{stored.uri}",
        f"file://{tmp_path}/{stored.uri}",
    ):
        assert other.read(uri, manifest_sha256=stored.manifest_sha256).config == CONFIG


def test_a_moved_store_still_serves_its_references(tmp_path: Path) -> None:
    stored = DrafterRegistry(str(tmp_path / "a")).write("head-a", 0, weights(), CONFIG)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = DrafterRegistry(str(tmp_path / "b"))
    assert moved.read(stored.uri, manifest_sha256=stored.manifest_sha256).config == CONFIG


def test_training_state_is_read_on_its_own(root: str) -> None:
    registry = DrafterRegistry(root)
    state = {"up.exp_avg": torch.ones(3, 4), "step": torch.tensor(7.0)}
    stored = registry.write("head-a", 1, weights(), CONFIG, training_state=state)
    read = registry.read_training_state(stored.uri, manifest_sha256=stored.manifest_sha256)
    assert read.keys() == state.keys()
    assert torch.equal(read["step"], state["step"])
    assert registry.read(stored.uri, manifest_sha256=stored.manifest_sha256).tensors.keys() == (
        weights().keys()
    )


def test_the_config_can_be_read_before_its_tensors(root: str) -> None:
    registry = DrafterRegistry(root)
    stored = registry.write("head-a", 1, weights(), CONFIG)
    assert registry.read_config(stored.uri, manifest_sha256=stored.manifest_sha256) == CONFIG


def test_a_folder_holds_safetensors_config_card_and_a_manifest_that_names_them(
    tmp_path: Path,
) -> None:
    registry = DrafterRegistry(str(tmp_path), now=lambda: datetime(2026, 3, 1, tzinfo=UTC))
    registry.write("head-a", 12, weights(), CONFIG, card="# Mine\n")
    folder = tmp_path / "drafters" / "head-a" / "12"
    assert sorted(os.listdir(folder)) == [
        "README.md",
        "config.json",
        "manifest.json",
        "weights.safetensors",
    ]
    assert (folder / "README.md").read_text() == "# Mine\n"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    assert (manifest["drafter_id"], manifest["version"]) == ("head-a", 12)
    assert manifest["created"] == "2026-03-01T00:00:00+00:00"
    assert {entry["name"]: entry["size_bytes"] for entry in manifest["files"].values()} == {
        name: (folder / name).stat().st_size
        for name in os.listdir(folder)
        if name != "manifest.json"
    }
    assert not list(tmp_path.rglob("_*"))


def test_tied_and_strided_tensors_come_back_as_they_read(root: str) -> None:
    registry = DrafterRegistry(root)
    base = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "embedding": base,
        "head": base,
        "transposed": base.T,
        "column": base[:, 2],
        "every_other": base[::2],
        "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
        "parameter": torch.nn.Parameter(base[1:3]),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.0),
    }
    stored = registry.write("head-a", 1, tensors, {})
    loaded = registry.read(
        stored.uri, manifest_sha256=stored.manifest_sha256, expected=specs(tensors)
    )
    for name, tensor in tensors.items():
        assert torch.equal(loaded.tensors[name], tensor.detach()), name


def test_loaded_tensors_share_memory_with_no_file_and_no_other_load(
    tmp_path: Path, local: DrafterRegistry
) -> None:
    stored = local.write("head-a", 1, weights(9.0), {})
    loaded = local.read(stored.uri, manifest_sha256=stored.manifest_sha256).tensors
    file = tmp_path / stored.uri / "weights.safetensors"
    file.chmod(0o644)
    with file.open("r+b") as opened:
        opened.seek(-60, os.SEEK_END)
        opened.write(bytes(60))
    assert torch.equal(loaded["up"], weights(9.0)["up"])
    assert torch.equal(loaded["down"], weights()["down"])


def test_changing_a_tensor_after_writing_changes_nothing(local: DrafterRegistry) -> None:
    tensors = weights(2.0)
    stored = local.write("head-a", 1, tensors, {})
    tensors["up"].zero_()
    loaded = local.read(stored.uri, manifest_sha256=stored.manifest_sha256)
    assert torch.equal(loaded.tensors["up"], weights(2.0)["up"])


def test_versions_are_ordered_as_integers(root: str) -> None:
    registry = DrafterRegistry(root)
    for version in (10000, 9900, 0, 10):
        registry.write("head-a", version, {"x": torch.ones(1)}, {})
    assert registry.versions("head-a") == [0, 10, 9900, 10000]
    assert registry.versions("head-b") == []


def test_versions_leave_out_what_is_no_version(
    tmp_path: Path, local: DrafterRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    local.write("head-a", 2, weights(), {})
    folder = tmp_path / "drafters" / "head-a"
    (folder / "_unfinished").mkdir()
    (folder / "7").mkdir()
    (folder / "notes.txt").write_text("hello")
    shutil.copytree(folder / "2", folder / "9")
    (folder / "11").mkdir()
    (folder / "11" / "manifest.json").write_bytes(b"{")
    assert local.versions("head-a") == [2]
    assert "found the manifest of head-a/2, expected of head-a/9" in caplog.text


def test_prune_keeps_the_newest_and_every_protected_version(root: str) -> None:
    registry = DrafterRegistry(root)
    for version in (9, 10, 99, 100):
        registry.write("head-a", version, {"x": torch.ones(1)}, {})
    registry.write("head-b", 1, {"x": torch.ones(1)}, {})
    assert registry.prune("head-a", 2, protected=[9]) == [10]
    assert registry.versions("head-a") == [9, 99, 100]
    assert registry.prune("head-a", 1, protected=()) == [9, 99]
    assert registry.prune("head-a", 1, protected=()) == []
    assert registry.versions("head-a") == [100]
    assert registry.versions("head-b") == [1]


def test_a_version_that_was_replaced_just_now_is_not_pruned(root: str) -> None:
    clock = [datetime(2026, 11, 30, tzinfo=UTC)]
    registry = DrafterRegistry(root, now=lambda: clock[0], keep_seconds=60.0)
    for version in range(4):
        registry.write("head-a", version, {"x": torch.ones(1)}, {})
        clock[0] += timedelta(seconds=25)
    # Version 0 has been the older one for 75 s, version 1 for 50 s.
    assert registry.prune("head-a", 1, protected=()) == [0]
    clock[0] += timedelta(seconds=10)
    assert registry.prune("head-a", 1, protected=()) == [1]


def test_a_pruned_version_is_gone_as_a_whole(tmp_path: Path, local: DrafterRegistry) -> None:
    stored = local.write("head-a", 1, weights(), {})
    local.write("head-a", 2, weights(), {})
    local.prune("head-a", 1, protected=())
    assert os.listdir(tmp_path / "drafters" / "head-a") == ["2"]
    with pytest.raises(ArtifactError, match="FileNotFoundError"):
        local.read(stored.uri, manifest_sha256=stored.manifest_sha256)


def test_prune_removes_old_leftovers_of_crashed_writers_only(
    tmp_path: Path, local: DrafterRegistry
) -> None:
    local.write("head-a", 1, weights(), {})
    old, fresh = (tmp_path / "drafters" / "head-a" / name for name in ("_old", "_fresh"))
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (0, 0))
    local.prune("head-a", 1, protected=())
    assert (old.exists(), fresh.exists()) == (False, True)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    versions=st.sets(st.integers(0, 10_000), max_size=6),
    keep=st.integers(1, 4),
    data=st.data(),
)
def test_prune_never_deletes_a_protected_or_newest_version(
    versions: set[int], keep: int, data: st.DataObject
) -> None:
    protected = data.draw(st.sets(st.sampled_from(sorted(versions)))) if versions else set()
    registry = DrafterRegistry(f"memory://prune-{uuid.uuid4().hex}")
    for version in versions:
        registry.write("d", version, {"x": torch.ones(1)}, {})
    deleted = registry.prune("d", keep, protected)
    expected = set(sorted(versions)[-keep:]) | protected
    assert registry.versions("d") == sorted(expected)
    assert set(deleted) == versions - expected


def test_of_two_publishers_at_once_one_wins_and_the_other_is_told(root: str) -> None:
    registry = DrafterRegistry(root)
    barrier = threading.Barrier(4)
    stored: list[StoredArtifact] = []
    refused: list[ArtifactError] = []

    def publish(fill: float) -> None:
        mine = DrafterRegistry(root)
        barrier.wait(60)
        try:
            stored.append(mine.write("head-a", 5, weights(fill), {"fill": fill}))
        except ArtifactError as error:
            refused.append(error)

    threads = [threading.Thread(target=publish, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(stored), len(refused)) == (1, 3)
    assert all("drafters/head-a/5" in str(error) for error in refused)
    loaded = registry.read(stored[0].uri, manifest_sha256=stored[0].manifest_sha256)
    assert torch.equal(loaded.tensors["up"], weights(loaded.config["fill"])["up"])


def test_a_publisher_that_another_overwrites_at_the_last_moment_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = DrafterRegistry(f"memory://race-{uuid.uuid4().hex}")
    pipe_file = MemoryFileSystem.pipe_file

    def overwritten(self: Any, path: str, value: bytes, mode: str = "overwrite") -> None:
        pipe_file(self, path, value, mode=mode)
        if path.endswith("manifest.json"):
            pipe_file(self, path, b"{}", mode="overwrite")

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", overwritten)
    with pytest.raises(ArtifactError, match="another writer has just published"):
        registry.write("head-a", 1, weights(), {})


def test_every_file_is_synced_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, local: DrafterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        steps.append(os.fstat(descriptor).st_ino)
        real_fsync(descriptor)

    def rename(source: Path, destination: Path) -> None:
        steps.append(-1)
        real_rename(source, destination)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    folder = tmp_path / local.write("head-a", 1, weights(), {}).uri
    before, after = steps[: steps.index(-1)], steps[steps.index(-1) + 1 :]
    assert {path.stat().st_ino for path in folder.iterdir()} == set(before[:-1])
    assert before[-1] == folder.stat().st_ino
    assert after == [folder.parent.stat().st_ino, folder.parent.parent.stat().st_ino]


_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any stored dtype, up to three axes, some of them permuted or strided."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    seed = draw(st.integers(0, 2**31))
    values = torch.randn(
        [2 * size for size in shape], generator=torch.Generator().manual_seed(seed)
    )
    strided = values[tuple(slice(None, None, 2) for _ in shape)]
    order = draw(st.permutations(range(len(shape))))
    return strided.to(draw(st.sampled_from(_DTYPES))).permute(order)


@settings(max_examples=40, deadline=None)
@given(
    tensors=st.dictionaries(st.text("abc./_é", min_size=1, max_size=8), any_tensor(), max_size=4),
    config=st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3),
            max_leaves=4,
        ),
        max_size=4,
    ),
)
def test_any_tensors_and_config_come_back_exactly(
    tensors: dict[str, torch.Tensor], config: dict[str, Any]
) -> None:
    registry = DrafterRegistry(f"memory://round-trip-{uuid.uuid4().hex}")
    stored = registry.write("head-a", 1, tensors, config)
    loaded = registry.read(
        stored.uri, manifest_sha256=stored.manifest_sha256, expected=specs(tensors)
    )
    assert loaded.config == config
    assert all(torch.equal(loaded.tensors[name], tensors[name]) for name in tensors)


def test_a_refused_write_leaves_no_trace(tmp_path: Path, local: DrafterRegistry) -> None:
    local.write("head-a", 1, weights(1.0), {})
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    with pytest.raises(ArtifactError, match=r"drafters/head-a/1: .*published"):
        local.write("head-a", 1, weights(2.0), {})
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == before
    assert os.listdir(tmp_path / "drafters" / "head-a") == ["1"]


def test_a_full_disk_is_reported_and_leaves_the_old_version_alone(
    tmp_path: Path, local: DrafterRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = local.write("head-a", 1, weights(), {})
    real_fsync, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ArtifactError, match="No space left on device"):
        local.write("head-a", 2, weights(), {})
    assert os.listdir(tmp_path / "drafters" / "head-a") == ["1"]
    assert local.read(stored.uri, manifest_sha256=stored.manifest_sha256).config == {}
