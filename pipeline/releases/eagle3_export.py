"""Heads as folders that vLLM and SGLang load, each read back and compared before it is handed out.

Nothing of a folder is believed: what it drafts is computed from its files alone
(``inference.drafters.eagle_reader``) and held against the head.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

from inference.drafters.eagle import EagleDrafter
from inference.drafters.eagle_layout import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    layout_config,
    layout_tensors,
)
from inference.drafters.eagle_reader import EagleFolder
from inference.drafters.frozen_rows import FrozenRows
from inference.packing import packed_linear
from inference.sampling import SamplingParams
from inference.target import Target
from inference.trajectory import Trajectory
from pipeline.releases.export_formats import ExportFormatError
from pipeline.releases.heads import HeadLoader
from pipeline.releases.registry import DrafterRegistry
from schemas.events import DrafterReleased

CARD_FILE = "README.md"
NUM_LEVELS, NUM_WINDOWS, MOST_POSITIONS = 4, 8, 512
TOLERANCE = 1e-4
"""Of logits, as a share of the largest: both sides compute in float32 on the same numbers."""


@dataclass(frozen=True, slots=True)
class Eagle3Export:
    """A folder that has been read back.

    Attributes:
        files: What was written.
        num_logits: How many were compared.
        largest_difference: Between them, as a share of the largest logit.
    """

    files: tuple[Path, ...]
    num_logits: int
    largest_difference: float


def export_eagle3(
    release: DrafterReleased, target: Target, registry: DrafterRegistry, folder: Path
) -> Eagle3Export:
    """Write a version to a new folder and read it back.

    Args:
        release: Of a head that computes what EAGLE-3 does.
        target: That it was trained for: lends its head rows, and states to compare on.
        registry: Where the version is.
        folder: Where its files go.

    Raises:
        ArtifactError: If the version is damaged, or of another target.
        ExportFormatError: If it is of another kind, or what was written drafts something else;
            then no file is left.
    """
    head = HeadLoader(target, registry)(release)
    if not isinstance(head, EagleDrafter):
        raise ExportFormatError(
            f"drafter {release.drafter_id}: {type(head).__name__} is no EAGLE-3"
        )
    origin = {
        "drafter_id": release.drafter_id,
        "version": release.version,
        "target_fingerprint": release.target_fingerprint,
        "tokenizer_hash": release.tokenizer_hash,
        "draft_vocabulary_hash": release.draft_vocabulary_hash,
    }
    files = write_folder(folder, head, target, origin)
    try:
        num_logits, difference = compared(folder, head, target)
    except ExportFormatError:
        for path in files:
            path.unlink()
        raise
    return Eagle3Export(files, num_logits, difference)


def write_folder(
    folder: Path, head: EagleDrafter, target: Target, origin: dict[str, Any]
) -> tuple[Path, ...]:
    """Write config, weights and a card; ``origin`` says where they come from."""
    config = layout_config(head, context_length=target.context_length) | {"draftloop": origin}
    folder.mkdir(parents=True, exist_ok=True)
    paths = tuple(folder / name for name in (CONFIG_FILE, WEIGHTS_FILE, CARD_FILE))
    paths[0].write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    # Readers of transformers want to be told whose tensors these are.
    safetensors.torch.save_file(layout_tensors(head), paths[1], metadata={"format": "pt"})
    paths[2].write_text(_card(origin, head), encoding="utf-8")
    return paths


def compared(folder: Path, head: EagleDrafter, target: Target) -> tuple[int, float]:
    """Hold what a folder drafts against the head, on states of the target.

    Returns:
        Number of logits, and their largest difference as a share of the largest.

    Raises:
        ExportFormatError: If a file cannot be read, a token is another, or a logit is.
    """
    try:
        read = EagleFolder(folder)
        _compare_vocabulary(folder, read, head, target)
        found, expected = _logits(read, head, target)
    except (OSError, ValueError, KeyError, RuntimeError, safetensors.SafetensorError) as error:
        raise ExportFormatError(f"{folder}: cannot be read back: {error}") from error
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE:
        raise ExportFormatError(
            f"{folder}: read back, a logit differs by {difference:.2e} of the largest, more than "
            f"{TOLERANCE:.0e}"
        )
    return expected.numel(), difference


def _compare_vocabulary(
    folder: Path, read: EagleFolder, head: EagleDrafter, target: Target
) -> None:
    expected = head.rows.vocabulary.token_ids
    masked = torch.nonzero(read.tensors["t2d"])[:, 0]
    for name, found in (("d2t", read.draft_token_ids), ("t2d", masked)):
        if not torch.equal(found, expected):
            raise ExportFormatError(f"{folder}: {name} names other tokens than the head drafts")
    if len(read.tensors["t2d"]) != target.vocab_size:
        raise ExportFormatError(
            f"{folder}: t2d tells of {len(read.tensors['t2d'])} tokens, the target has "
            f"{target.vocab_size}"
        )


@torch.inference_mode()
def _logits(
    read: EagleFolder, head: EagleDrafter, target: Target
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits of folder and head, (W, K, D) each, over a text of random tokens."""
    room = target.context_length - NUM_LEVELS
    length = min(head.layer.num_context + NUM_WINDOWS, MOST_POSITIONS, room)
    text = np.random.default_rng(0).integers(target.vocab_size, size=length + NUM_LEVELS).tolist()
    states = target.start().forward(text).hidden.float().cpu()
    # The state behind a token predicts the next one, so the first token is the prompt.
    states, tokens = states[: length - 1], text[1:]
    embeddings = target.embedding_rows[tokens].float().cpu()
    starts = np.arange(max(length - NUM_WINDOWS, 1), length)
    found = [
        read.logits(embeddings[: start + NUM_LEVELS - 1], states[:start], NUM_LEVELS)
        for start in starts.tolist()
    ]
    expected = _logits_of_head(head, embeddings, states, starts)
    return torch.stack(found), expected


def _logits_of_head(
    head: EagleDrafter, embeddings: torch.Tensor, states: torch.Tensor, starts: np.ndarray[Any, Any]
) -> torch.Tensor:
    """Return what the head's session computes in float32, (W, K, D).

    Its embeddings are those of the text alone, by position; ``starts`` counts verified tokens.
    """
    rows = head.rows.head.float().cpu()
    lent = FrozenRows(embeddings, rows, rows, packed_linear(rows), head.rows.vocabulary)
    weights = {name: tensor.cpu() for name, tensor in head.weights.items()}
    twin = EagleDrafter("twin", 0, weights, lent)
    trajectory = Trajectory(
        [0],
        SamplingParams(),
        max_output_tokens=len(states),
        hidden_size=states.shape[1],
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    trajectory.extend(range(len(states)), states, None)
    unroll = twin.start(trajectory, stream="", draws_drafts=False).unroll(starts + 1)
    steps = [unroll.step(torch.from_numpy(starts - 1 + level)) for level in range(NUM_LEVELS)]
    return torch.stack([lent.logits(scaled) for scaled in steps], dim=1)


def _card(origin: dict[str, Any], head: EagleDrafter) -> str:
    return (
        f"# {origin['drafter_id']}, version {origin['version']}, as EAGLE-3\n\n"
        f"Drafts {len(head.rows.head)} tokens of a target with fingerprint "
        f"{origin['target_fingerprint']}.\nIt reads the target's last hidden state "
        "(`use_aux_hidden_state` is false) and attends to "
        f"{head.layer.num_context} positions before the newest\n(`sliding_window`). "
        'vLLM: `speculative_config={"method": "eagle3", "model": FOLDER, '
        '"num_speculative_tokens": 3}`.\n'
    )
