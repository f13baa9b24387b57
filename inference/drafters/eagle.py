"""A head that is the draft model of EAGLE-3 (Li et al. 2025) on the target's last hidden state.

One decoder layer of the Llama kind, whose attention reads a pair: the embedding of a token and the
state that predicted it. With ``s`` that state, ``e`` the target's frozen embedding, and ``norm`` an
rms_norm with a gain of its own each time, every level computes

    x = [norm(e), norm(s)]
    s <- s + O attention(Q x, K x' , V x')     over the pairs x' of the last positions and levels
    s <- s + D (silu(G n) * U n)               n = norm(s)
    logits = rows norm(s)

Queries and keys are turned by their positions (RoPE); pairs further back than ``num_context``
positions are not seen. The first ``s`` is the target's state behind its final norm, as EAGLE-3
takes it with ``use_aux_hidden_state = false``; the later ones are the head's own. ``rows`` are the
target's own frozen head rows of the draft vocabulary. O and D start at zero, so an untrained head
is the target's head, as sure as the final norm makes it, one position early. K starts as Q: then a
pair attends to itself above all, and learning need not find that first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.frozen_rows import EPSILON, FrozenRows
from inference.drafters.head import HeadDrafter, HeadSession
from inference.packing import Linear, packed_linear
from inference.trajectory import Trajectory

ARCHITECTURE = "eagle3-layer-1"
SIZES = "sizes"
"""Tensor of an artifact, int64 (2,): number of heads, ``num_context``; not trained."""

ROPE_THETA = 10_000.0

INITIAL_SCALE = 0.7
"""Of Q and K: with heads 64 wide most of a pair's attention begins on the pair itself."""

PRODUCTS = ("qkv", "attend", "gate_up", "down")
NORMS = ("embedding_norm", "state_norm", "inner_norm", "final_norm")


def eagle_shapes(hidden_size: int, inner_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of an artifact, by name."""
    return {
        SIZES: (2,),
        "qkv": (3 * hidden_size, 2 * hidden_size),
        "attend": (hidden_size, hidden_size),
        "gate_up": (2 * inner_size, hidden_size),
        "down": (hidden_size, inner_size),
        **dict.fromkeys(NORMS, (hidden_size,)),
    }


def initial_eagle_weights(
    hidden_size: int, inner_size: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Return untrained float32 parameters."""
    shapes = eagle_shapes(hidden_size, inner_size)
    weights = {}
    for name in PRODUCTS:
        bound = math.sqrt(3.0 / shapes[name][-1])
        weights[name] = torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)
    for name in ("attend", "down"):
        weights[name].zero_()
    query, key, _ = weights["qkv"].chunk(3)
    key.copy_(query.mul_(INITIAL_SCALE))
    return weights | {name: torch.ones(hidden_size) for name in NORMS}


