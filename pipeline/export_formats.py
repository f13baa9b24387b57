"""In which layout a version leaves the registry, and why a head of ours does not leave as EAGLE-3.

vLLM and SGLang read EAGLE-3 by the names of its tensors and compute its arithmetic, whatever the
tensors were trained for: a head of another arithmetic would load there and draft wrongly, without
an error. So a head is refused for every thing in which it differs, by name.
"""

from __future__ import annotations

from enum import StrEnum


class ExportFormat(StrEnum):
    """The layout of an exported folder."""

    DRAFTLOOP = "draftloop"
    """As in the registry: weights, config, training state, card, and a manifest with hashes."""
    EAGLE3 = "eagle3"
    """As vLLM and SGLang read EAGLE-3 (Li et al. 2025): config.json, d2t offsets, t2d mask."""


class ExportFormatError(Exception):
    """A version cannot take the layout; the message names both, what differs and the cure."""


ARCHITECTURE_TO_DIFFERENCE = {
    "eagle-layer-1": "it reads the last state alone, knows distances by a bias per head and has "
    "no final norm, EAGLE-3 fuses the states of three layers, turns them by RoPE and norms last",
    "hydra-recurrent-1": "it is one recurrent layer on the last state, EAGLE-3 is a decoder layer "
    "with RoPE on the fused states of three layers and a final norm",
    "convex-linear-1": "it is one linear map per level, EAGLE-3 is a decoder layer with RoPE on "
    "the fused states of three layers and a final norm",
    "token-feedforward-1": "it reads tokens and no state, EAGLE-3 is a decoder layer with RoPE on "
    "the fused states of three layers and a final norm",
}
"""In what every kind of head differs from EAGLE-3, by architecture; plain texts, without torch."""


def refuse_eagle3(drafter_id: str, version: int, architecture: str) -> None:
    """Refuse to write a head in EAGLE-3's layout.

    Raises:
        ExportFormatError: Always: no head of the registry computes what EAGLE-3 does.
    """
    difference = ARCHITECTURE_TO_DIFFERENCE.get(
        architecture, "only a head that computes what EAGLE-3 does can take its layout"
    )
    raise ExportFormatError(
        f"drafter {drafter_id} version {version} is {architecture}, not EAGLE-3, and would draft "
        f"wrongly as such: {difference}; export it with --format {ExportFormat.DRAFTLOOP}, and let "
        "it draft in draftloop serve (a hydra head also inside vLLM, docs/vllm.md)"
    )
