"""A head leaves in a layout that its reader computes as it was trained, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
from typer.testing import CliRunner

from inference.drafters import convex, eagle, hydra, token_lm
from pipeline.commands.drafters import drafters
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.releases.export_formats import (
    ARCHITECTURE_TO_DIFFERENCE,
    EAGLE3_ARCHITECTURE,
    ExportFormatError,
)
from pipeline.releases.registry import DrafterRegistry
from schemas.errors import KnownError

KIND_TO_ARCHITECTURE = {
    "hydra": hydra.ARCHITECTURE,
    "convex": convex.ARCHITECTURE,
    "eagle": eagle.ARCHITECTURE,
    "token_lm": token_lm.ARCHITECTURE,
}


def run_export(folder: Path, config: dict[str, str], layout: str) -> BaseException | None:
    """Store a version with this config, export it by the command line, return what it raised."""
    known = {"target_fingerprint": "a", "tokenizer_hash": "b", "draft_vocabulary_hash": "c"}
    registry = DrafterRegistry(str(folder / "data"))
    registry.write("head-a", 3, {"w": torch.zeros(2)}, known | config)
    (folder / "draftloop.toml").write_text(f'data = "{folder / "data"}"\n')
    command = ["export", "head-a", "3", str(folder / "out"), "--format", layout]
    result = CliRunner().invoke(drafters, [*command, "--config", str(folder / "draftloop.toml")])
    return result.exception


def test_every_kind_that_learns_is_told_apart_from_eagle_3() -> None:
    kinds = get_args(DrafterSettings.model_fields["kind"].annotation)
    learning = {
        one for one in kinds if DrafterSettings(drafter_id="a", kind=one, path="x").is_trained
    }
    assert learning == KIND_TO_ARCHITECTURE.keys()
    assert eagle.ARCHITECTURE == EAGLE3_ARCHITECTURE
    others = set(KIND_TO_ARCHITECTURE.values()) - {EAGLE3_ARCHITECTURE}
    assert ARCHITECTURE_TO_DIFFERENCE.keys() == others | {"eagle-layer-1"}


@pytest.mark.parametrize("architecture", [*ARCHITECTURE_TO_DIFFERENCE, "stranger-1"])
def test_an_export_as_eagle_3_is_refused_in_one_line_and_writes_nothing(
    tmp_path: Path, architecture: str
) -> None:
    error = run_export(tmp_path, {"architecture": architecture}, "eagle3")
    assert isinstance(error, ExportFormatError)
    assert isinstance(error, KnownError)
    text = str(error)
    assert text.startswith(f"drafter head-a version 3 is {architecture}, not EAGLE-3")
    assert ARCHITECTURE_TO_DIFFERENCE.get(architecture, "only a head that computes") in text
    assert "--format draftloop" in text
    assert "\n" not in text
    assert not (tmp_path / "out").exists()


def test_the_own_layout_is_the_default_and_stays_as_it_was(tmp_path: Path) -> None:
    assert run_export(tmp_path, {"architecture": eagle.ARCHITECTURE}, "draftloop") is None
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"weights.safetensors", "config.json", "README.md", "manifest.json"}
