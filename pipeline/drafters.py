"""Drafters from settings and artifacts: the pool of a worker, and what a learner trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from inference.drafters import convex, eagle, hydra, token_lm
from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.convex import ConvexDrafter
from inference.drafters.convex_training import TrainableConvex
from inference.drafters.eagle import EagleDrafter
from inference.drafters.eagle_training import TrainableEagle
from inference.drafters.hydra import (
    DraftVocabulary,
    FrozenRows,
    HydraDrafter,
    frequent_tokens,
)
from inference.drafters.hydra_training import VOCABULARY, TrainableHydra
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.drafters.token_lm import TokenLmDrafter
from inference.drafters.token_lm_training import TrainableTokenLm
from inference.ports import Drafter
from inference.target import Target, load_target
from learner.training import TrainableDrafter
from learner.updates.losses import LossSettings
from pipeline.pool_settings import DrafterSettings
from pipeline.registry import ArtifactError, DrafterRegistry
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
    num_heads, distances = _size(tensors, "distance"), _size(tensors, "distance", -1)
    return eagle.eagle_shapes(hidden_size, _size(tensors, "gate"), num_heads, distances - 1)


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
        return kind.build(release.drafter_id, release.version, tensors, rows)

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


def pool_drafters(
    settings: Sequence[DrafterSettings],
    target: Target,
    *,
    resolve: Callable[[str], Path],
    dtype: torch.dtype,
) -> list[Drafter]:
    """Build the pool in the order of the settings.

    A head stands as a drafter that proposes nothing until its first release arrives.

    Args:
        settings: One per drafter.
        target: The verifying model.
        resolve: Turns the path of a model into a checked folder.
        dtype: Number format of causal language models.
    """
    return [_drafter(one, target, resolve, dtype) for one in settings]


def _drafter(
    one: DrafterSettings, target: Target, resolve: Callable[[str], Path], dtype: torch.dtype
) -> Drafter:
    match one.kind:
        case "prompt_lookup":
            return PromptLookupDrafter(one.drafter_id, longest=one.longest, shortest=one.shortest)
        case "suffix":
            return SuffixDrafter(one.drafter_id, longest=one.longest, shortest=one.shortest)
        case "causal_lm":
            model = load_target(resolve(one.path), dtype=dtype)
            return CausalLmDrafter(model, target, drafter_id=one.drafter_id)
        case "hydra" | "convex" | "eagle" | "token_lm" | "none":
            return NothingDrafter(one.drafter_id)


def draft_vocabulary(target: Target, texts: Sequence[str], *, size: int) -> DraftVocabulary:
    """Choose a draft vocabulary by the frequency of the target's tokens in ``texts``."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(target.tokenizer(text)["input_ids"])
    return frequent_tokens(counts, size=min(size, target.vocab_size), vocab_size=target.vocab_size)


def trainable(one: DrafterSettings, rows: FrozenRows, *, num_levels: int = 4) -> TrainableDrafter:
    """Return the head of ``one`` as something to train.

    Args:
        one: The drafter; its kind is one that ``is_trained``.
        rows: What the target lends.
        num_levels: K, for heads that keep something per level.
    """
    terms = LossSettings(
        counts_tail=one.counts_tail,
        acceptance_weight=one.acceptance_weight,
        negative_weight=one.negative_weight,
    )
    build: Callable[..., TrainableDrafter]
    match one.kind:
        case "convex":
            build = partial(TrainableConvex, num_levels=num_levels, rank=one.rank)
        case "eagle":
            build = partial(
                TrainableEagle,
                inner_size=one.inner_size,
                num_heads=one.num_heads,
                num_context=one.num_context,
            )
        case "token_lm":
            num_read = one.num_context + 1
            build = partial(
                TrainableTokenLm, inner_size=one.inner_size, rank=one.rank, num_read=num_read
            )
        case _:
            build = partial(TrainableHydra, inner_size=one.inner_size)
    return build(one.drafter_id, rows, loss_settings=terms, seed=one.seed)
