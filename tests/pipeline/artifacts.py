"""Drafters to store, and ways to spoil a stored one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import torch

from pipeline.releases.registry import StoredArtifact

CONFIG = {"hidden_size": 4, "layers": [1, 2], "name": "héad"}


def weights(fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "up": torch.full((3, 4), fill),
        "down": torch.arange(12, dtype=torch.bfloat16).reshape(4, 3),
        "ids": torch.tensor([5, 7], dtype=torch.int64),
    }


def specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def rewrite(path: Path, data: bytes) -> None:
    """Replace a published file, as a broken disk or a careless copy would."""
    path.unlink()
    path.write_bytes(data)


def forge_weights(root: Path, stored: StoredArtifact, data: bytes) -> tuple[str, str]:
    """Replace the weights and make every hash agree, as a broken trainer could."""
    folder = root / stored.uri
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["files"]["weights"].update(size_bytes=len(data), sha256=sha256(data).hexdigest())
    forged = json.dumps(manifest).encode()
    rewrite(folder / "weights.safetensors", data)
    rewrite(folder / "manifest.json", forged)
    return stored.uri, sha256(forged).hexdigest()