def refuse_sizes(hidden_size: int, num_heads: int, num_context: int) -> None:
    """Refuse attention that cannot be.

    Raises:
        ValueError: If heads are not of one even size, or nothing is seen.
    """
    if num_heads < 1 or hidden_size % num_heads or (hidden_size // num_heads) % 2:
        raise ValueError(
            f"num_heads={num_heads} does not divide the target's hidden size {hidden_size} into "
            "heads of an even size"
        )
    if num_context < 1:
        raise ValueError(f"num_context={num_context} outside 1..")


def turned(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn vectors by their positions (Su et al. 2021), first half against second half.

    Args:
        vectors: (..., heads, size).
        positions: int64 (...).
    """
    half = vectors.shape[-1] // 2
    exponents = torch.arange(half, device=vectors.device, dtype=torch.float32) / half
    angles = positions.to(vectors.device)[..., None, None] * ROPE_THETA**-exponents
    cosine, sine = angles.cos().to(vectors.dtype), angles.sin().to(vectors.dtype)
    first, second = vectors[..., :half], vectors[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class EagleLayer:
    """The layer's arithmetic on given weights, the same for training and serving.

    Args:
        weights: Parameters by name (``eagle_shapes``).
        num_heads: Of attention.
        num_context: Pairs attended to before the newest.
        product: Makes a product of its weights.
    """

    def __init__(
        self,
        weights: Mapping[str, torch.Tensor],
        num_heads: int,
        num_context: int,
        product: Callable[[torch.Tensor], Linear] = lambda weight: partial(F.linear, weight=weight),
    ) -> None:
        self._weights = weights
        self.num_heads = num_heads
        self.num_context = num_context
        self._product = {name: product(weights[name]) for name in PRODUCTS}

    def attention_inputs(
        self, state: torch.Tensor, embedding: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the queries of pairs, and what is attended to of them.

        Args:
            state: (..., H).
            embedding: (..., H), of the target.
            positions: int64 (...).

        Returns:
            (..., heads, H / heads) and (..., 2, heads, H / heads).
        """
        pair = [self._norm("embedding_norm", embedding), self._norm("state_norm", state)]
        joint = self._product["qkv"](torch.cat(pair, -1))
        query, key, value = joint.reshape(*joint.shape[:-1], 3, self.num_heads, -1).unbind(-3)
        return turned(query, positions), torch.stack([turned(key, positions), value], dim=-3)

    def next_state(
        self,
        state: torch.Tensor,
        query: torch.Tensor,
        attended: torch.Tensor,
        is_absent: torch.Tensor,
    ) -> torch.Tensor:
        """Return the state of the next level, (W, H).

        Args:
            state: (W, H).
            query: (W, heads, H / heads).
            attended: (W, N, 2, heads, H / heads), the pair's own among them.
            is_absent: bool (W, N).
        """
        keys, values = attended.unbind(-3)
        scores = torch.einsum("whd,wnhd->whn", query, keys) / math.sqrt(query.shape[-1])
        shares = scores.masked_fill(is_absent[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("whn,wnhd->whd", shares, values).flatten(-2)
        state = state + self._product["attend"](mixed)
        gate, up = self._product["gate_up"](self._norm("inner_norm", state)).chunk(2, -1)
        return state + self._product["down"](F.silu(gate) * up)

    def scaled(self, state: torch.Tensor) -> torch.Tensor:
        """Return what the head rows are multiplied with."""
        return self._norm("final_norm", state)

    def _norm(self, name: str, states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(states, states.shape[-1:], self._weights[name], EPSILON)


class EagleUnroll:
    """W windows of one head over one context each.

    Args:
        layer: The arithmetic.
        embeddings: (V, H), of the target.
        state: (W, H), the target's, behind the newest verified token of each.
        context: (W, N, 2, heads, H / heads), keys and values of the pairs before, oldest first.
        is_absent: bool (W, N).
        positions: int64 (W,), of the newest verified tokens, counted as those of the context.
    """

    def __init__(
        self,
        layer: EagleLayer,
        embeddings: torch.Tensor,
        state: torch.Tensor,
        context: torch.Tensor,
        is_absent: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        self._layer = layer
        self._embeddings = embeddings
        self._state = state
        self._attended = context
        self._is_absent = is_absent
        self._positions = positions

    def step(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Go one level further, told the newest tokens (W,); return (W, H)."""
        layer, num_seen = self._layer, self._layer.num_context + 1
        embedding = self._embeddings[token_ids]
        query, own = layer.attention_inputs(self._state, embedding, self._positions)
        self._attended = torch.cat([self._attended, own[:, None]], dim=1)[:, -num_seen:]
        self._is_absent = F.pad(self._is_absent, (0, 1), value=False)[:, -num_seen:]
        self._positions = self._positions + 1
        self._state = layer.next_state(self._state, query, self._attended, self._is_absent)
        return layer.scaled(self._state)


class EagleDrafter(HeadDrafter):
    """One version of one head, of the tensors of an artifact (``HeadDrafter``).

    Raises:
        ValueError: If its sizes cannot be.
    """

    def __init__(
        self,
        drafter_id: str,
        weights_version: int,
        weights: Mapping[str, torch.Tensor],
        rows: FrozenRows,
    ) -> None:
        super().__init__(drafter_id, weights_version, weights, rows)
        num_heads, num_context = self.weights[SIZES].tolist()
        refuse_sizes(rows.head.shape[1], num_heads, num_context)
        self.layer = EagleLayer(self.weights, num_heads, num_context, packed_linear)

    def start(self, trajectory: Trajectory, *, stream: str, draws_drafts: bool) -> EagleSession:
        """Begin a request."""
        return EagleSession(self, trajectory, draws_drafts=draws_drafts)


class EagleSession(HeadSession):
    """One request of one head: keys and values of its verified positions.

    Prompt positions have no recorded state, so attention begins with the first output token.
    """

    def __init__(
        self, drafter: EagleDrafter, trajectory: Trajectory, *, draws_drafts: bool
    ) -> None:
        super().__init__(drafter.rows, trajectory, draws_drafts=draws_drafts)
        self._layer = drafter.layer
        self._cached: torch.Tensor | None = None

    @torch.inference_mode()
    def unroll(self, starts: NDArray[np.int64]) -> EagleUnroll:
        """Begin at the target's states, behind the pairs before."""
        cached = self._catch_up()
        newest = torch.from_numpy(starts).to(self.rows.device)
        newest = newest - 1 - self.trajectory.num_prompt_tokens
        back = torch.arange(-self._layer.num_context, 0, device=self.rows.device)
        places = newest[:, None] + back
        return EagleUnroll(
            self._layer,
            self.rows.embeddings,
            self.states(starts),
            cached[places.clamp_min(0)],
            places < 0,
            newest,
        )

    def _catch_up(self) -> torch.Tensor:
        """Return keys and values of all verified output positions, (P, 2, heads, H / heads)."""
        first_output, length = self.trajectory.num_prompt_tokens, len(self.trajectory)
        known = 0 if self._cached is None else len(self._cached)
        if self._cached is None or first_output + known < length:
            token_ids = torch.tensor(self.trajectory.token_ids[first_output + known :])
            states = self.trajectory.hidden(first_output + known, length)
            positions = torch.arange(known, known + len(states), device=self.rows.device)
            _, new = self._layer.attention_inputs(
                states, self.rows.embeddings[token_ids], positions
            )
            self._cached = new if self._cached is None else torch.cat([self._cached, new])
        return self._cached
