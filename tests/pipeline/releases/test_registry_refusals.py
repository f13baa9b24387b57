"""What no registry may read, write or follow."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from pipeline.releases.registry import ArtifactError, DrafterRegistry
from tests.pipeline.artifacts import CONFIG, forge_weights, rewrite, specs, weights


@pytest.mark.parametrize("size", [0, 4, 50, -1])
def test_invalid_truncated_weights_are_refused(
    tmp_path: Path, local: DrafterRegistry, size: int
) -> None:
    stored = local.write("head-a", 1, weights(), {})
    file = tmp_path / stored.uri / "weights.safetensors"
    whole = file.read_bytes()
    rewrite(file, whole[:size])
    cut = len(whole[:size])
    with pytest.raises(ArtifactError) as caught:
        local.read(stored.uri, manifest_sha256=stored.manifest_sha256)
    assert caught.value.path == str(file)
    assert caught.value.found == f"size {cut}"
    assert caught.value.expected == f"size {len(whole)}"


@pytest.mark.parametrize("name", ["weights.safetensors", "config.json", "manifest.json"])
def test_invalid_flipped_bits_are_refused(
    tmp_path: Path, local: DrafterRegistry, name: str
) -> None:
    stored = local.write("head-a", 1, weights(), CONFIG)
    file = tmp_path / stored.uri / name
    data = bytearray(file.read_bytes())
    data[-9] ^= 0b100
    rewrite(file, bytes(data))
    with pytest.raises(
        ArtifactError, match=r"found sha256 \w{64}, expected sha256 \w{64}"
    ) as caught:
        local.read(stored.uri, manifest_sha256=stored.manifest_sha256)
    assert caught.value.path == str(file)


def test_invalid_extra_byte_is_refused(tmp_path: Path, local: DrafterRegistry) -> None:
    stored = local.write("head-a", 1, weights(), {})
    file = tmp_path / stored.uri / "weights.safetensors"
    rewrite(file, file.read_bytes() + b"\0")
    with pytest.raises(ArtifactError, match="found size"):
        local.read(stored.uri, manifest_sha256=stored.manifest_sha256)


def test_invalid_missing_file_is_refused(tmp_path: Path, local: DrafterRegistry) -> None:
    stored = local.write("head-a", 1, weights(), {})
    (tmp_path / stored.uri / "weights.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"weights\.safetensors: found FileNotFoundError"):
        local.read(stored.uri, manifest_sha256=stored.manifest_sha256)


def test_invalid_missing_training_state_is_refused(root: str) -> None:
    registry = DrafterRegistry(root)
    stored = registry.write("head-a", 1, weights(), {})
    with pytest.raises(ArtifactError, match="expected a training_state"):
        registry.read_training_state(stored.uri, manifest_sha256=stored.manifest_sha256)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"up": ((4, 3), torch.float32)}, "up: found ((3, 4), torch.float32)"),
        ({"up": ((3, 4), torch.float16)}, "expected ((3, 4), torch.float16)"),
        ({"gate": ((1,), torch.float32)}, "expected tensors ['gate'] not found"),
        ({"up": None}, "found tensors ['up'] not expected"),
    ],
)
def test_invalid_tensors_for_the_drafter_are_refused(
    local: DrafterRegistry, change: Mapping[str, Any], part: str
) -> None:
    stored = local.write("head-a", 1, weights(), {})
    expected = {
        name: spec for name, spec in {**specs(weights()), **change}.items() if spec is not None
    }
    with pytest.raises(ArtifactError) as caught:
        local.read(stored.uri, manifest_sha256=stored.manifest_sha256, expected=expected)
    assert part in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_invalid_values_are_neither_published_nor_loaded(
    tmp_path: Path, local: DrafterRegistry, value: float, dtype: torch.dtype
) -> None:
    bad = {"up": torch.tensor([1.0, value], dtype=dtype)}
    with pytest.raises(ArtifactError, match="up: found 1 values NaN or infinite"):
        local.write("head-a", 1, bad, {})
    with pytest.raises(ArtifactError, match="m: found 1 values NaN or infinite"):
        local.write("head-a", 1, weights(), {}, training_state={"m": bad["up"]})
    assert local.versions("head-a") == []
    stored = local.write("head-a", 1, {"up": torch.ones(2, dtype=dtype)}, {})
    uri, digest = forge_weights(tmp_path, stored, safetensors.torch.save(bad))
    with pytest.raises(ArtifactError, match="up: found 1 values NaN or infinite"):
        local.read(uri, manifest_sha256=digest)


def test_invalid_pickle_is_never_read(tmp_path: Path, local: DrafterRegistry) -> None:
    stored = local.write("head-a", 1, weights(), {})
    torch.save(weights(), tmp_path / "pickled")
    uri, digest = forge_weights(tmp_path, stored, (tmp_path / "pickled").read_bytes())
    with pytest.raises(ArtifactError, match="expected safetensors"):
        local.read(uri, manifest_sha256=digest)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"format_version": 2}, "format_version: found 2, expected 1"),
        ({"format": "other"}, "format: found other, expected draftloop-drafter"),
        ({"version": 2}, "found the manifest of head-a/2, expected of head-a/1"),
        ({"drafter_id": "head-b"}, "found the manifest of head-b/1"),
        ({"files": {"weights": {"name": "x"}}}, "files: found"),
        (
            {"files": {"weights": {"name": "../x", "size_bytes": 1, "sha256": ""}, "config": 3}},
            "files",
        ),
    ],
)
def test_invalid_manifests_are_refused_even_with_the_right_hash(
    tmp_path: Path, local: DrafterRegistry, change: Mapping[str, Any], part: str
) -> None:
    stored = local.write("head-a", 1, weights(), {})
    file = tmp_path / stored.uri / "manifest.json"
    data = json.dumps({**json.loads(file.read_bytes()), **change}).encode()
    rewrite(file, data)
    with pytest.raises(ArtifactError) as caught:
        local.read(stored.uri, manifest_sha256=sha256(data).hexdigest())
    assert part in str(caught.value)


def test_invalid_file_names_in_a_manifest_do_not_lead_out(
    tmp_path: Path, local: DrafterRegistry
) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    stored = local.write("head-a", 1, weights(), {})
    file = tmp_path / stored.uri / "manifest.json"
    manifest = json.loads(file.read_bytes())
    manifest["files"]["config"]["name"] = "../../../secret.json"
    data = json.dumps(manifest).encode()
    rewrite(file, data)
    with pytest.raises(ArtifactError, match="expected identifiers joined by '/'"):
        local.read(stored.uri, manifest_sha256=sha256(data).hexdigest())


BAD_IDS = [
    "",
    "../x",
    "..",
    ".hidden",
    "/etc/passwd",
    "a/b",
    "%2e%2e%2f",
    "a\0b",
    "x" * 300,
    "_x",
    "a b",
]


@pytest.mark.parametrize("drafter_id", BAD_IDS)
def test_invalid_drafter_ids_are_refused(tmp_path: Path, drafter_id: str) -> None:
    registry = DrafterRegistry(str(tmp_path / "store"))
    with pytest.raises(ArtifactError):
        registry.write(drafter_id, 1, weights(), {})
    with pytest.raises(ArtifactError):
        registry.versions(drafter_id)
    with pytest.raises(ArtifactError):
        registry.prune(drafter_id, 1, ())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "uri",
    [
        *BAD_IDS[:-1],
        "drafters/../../x",
        "drafters/head-a/../../../x",
        "drafters/%2e%2e/x",
        "drafters//head-a",
        "file:///etc/passwd",
        "memory://elsewhere/x",
        "http://example.org/x",
        "drafters/head-a/1/_x",
    ],
)
def test_invalid_uris_are_refused(local: DrafterRegistry, uri: str) -> None:
    local.write("head-a", 1, weights(), {})
    with pytest.raises(ArtifactError):
        local.read(uri, manifest_sha256="0" * 64)


def test_invalid_symbolic_links_out_of_the_root_are_refused(tmp_path: Path) -> None:
    outside = DrafterRegistry(str(tmp_path / "outside"))
    stored = outside.write("head-a", 1, weights(), {})
    inside = DrafterRegistry(str(tmp_path / "inside"))
    inside.write("head-b", 1, weights(), {})
    link = tmp_path / "inside" / "drafters" / "head-a"
    link.symlink_to(tmp_path / "outside" / "drafters" / "head-a")
    with pytest.raises(ArtifactError, match="expected a path under"):
        inside.read(stored.uri, manifest_sha256=stored.manifest_sha256)
    with pytest.raises(ArtifactError, match="expected a path under"):
        inside.write("head-a", 2, weights(), {})


def test_invalid_versions_and_retention_are_refused(local: DrafterRegistry) -> None:
    with pytest.raises(ArtifactError, match="found -1, expected >= 0"):
        local.write("head-a", -1, weights(), {})
    with pytest.raises(ValueError, match="keep=0"):
        local.prune("head-a", 0, ())


@pytest.mark.parametrize("config", [{"x": float("nan")}, {"x": {1, 2}}, {"x": torch.ones(1)}])
def test_invalid_configs_are_refused(local: DrafterRegistry, config: Mapping[str, Any]) -> None:
    with pytest.raises(ArtifactError, match="expected JSON without NaN"):
        local.write("head-a", 1, weights(), config)
    assert local.versions("head-a") == []


def test_invalid_roots_are_reported_on_the_first_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"NotADirectoryError|FileExistsError"):
        DrafterRegistry(str(tmp_path / "file")).write("head-a", 1, weights(), {})
