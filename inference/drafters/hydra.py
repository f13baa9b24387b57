"""A recurrent head on the target's last hidden state, with a reduced draft vocabulary.

In the manner of Hydra (Ankner et al. 2024): every level sees the token of the level before, so the
levels are sequentially dependent. One set of weights serves all levels. With ``s`` the target's
last hidden state at the last verified token and ``e`` the target's frozen embedding of the newest
token, each level computes

    s <- s + W2 silu(W1 [rms_norm(s), rms_norm(e)]) + Wf rms_norm(e)
    logits = rows (s * g)

where ``rows`` are the target's own frozen head rows of the draft vocabulary. W2 and Wf start at
zero, so an untrained head is the target's head applied one position too early.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from inference.ports import Draft, Predictions, WindowBatch
from inference.sampling import draw, processed_probs
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion

ARCHITECTURE = "hydra-recurrent-1"
_EPSILON = 1e-6


def hydra_shapes(hidden_size: int, inner_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    return {
        "mix": (inner_size, 2 * hidden_size),
        "out": (hidden_size, inner_size + hidden_size),
        "gain": (hidden_size,),
    }


def initial_hydra_weights(
    hidden_size: int, inner_size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return untrained float32 parameters; ``out`` joins W2 and Wf and starts at zero."""
    shapes = hydra_shapes(hidden_size, inner_size)
    bound = (2 * hidden_size) ** -0.5
    return {
        "mix": torch.empty(shapes["mix"]).uniform_(-bound, bound, generator=generator),
        "out": torch.zeros(shapes["out"]),
        "gain": torch.ones(shapes["gain"]),
    }


def normalised(states: torch.Tensor) -> torch.Tensor:
    """Return rms_norm without a gain."""
    return F.rms_norm(states, states.shape[-1:], eps=_EPSILON)


def next_state(
    state: torch.Tensor, embedding: torch.Tensor, weights: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Return the state of the next level, (..., H), from ``state`` and rms-normed ``embedding``."""
    mixed = F.silu(F.linear(torch.cat([normalised(state), embedding], -1), weights["mix"]))
    return state + F.linear(torch.cat([mixed, embedding], -1), weights["out"])


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
        head: (D, H), output head rows of the draft vocabulary.
        vocabulary: The draft vocabulary.
    """

    embeddings: torch.Tensor
    head: torch.Tensor
    vocabulary: DraftVocabulary

    @classmethod
    def of(
        cls, embedding_rows: torch.Tensor, head_rows: torch.Tensor, vocabulary: DraftVocabulary
    ) -> FrozenRows:
        """Slice the head of a target: (V, H) embeddings, (V, H) head rows."""
        return cls(embedding_rows, head_rows[vocabulary.token_ids].contiguous(), vocabulary)


class HydraDrafter:
    """One version of one head.

    Args:
        drafter_id: Name in the pool.
        weights_version: Version of ``weights``.
        weights: Parameters by name (``hydra_shapes``), in the target's type.
        rows: What the target lends; heads with the same ``rows`` object are scored together.
    """

    def __init__(
        self,
        drafter_id: str,
        weights_version: int,
        weights: Mapping[str, torch.Tensor],
        rows: FrozenRows,
    ) -> None:
        self.version = DrafterVersion(
            drafter_id=drafter_id,
            weights_version=weights_version,
            draft_vocabulary_hash=rows.vocabulary.sha256,
        )
        self.weights = {name: tensor.to(rows.head.dtype) for name, tensor in weights.items()}
        self.rows = rows

    @property
    def group_key(self) -> tuple[object, ...]:
        """Heads over the same frozen rows."""
        return (ARCHITECTURE, id(self.rows))

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> HydraSession:
        """Begin a request; a head keeps nothing between rounds."""
        return HydraSession(self, trajectory, draws_drafts=draws_drafts)

    def predict_group(
        self, sessions: Sequence[HydraSession], windows: WindowBatch
    ) -> list[Predictions]:
        """Unroll all heads over all windows, one product with the shared head rows per level."""
        return predict_heads(sessions, windows)


class HydraSession:
    """One request of one head."""

    def __init__(
        self, drafter: HydraDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        self.drafter = drafter
        self.trajectory = trajectory
        self.draws_drafts = draws_drafts

    @torch.inference_mode()
    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Unroll from the state behind the newest verified token."""
        rows, weights = self.drafter.rows, self.drafter.weights
        length = len(self.trajectory)
        state = self.trajectory.hidden(length - 1, length)[0]
        token_id = self.trajectory.token_ids[-1]
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        for _ in range(num_tokens):
            state = next_state(state, normalised(rows.embeddings[token_id]), weights)
            logits = F.linear(state * weights["gain"], rows.head)
            if self.draws_drafts:
                probs.append(self._full_probs(logits[None])[0])
                token_id = draw(probs[-1][None], rng.random(1))[0]
            else:
                token_id = int(rows.vocabulary.token_ids[logits.argmax()])
            token_ids.append(token_id)
        _refuse_non_finite(logits)
        return Draft(
            token_ids=tuple(token_ids), probs=torch.stack(probs) if self.draws_drafts else None
        )

    def predict(self, windows: WindowBatch) -> Predictions:
        """Unroll over verified windows, told the verified tokens."""
        return predict_heads([self], windows)[0]

    def finish(self) -> None:
        """Nothing is kept."""

    def _full_probs(self, logits: torch.Tensor) -> torch.Tensor:
        vocabulary = self.drafter.rows.vocabulary.token_ids
        probs = processed_probs(logits, self.trajectory.params)
        full = probs.new_zeros((*probs.shape[:-1], self.drafter.rows.embeddings.shape[0]))
        full[..., vocabulary] = probs
        return full


@torch.inference_mode()
def predict_heads(sessions: Sequence[HydraSession], windows: WindowBatch) -> list[Predictions]:
    """Return what each head would have proposed at every level of every window.

    Level k is told the verified tokens before it: a window counts a level only while all levels
    before were accepted, and then the verified tokens are the drafted ones.
    """
    trajectory, rows = sessions[0].trajectory, sessions[0].drafter.rows
    first, last = int(windows.starts[0]) - 1, int(windows.starts[-1])
    states = trajectory.hidden(first, last)[torch.from_numpy(windows.starts - 1 - first)]
    per_head = [states] * len(sessions)
    verified = np.asarray(trajectory.token_ids, dtype=np.int64)
    levels: list[torch.Tensor] = []
    for level in range(windows.num_speculative_tokens):
        previous = np.minimum(windows.starts + level - 1, len(verified) - 1)
        embedding = normalised(rows.embeddings[torch.from_numpy(verified[previous])])
        per_head = [
            next_state(state, embedding, session.drafter.weights)
            for state, session in zip(per_head, sessions, strict=True)
        ]
        scaled = [s * x.drafter.weights["gain"] for s, x in zip(per_head, sessions, strict=True)]
        levels.append(F.linear(torch.stack(scaled), rows.head))
    return [_read_levels(session, levels, head) for head, session in enumerate(sessions)]


def _read_levels(session: HydraSession, levels: list[torch.Tensor], head: int) -> Predictions:
    logits = torch.stack([level[head] for level in levels], dim=1)  # (W, K, D)
    _refuse_non_finite(logits)
    if session.draws_drafts:
        return Predictions(probs=session._full_probs(logits))
    proposals = session.drafter.rows.vocabulary.token_ids[logits.argmax(-1)]
    return Predictions(proposals=proposals.numpy())


def _refuse_non_finite(values: torch.Tensor) -> None:
    if not torch.isfinite(values).all():
        raise FloatingPointError("the head's output is not finite")
