"""Versions that leave as EAGLE-3 are read back, and what does not fit does not leave."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from inference.drafters.eagle import EagleDrafter
from inference.drafters.eagle_layout import CONFIG_FILE, WEIGHTS_FILE, layout_config
from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary
from inference.target import Target
from pipeline import wiring
from pipeline.commands.drafters import drafters
from pipeline.configuration.pool_settings import DrafterSettings
from pipeline.releases import eagle3_export
from pipeline.releases.drafter_versions import DrafterVersionError
from pipeline.releases.drafters import draft_vocabulary, trainable
from pipeline.releases.eagle3_export import CARD_FILE, compared, write_folder
from pipeline.releases.export_formats import ExportFormatError
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import ArtifactError, DrafterRegistry
from tests.inference.tiny import tiny_llama

HEAD = DrafterSettings(drafter_id="head-a", kind="eagle", inner_size=8, num_heads=2, num_context=5)
Tensors = dict[str, torch.Tensor]


@pytest.fixture
def target() -> Target:
    return tiny_llama()


def stored(folder: Path, target: Target, *, fingerprint: str | None = None) -> Tensors:
    """Store version 3 of a head with random weights, and settings beside it."""
    registry = DrafterRegistry(str(folder / "data"))
    rows = HeadLoader(target, registry).rows_of(draft_vocabulary(target, ["aab"], size=12))
    head = trainable(HEAD, rows)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in head.initial_weights().items()
    }
    tensors = head.artifact(weights)
    vocabulary = DraftVocabulary.of(tensors[VOCABULARY].tolist())
    config = {
        "architecture": head.architecture,
        "target_fingerprint": fingerprint or target.fingerprint,
        "tokenizer_hash": target.tokenizer_hash,
        "draft_vocabulary_hash": vocabulary.sha256,
    }
    registry.write("head-a", 3, tensors, config)
    (folder / "draftloop.toml").write_text(f'data = "{folder / "data"}"\n')
    return tensors


def drafter_of(folder: Path, target: Target) -> EagleDrafter:
    """Return the stored version as it serves."""
    registry = DrafterRegistry(str(folder / "data"))
    one = registry.find("head-a", 3)
    tensors = dict(registry.read(one.uri, manifest_sha256=one.manifest_sha256).tensors)
    vocabulary = DraftVocabulary.of(tensors.pop(VOCABULARY).tolist())
    return EagleDrafter("head-a", 3, tensors, HeadLoader(target, registry).rows_of(vocabulary))


def run_export(folder: Path) -> tuple[str, BaseException | None]:
    """Export the version by the command line; return what it printed and what it raised."""
    command = ["export", "head-a", "3", str(folder / "out"), "--format", "eagle3"]
    result = CliRunner().invoke(drafters, [*command, "--config", str(folder / "draftloop.toml")])
    return result.output, result.exception


@pytest.fixture
def opened(target: Target, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Let the command line find the tiny target."""
    monkeypatch.setattr(wiring, "open_target", lambda settings: target)
    return target


def test_a_version_leaves_with_its_vocabulary_and_says_how_it_was_read_back(
    tmp_path: Path, opened: Target
) -> None:
    tensors = stored(tmp_path, opened)
    output, error = run_export(tmp_path)
    assert error is None
    folder = tmp_path / "out"
    assert {path.name for path in folder.iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, CARD_FILE}
    assert "read back: 384 logits within" in output
    config = json.loads((folder / CONFIG_FILE).read_text())
    assert config["draftloop"]["version"] == 3
    found = safetensors.torch.load((folder / WEIGHTS_FILE).read_bytes())
    draft_token_ids = found["d2t"] + torch.arange(len(found["d2t"]))
    assert torch.equal(draft_token_ids, tensors[VOCABULARY])


def test_a_head_of_another_target_is_refused_by_name(tmp_path: Path, opened: Target) -> None:
    stored(tmp_path, opened, fingerprint="fingerprint-of-another")
    _, error = run_export(tmp_path)
    assert isinstance(error, ArtifactError)
    assert "drafter head-a version 3: target_fingerprint" in str(error)
    assert not (tmp_path / "out").exists()


def test_a_filled_folder_is_left_alone(tmp_path: Path, opened: Target) -> None:
    stored(tmp_path, opened)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    _, error = run_export(tmp_path)
    assert isinstance(error, DrafterVersionError)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_what_drafts_something_else_leaves_no_file(
    tmp_path: Path, opened: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path, opened)
    narrow = layout_config(drafter_of(tmp_path, opened), context_length=64) | {"sliding_window": 2}
    monkeypatch.setattr(eagle3_export, "layout_config", lambda *_, **__: narrow)
    _, error = run_export(tmp_path)
    assert isinstance(error, ExportFormatError)
    assert "a logit differs by" in str(error)
    assert not list((tmp_path / "out").iterdir())


def _swapped(name: str, other: str) -> Callable[[Tensors], None]:
    def spoil(tensors: Tensors) -> None:
        tensors[name], tensors[other] = tensors[other], tensors[name]

    return spoil


def _shifted(tensors: Tensors) -> None:
    tensors["d2t"][-1] += 1


def _unmasked(tensors: Tensors) -> None:
    tensors["t2d"][:] = True


def _without(tensors: Tensors) -> None:
    del tensors["norm.weight"]


def _nan(tensors: Tensors) -> None:
    tensors["lm_head.weight"][0, 0] = float("nan")


ATTENTION = "midlayer.self_attn."


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_swapped(f"{ATTENTION}q_proj.weight", f"{ATTENTION}k_proj.weight"), "a logit differs"),
        (_swapped("midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight"), "a logit"),
        (_swapped("midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"), "a logit"),
        (_shifted, "d2t names other tokens"),
        (_unmasked, "t2d names other tokens"),
        (_without, "cannot be read back: 'norm.weight'"),
        (_nan, "a logit differs by nan"),
    ],
)
def test_a_folder_that_was_tampered_with_is_told(
    tmp_path: Path, target: Target, spoil: Callable[[Tensors], None], message: str
) -> None:
    stored(tmp_path, target)
    head = drafter_of(tmp_path, target)
    origin = {"drafter_id": "head-a", "version": 3, "target_fingerprint": target.fingerprint}
    _, weights, _ = write_folder(tmp_path / "out", head, target, origin)
    _, difference = compared(tmp_path / "out", head, target)
    assert difference < 1e-5
    found = safetensors.torch.load(weights.read_bytes())
    spoil(found)
    safetensors.torch.save_file(found, weights)
    with pytest.raises(ExportFormatError, match=message):
        compared(tmp_path / "out", head, target)
