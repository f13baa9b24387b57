"""What a target lends to heads: its frozen embeddings, its head rows, and tokens to propose."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from inference.packing import Linear, packed_linear
from learner.updates.losses import OUTSIDE

VOCABULARY = "draft_token_ids"
"""Name of the draft vocabulary among the tensors of an artifact."""

EPSILON = 1e-6
"""Of every rms_norm in a head."""


def normalised(states: torch.Tensor) -> torch.Tensor:
    """Return rms_norm without a gain."""
    return F.rms_norm(states, states.shape[-1:], eps=EPSILON)


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The target tokens that a head can propose.

    Attributes:
        token_ids: int64 (D,), strictly ascending ids of the target.
        sha256: Their hash, the identity of this vocabulary in events and artifacts.
    """

    token_ids: torch.Tensor
    sha256: str

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> DraftVocabulary:
        """Build from ids in any order; repeats are refused."""
        ids = sorted(token_ids)
        if not ids or len(set(ids)) != len(ids):
            raise ValueError(
                f"{len(ids)} draft tokens, {len(set(ids))} distinct; need >= 1, all so"
            )
        array = np.asarray(ids, dtype="<i8")
        return cls(torch.from_numpy(array), hashlib.sha256(array.tobytes()).hexdigest())


def frequent_tokens(counts: Mapping[int, int], *, size: int, vocab_size: int) -> DraftVocabulary:
    """Choose the ``size`` most frequent tokens, filled up with the lowest ids.

    The ids of a byte-pair tokenizer follow the order of its merges, so low ids are frequent in
    the tokenizer's own training text: the best guess where nothing was counted.
    """
    ranked = sorted(counts, key=lambda token: (-counts[token], token))[:size]
    chosen = dict.fromkeys(ranked)
    for token in range(vocab_size):
        if len(chosen) >= size:
            break
        chosen.setdefault(token)
    return DraftVocabulary.of(list(chosen))


@dataclass(frozen=True, slots=True)
class FrozenRows:
    """What heads of one draft vocabulary share, all taken from the target.

    Attributes:
        embeddings: (V, H), input embeddings.
        full_head: (V, H), output head.
        head: (D, H), output head rows of the draft vocabulary.
        logits: Product with ``head``, for inference.
        vocabulary: The draft vocabulary.

    All lie on the target's device.
    """

    embeddings: torch.Tensor
    full_head: torch.Tensor
    head: torch.Tensor
    logits: Linear
    vocabulary: DraftVocabulary

    @property
    def device(self) -> torch.device:
        """Where the target computes."""
        return self.head.device

    @classmethod
    def of(
        cls, embedding_rows: torch.Tensor, head_rows: torch.Tensor, vocabulary: DraftVocabulary
    ) -> FrozenRows:
        """Slice the head of a target: (V, H) embeddings, (V, H) head rows."""
        head = head_rows[vocabulary.token_ids].contiguous()
        return cls(embedding_rows, head_rows, head, packed_linear(head), vocabulary)


def draft_table(rows: FrozenRows) -> torch.Tensor:
    """Return the index of every target token in the draft vocabulary, int64 (V,)."""
    table = torch.full((rows.embeddings.shape[0],), OUTSIDE, dtype=torch.int64)
    table[rows.vocabulary.token_ids] = torch.arange(len(rows.head))
    return table.to(rows.device)
