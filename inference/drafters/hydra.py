"""A recurrent head on the target's last hidden state, with a reduced draft vocabulary.

In the manner of Hydra (Ankner et al. 2024): every level sees the token of the level before, so the
levels are sequentially dependent. One set of weights serves all levels. With ``s`` the target's
last hidden state at the last verified token and ``e`` the target's frozen embedding of the newest
token, each level computes

    s <- s + W2 silu(W1 [rms_norm(s), rms_norm(e)]) + Wf rms_norm(e)
    logits = rows (s * g)

where ``rows`` are the target's own frozen head rows of the draft vocabulary. W2 and Wf start at
zero and g at one half, so an untrained head is the target's head, less sure, one position early.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.packing import Linear, packed_linear
from inference.ports import NO_PROPOSAL, Draft, Predictions, WindowBatch
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
        # A head that has learned nothing should not be as sure as the target is.
        "gain": torch.full(shapes["gain"], 0.5),
    }


def normalised(states: torch.Tensor) -> torch.Tensor:
    """Return rms_norm without a gain."""
    return F.rms_norm(states, states.shape[-1:], eps=_EPSILON)


def next_state(
    state: torch.Tensor, embedding: torch.Tensor, mix: Linear, out: Linear
) -> torch.Tensor:
    """Return the state of the next level, (..., H), from ``state`` and rms-normed ``embedding``."""
    mixed = F.silu(mix(torch.cat([normalised(state), embedding], -1)))
    return state + out(torch.cat([mixed, embedding], -1))


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


class SeenTokens:
    """Tokens of one request that its heads may propose besides the draft vocabulary.

    Names and numbers of a request come back in it. Their head rows cost next to nothing, and lift
    the cap that a fixed draft vocabulary puts on acceptance.

    Args:
        rows: Of the heads.
        trajectory: The request.

    Attributes:
        token_ids: int64 (E,), in the order of their first occurrence.
        first_positions: int64 (E,), where each occurred first.
        head: (E, H), their head rows.
    """

    def __init__(self, rows: FrozenRows, trajectory: Trajectory) -> None:
        self._rows = rows
        self._trajectory = trajectory
        self._known = set(rows.vocabulary.token_ids.tolist())
        self._num_read = 0
        self.token_ids = torch.empty(0, dtype=torch.int64, device=rows.device)
        self._vocabulary = rows.vocabulary.token_ids.to(rows.device)
        self.first_positions = np.empty(0, dtype=np.int64)
        self.head = rows.full_head[:0]

    def catch_up(self) -> None:
        """Read the tokens that the request has gained."""
        found: dict[int, int] = {}
        tokens = self._trajectory.token_ids
        for position in range(self._num_read, len(tokens)):
            if tokens[position] not in self._known:
                found.setdefault(tokens[position], position)
        self._num_read = len(tokens)
        self._known.update(found)
        if found:
            ids = torch.tensor(list(found), dtype=torch.int64, device=self._rows.device)
            self.token_ids = torch.cat([self.token_ids, ids])
            self.first_positions = np.append(self.first_positions, list(found.values()))
            self.head = self._rows.full_head[self.token_ids]

    @property
    def proposable(self) -> torch.Tensor:
        """Every token that may be proposed, int64 (D + E,)."""
        return torch.cat([self._vocabulary, self.token_ids])

    def logits(self, states: torch.Tensor, before: NDArray[np.int64]) -> torch.Tensor:
        """Return the logits of the tokens seen before a position, -inf for those seen later.

        Args:
            states: (..., W, H).
            before: int64 (W,).

        Returns:
            (..., W, E).
        """
        is_unseen = torch.from_numpy(self.first_positions[None, :] >= before[:, None])
        return F.linear(states, self.head).masked_fill(is_unseen.to(states.device), -torch.inf)


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
        self.weights = {name: tensor.to(rows.head) for name, tensor in weights.items()}
        self.mix = packed_linear(self.weights["mix"])
        self.out = packed_linear(self.weights["out"])
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


class HeadSession:
    """What one request of any head over frozen rows needs: what it may propose, and its law.

    Args:
        rows: Of the head.
        trajectory: The request.
        draws_drafts: Whether drafts are drawn.
    """

    def __init__(self, rows: FrozenRows, trajectory: Trajectory, *, draws_drafts: bool) -> None:
        self.rows = rows
        self.trajectory = trajectory
        self.draws_drafts = draws_drafts
        self.seen = SeenTokens(rows, trajectory)

    def finish(self) -> None:
        """Nothing is kept."""

    def logits(
        self, vocabulary_logits: torch.Tensor, states: torch.Tensor, before: NDArray[np.int64]
    ) -> torch.Tensor:
        """Return the logits (W, D + E) of all that may be proposed, from those of (W, D)."""
        return torch.cat([vocabulary_logits, self.seen.logits(states, before)], -1)

    def best(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the most probable token of each row of (..., D + E).

        Raises:
            FloatingPointError: If a logit is NaN or infinitely large.
        """
        # Widening is exact, and the maximum over float32 is several times faster here.
        found = logits.float().max(-1)
        _refuse_non_finite(found.values)
        return self.seen.proposable[found.indices]

    def full_probs(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the processed distributions over the target's vocabulary, (..., V).

        Raises:
            FloatingPointError: If a logit is NaN or infinitely large.
        """
        _refuse_non_finite(logits.float().max(-1).values)
        probs = processed_probs(logits, self.trajectory.params)
        full = probs.new_zeros((*probs.shape[:-1], self.rows.embeddings.shape[0]))
        full[..., self.seen.proposable] = probs
        return full

    def predictions(self, levels: Sequence[torch.Tensor], num_known_levels: int) -> Predictions:
        """Return what was found level by level, (W, V) or (W,) each, behind the known levels."""
        found = torch.stack(list(levels), dim=1)
        if self.draws_drafts:
            return Predictions(probs=F.pad(found, (0, 0, num_known_levels, 0)))
        padded = F.pad(found, (num_known_levels, 0), value=NO_PROPOSAL)
        return Predictions(proposals=padded.cpu().numpy())


class HydraSession(HeadSession):
    """One request of one head."""

    def __init__(
        self, drafter: HydraDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        super().__init__(drafter.rows, trajectory, draws_drafts=draws_drafts)
        self.drafter = drafter

    @torch.inference_mode()
    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Unroll from the state behind the newest verified token."""
        self.seen.catch_up()
        drafter, length = self.drafter, len(self.trajectory)
        before = np.array([length])
        state = self.trajectory.hidden(length - 1, length)
        token_id = self.trajectory.token_ids[-1]
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        for _ in range(num_tokens):
            embedding = normalised(drafter.rows.embeddings[token_id : token_id + 1])
            state = next_state(state, embedding, drafter.mix, drafter.out)
            scaled = state * drafter.weights["gain"]
            logits = self.logits(drafter.rows.logits(scaled), scaled, before)
            if self.draws_drafts:
                probs.append(self.full_probs(logits)[0])
                token_id = draw(probs[-1][None], rng.random(1))[0]
            else:
                token_id = int(self.best(logits)[0])
            token_ids.append(token_id)
        return Draft(
            token_ids=tuple(token_ids), probs=torch.stack(probs) if self.draws_drafts else None
        )

    def predict(self, windows: WindowBatch) -> Predictions:
        """Unroll over verified windows, told the verified tokens."""
        return predict_heads([self], windows)[0]


@torch.inference_mode()
def predict_heads(sessions: Sequence[HydraSession], windows: WindowBatch) -> list[Predictions]:
    """Return what each head would have proposed at every level of every window.

    Level k is told the verified tokens before it: a window counts a level only while all levels
    before were accepted, and then the verified tokens are the drafted ones.

    Args:
        sessions: Of one request, with drafters over the same frozen rows.
        windows: Windows of that request.
    """
    trajectory, rows = sessions[0].trajectory, sessions[0].drafter.rows
    first, last = int(windows.starts[0]) - 1, int(windows.starts[-1])
    states = trajectory.hidden(first, last)[torch.from_numpy(windows.starts - 1 - first)]
    per_head = [states] * len(sessions)
    verified = np.asarray(trajectory.token_ids, dtype=np.int64)
    found: list[list[torch.Tensor]] = [[] for _ in sessions]
    for session in sessions:
        session.seen.catch_up()
    for level in range(windows.num_speculative_tokens):
        previous = np.minimum(windows.starts + level - 1, len(verified) - 1)
        embedding = normalised(rows.embeddings[torch.from_numpy(verified[previous])])
        per_head = [
            next_state(state, embedding, session.drafter.mix, session.drafter.out)
            for state, session in zip(per_head, sessions, strict=True)
        ]
        scaled = [s * x.drafter.weights["gain"] for s, x in zip(per_head, sessions, strict=True)]
        if level < windows.num_known_levels:
            continue
        # One product for all heads: their shared rows are read once.
        joint = torch.split(rows.logits(torch.cat(scaled)), len(states))
        for session, own, state, kept in zip(sessions, joint, scaled, found, strict=True):
            logits = session.logits(own, state, windows.starts)
            kept.append(
                session.full_probs(logits) if session.draws_drafts else session.best(logits)
            )
    return [
        session.predictions(kept, windows.num_known_levels)
        for session, kept in zip(sessions, found, strict=True)
    ]


def _refuse_non_finite(values: torch.Tensor) -> None:
    if not torch.isfinite(values).all():
        raise FloatingPointError("the head's output is not finite")
