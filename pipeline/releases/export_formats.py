"""In which layout a version leaves the registry, and which heads do not leave as EAGLE-3.

vLLM and SGLang read EAGLE-3 by the names of its tensors and compute its arithmetic, whatever the
tensors were trained for: a head of another arithmetic would load there and draft wrongly, without
an error. So every other head is refused for what it is.
"""

from __future__ import annotations

from enum import StrEnum

from schemas.errors import KnownError


class ExportFormat(StrEnum):
    """The layout of an exported folder."""

    DRAFTLOOP = "draftloop"
    """As in the registry: weights, config, training state, card, and a manifest with hashes."""
    EAGLE3 = "eagle3"
    """As vLLM and SGLang read EAGLE-3 (Li et al. 2025): config.json, d2t offsets, t2d mask."""


class ExportFormatError(KnownError):
    """A version cannot take the layout; the message names both, what differs and the cure."""


EAGLE3_ARCHITECTURE = "eagle3-layer-1"
"""The one that computes what EAGLE-3 does, as ``inference.drafters.eagle`` names it."""

ARCHITECTURE_TO_DIFFERENCE = {
    "eagle-layer-1": "an older version of draftloop trained it, with a bias per distance instead "
    "of RoPE and without a final norm",
    "hydra-recurrent-1": "it is one recurrent layer, EAGLE-3 is a decoder layer with attention",
    "convex-linear-1": "it is one linear map per level, EAGLE-3 is a decoder layer with attention",
    "token-feedforward-1": "it reads tokens and no state, EAGLE-3 reads the target's states",
}
"""In what other kinds of heads differ from EAGLE-3, by architecture; plain texts, without torch."""


def refuse_other_than_eagle3(drafter_id: str, version: int, architecture: str) -> None:
    """Refuse to write a head in EAGLE-3's layout that computes something else.

    Raises:
        ExportFormatError: If it does.
    """
    if architecture == EAGLE3_ARCHITECTURE:
        return
    difference = ARCHITECTURE_TO_DIFFERENCE.get(
        architecture, "only a head that computes what EAGLE-3 does can take its layout"
    )
    raise ExportFormatError(
        f"drafter {drafter_id} version {version} is {architecture}, not EAGLE-3, and would draft "
        f"wrongly as such: {difference}; export it with --format {ExportFormat.DRAFTLOOP}, or "
        "train a drafter of kind eagle"
    )
