"""Heads from artifacts: what a release says, what its files hold, and what a target lends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from inference.drafters import convex, eagle, hydra, token_lm
from inference.drafters.convex import ConvexDrafter
from inference.drafters.eagle import EagleDrafter
from inference.drafters.frozen_rows import VOCABULARY, DraftVocabulary, FrozenRows
from inference.drafters.hydra import HydraDrafter
from inference.drafters.token_lm import TokenLmDrafter
from pipeline.releases.registry import ArtifactError, DrafterRegistry
from schemas.events import DrafterReleased

Head = HydraDrafter | ConvexDrafter | EagleDrafter | TokenLmDrafter
"""A drafter over the target's frozen rows, with weights of its own."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadKind:
    """How heads of one architecture are loaded.

    Attributes:
        build: Makes one of id, version, tensors and rows.
        shapes: Returns the shapes that tensors must have, from the tensors and H.
    """

    build: Callable[[str, int, Tensors, FrozenRows], Head]
    shapes: Callable[[Tensors, int], dict[str, tuple[int, ...]]]


def _hydra_shapes(tensors: Tensors, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return hydra.hydra_shapes(hidden_size, _size(tensors, "mix"))


def _convex_shapes(tensors: Tensors, hidden_size: int) -> dict[str, tuple[int, ...]]:
    rank = _size(tensors, convex.PROJECTION) if convex.PROJECTION in tensors else None
    return convex.convex_shapes(_size(tensors, convex.MAPS), hidden_size, rank)


def _eagle_shapes(tensors: Tensors, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return eagle.eagle_shapes(hidden_size, _size(tensors, "down", -1))


def _token_lm_shapes(tensors: Tensors, hidden_size: int) -> dict[str, tuple[int, ...]]:
    rank = _size(tensors, "reduce")
    num_read = _size(tensors, "mix", -1) // max(rank, 1)
    return token_lm.token_lm_shapes(hidden_size, _size(tensors, "mix"), rank, num_read)


def _size(tensors: Tensors, name: str, axis: int = 0) -> int:
    """Return a size of a tensor; 0 if there is none."""
    return tensors[name].shape[axis] if name in tensors and tensors[name].ndim else 0


HEADS: Mapping[str, HeadKind] = {
    hydra.ARCHITECTURE: HeadKind(build=HydraDrafter, shapes=_hydra_shapes),
    convex.ARCHITECTURE: HeadKind(build=ConvexDrafter, shapes=_convex_shapes),
    eagle.ARCHITECTURE: HeadKind(build=EagleDrafter, shapes=_eagle_shapes),
    token_lm.ARCHITECTURE: HeadKind(build=TokenLmDrafter, shapes=_token_lm_shapes),
}
"""Architectures by the name that releases carry."""


class LendsRows(Protocol):
    """A target as far as its heads need it: ``inference.target.Target``, or one inside vLLM."""

    @property
    def fingerprint(self) -> str:
        """Hash of the weights."""

    @property
    def tokenizer_hash(self) -> str:
        """Hash of the token strings."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def embedding_rows(self) -> torch.Tensor:
        """Input embeddings, (V, H)."""

    @property
    def head_rows(self) -> torch.Tensor:
        """Output head, (V, H)."""


class HeadLoader:
    """Loads released heads for one target; heads of one draft vocabulary share its frozen rows.

    Args:
        target: Lends embeddings and head rows, and must be the one the heads were trained for.
        registry: Where the artifacts are.
    """

    def __init__(self, target: LendsRows, registry: DrafterRegistry) -> None:
        self._target = target
        self._registry = registry
        self._vocabulary_to_rows: dict[str, FrozenRows] = {}

    def __call__(self, release: DrafterReleased) -> Head:
        """Load one release.

        Raises:
            ArtifactError: If it is of another architecture, target, tokenizer or draft
                vocabulary than it says, or its files are not what was released.
        """
        where = f"drafter {release.drafter_id} version {release.version}"
        if release.architecture not in HEADS:
            raise ArtifactError(
                f"{where}: architecture", found=release.architecture, expected=", ".join(HEADS)
            )
        for name, found, expected in (
            ("target_fingerprint", release.target_fingerprint, self._target.fingerprint),
            ("tokenizer_hash", release.tokenizer_hash, self._target.tokenizer_hash),
        ):
            if found != expected:
                raise ArtifactError(f"{where}: {name}", found=found, expected=expected)
        tensors = dict(
            self._registry.read(
                release.artifact_uri, manifest_sha256=release.manifest_sha256
            ).tensors
        )
        rows = self._rows(where, tensors.pop(VOCABULARY, None), release.draft_vocabulary_hash)
        kind = HEADS[release.architecture]
        expected_shapes = kind.shapes(tensors, rows.head.shape[1])
        found_shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found_shapes != expected_shapes:
            raise ArtifactError(where, found=found_shapes, expected=expected_shapes)
        try:
            return kind.build(release.drafter_id, release.version, tensors, rows)
        except ValueError as error:
            raise ArtifactError(where, found=error, expected="values that can be") from error

    def _rows(self, where: str, token_ids: torch.Tensor | None, expected_hash: str) -> FrozenRows:
        if token_ids is None:
            raise ArtifactError(where, found="no draft vocabulary", expected=f"a {VOCABULARY}")
        vocabulary = DraftVocabulary.of(token_ids.tolist())
        if vocabulary.sha256 != expected_hash:
            raise ArtifactError(
                f"{where}: {VOCABULARY}", found=vocabulary.sha256, expected=expected_hash
            )
        if int(vocabulary.token_ids[-1]) >= self._target.vocab_size:
            raise ArtifactError(
                f"{where}: {VOCABULARY}",
                found=f"token {int(vocabulary.token_ids[-1])}",
                expected=f"tokens below {self._target.vocab_size}",
            )
        return self.rows_of(vocabulary)

    def rows_of(self, vocabulary: DraftVocabulary) -> FrozenRows:
        """Return the frozen rows of a draft vocabulary, the same object at every call."""
        if vocabulary.sha256 not in self._vocabulary_to_rows:
            self._vocabulary_to_rows[vocabulary.sha256] = FrozenRows.of(
                self._target.embedding_rows, self._target.head_rows, vocabulary
            )
        return self._vocabulary_to_rows[vocabulary.sha256]
