"""Drafters from settings and artifacts: the pool of a worker, and what a learner trains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from inference.drafters.causal_lm import CausalLmDrafter
from inference.drafters.hydra import (
    ARCHITECTURE,
    DraftVocabulary,
    FrozenRows,
    HydraDrafter,
    frequent_tokens,
    hydra_shapes,
)
from inference.drafters.hydra_training import VOCABULARY, TrainableHydra
from inference.drafters.nothing import NothingDrafter
from inference.drafters.prompt_lookup import PromptLookupDrafter
from inference.drafters.suffix import SuffixDrafter
from inference.ports import Drafter
from inference.target import Target, load_target
from pipeline.registry import ArtifactError, DrafterRegistry
from pipeline.settings import DrafterSettings
from schemas.events import DrafterReleased


class HeadLoader:
    """Loads released heads for one target; heads of one draft vocabulary share its frozen rows.

    Args:
        target: Lends embeddings and head rows, and must be the one the heads were trained for.
        registry: Where the artifacts are.
    """

    def __init__(self, target: Target, registry: DrafterRegistry) -> None:
        self._target = target
        self._registry = registry
        self._vocabulary_to_rows: dict[str, FrozenRows] = {}

    def __call__(self, release: DrafterReleased) -> HydraDrafter:
        """Load one release.

        Raises:
            ArtifactError: If it is of another architecture, target, tokenizer or draft
                vocabulary than it says, or its files are not what was released.
        """
        where = f"drafter {release.drafter_id} version {release.version}"
        for name, found, expected in (
            ("architecture", release.architecture, ARCHITECTURE),
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
        _check_shapes(where, tensors, rows)
        return HydraDrafter(release.drafter_id, release.version, tensors, rows)

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
        case "hydra" | "none":
            return NothingDrafter(one.drafter_id)


def draft_vocabulary(target: Target, texts: Sequence[str], *, size: int) -> DraftVocabulary:
    """Choose a draft vocabulary by the frequency of the target's tokens in ``texts``."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(target.tokenizer(text)["input_ids"])
    return frequent_tokens(counts, size=min(size, target.vocab_size), vocab_size=target.vocab_size)


def trainable(one: DrafterSettings, rows: FrozenRows) -> TrainableHydra:
    """Return the head of ``one`` as something to train."""
    return TrainableHydra(one.drafter_id, rows, inner_size=one.inner_size, seed=one.seed)


def _check_shapes(where: str, tensors: dict[str, torch.Tensor], rows: FrozenRows) -> None:
    inner_size = tensors["mix"].shape[0] if "mix" in tensors else 0
    expected = hydra_shapes(rows.head.shape[1], inner_size)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        raise ArtifactError(where, found=found, expected=expected)
