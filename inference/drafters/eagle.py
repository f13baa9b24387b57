"""A head of one transformer layer on the target's states, with attention to those before.

In the manner of EAGLE (Li et al. 2024): the state that predicted a token is paired with that
token's embedding, one decoder layer attends over the pairs before it and extrapolates the next
state, and the target's own frozen head reads it. With ``s`` the target's last hidden state and
``e`` its frozen, rms-normed embedding of the newest token, each level computes

    x = F [rms_norm(s), e]
    a = O attention(Q x, K x' , V x')       over the pairs x' of the last positions and levels
    s <- s + a + D (silu(G n) * U n)        n = rms_norm(x + a)
    logits = rows (s * g)

Attention knows distances by a bias per head; pairs further back than ``num_context`` positions are
not seen. O and D start at zero and g at one half, so that an untrained head is the target's head,
less sure, one position early.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from inference.drafters.hydra import FrozenRows, HeadSession, normalised
from inference.ports import Draft, Predictions, WindowBatch
from inference.sampling import draw
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion

ARCHITECTURE = "eagle-layer-1"


def eagle_shapes(
    hidden_size: int, inner_size: int, num_heads: int, num_context: int
) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter, by name."""
    square = (hidden_size, hidden_size)
    return {
        "fuse": (hidden_size, 2 * hidden_size),
        "query": square,
        "key": square,
        "value": square,
        "attend": square,
        "distance": (num_heads, num_context + 1),
        "gate": (inner_size, hidden_size),
        "up": (inner_size, hidden_size),
        "down": (hidden_size, inner_size),
        "gain": (hidden_size,),
    }


def initial_eagle_weights(
    hidden_size: int,
    inner_size: int,
    num_heads: int,
    num_context: int,
    generator: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Return untrained float32 parameters."""
    shapes = eagle_shapes(hidden_size, inner_size, num_heads, num_context)
    weights = {}
    for name, shape in shapes.items():
        bound = math.sqrt(3.0 / shape[-1])
        weights[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
    for name in ("attend", "down", "distance"):
        weights[name].zero_()
    weights["gain"].fill_(0.5)
    return weights


class EagleLayer:
    """The layer's arithmetic on given weights, the same for training and serving.

    Args:
        weights: Parameters by name (``eagle_shapes``).
    """

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._num_heads, distances = weights["distance"].shape
        self.num_context = distances - 1

    def pair(self, state: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return x of states (..., H) and the rms-normed embeddings of their tokens (..., H)."""
        both = torch.cat([normalised(state), embedding], -1)
        return normalised(F.linear(both, self._weights["fuse"]))

    def keys_and_values(self, pairs: torch.Tensor) -> torch.Tensor:
        """Return what is attended to, (..., 2, heads, H / heads)."""
        both = [F.linear(pairs, self._weights[name]) for name in ("key", "value")]
        return torch.stack([self._split(one) for one in both], dim=-3)

    def next_state(
        self,
        state: torch.Tensor,
        pair: torch.Tensor,
        attended: torch.Tensor,
        distances: torch.Tensor,
        is_absent: torch.Tensor,
    ) -> torch.Tensor:
        """Return the state of the next level, (W, H).

        Args:
            state: (W, H).
            pair: x, (W, H).
            attended: (W, N, 2, heads, H / heads), the pair's own among them.
            distances: int64 (N,), how far back each is, >= 0.
            is_absent: bool (W, N).
        """
        query = self._split(F.linear(pair, self._weights["query"]))
        keys, values = attended.unbind(-3)
        scores = torch.einsum("whd,wnhd->whn", query, keys) / math.sqrt(query.shape[-1])
        scores = scores + self._weights["distance"][:, distances.clamp_max(self.num_context)]
        shares = scores.masked_fill(is_absent[:, None], -torch.inf).softmax(-1)
        mixed = torch.einsum("whn,wnhd->whd", shares, values).flatten(-2)
        moved = F.linear(mixed, self._weights["attend"])
        inner = normalised(pair + moved)
        opened = F.silu(F.linear(inner, self._weights["gate"]))
        grown = opened * F.linear(inner, self._weights["up"])
        return state + moved + F.linear(grown, self._weights["down"])

    def scaled(self, state: torch.Tensor) -> torch.Tensor:
        """Return what the head rows are multiplied with."""
        return state * self._weights["gain"]

    def _split(self, tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.shape[-1] // self._num_heads
        return tensor.reshape(*tensor.shape[:-1], self._num_heads, size)


class EagleUnroll:
    """W windows unrolled level by level over one context each.

    Args:
        layer: The arithmetic.
        state: (W, H), behind the newest verified token of each.
        context: (W, N, 2, heads, H / heads), keys and values of the pairs before, oldest first.
        is_absent: bool (W, N).
    """

    def __init__(
        self,
        layer: EagleLayer,
        state: torch.Tensor,
        context: torch.Tensor,
        is_absent: torch.Tensor,
    ) -> None:
        self._layer = layer
        self._state = state
        self._attended = context
        self._is_absent = is_absent

    def step(self, embedding: torch.Tensor) -> torch.Tensor:
        """Go one level further, told the newest tokens' embeddings (W, H); return (W, H)."""
        layer = self._layer
        pair = layer.pair(self._state, embedding)
        own = layer.keys_and_values(pair)[:, None]
        self._attended = torch.cat([self._attended, own], dim=1)
        self._is_absent = F.pad(self._is_absent, (0, 1), value=False)
        distances = torch.arange(self._attended.shape[1] - 1, -1, -1, device=pair.device)
        self._state = layer.next_state(
            self._state, pair, self._attended, distances, self._is_absent
        )
        return layer.scaled(self._state)


class EagleDrafter:
    """One version of one head.

    Args:
        drafter_id: Name in the pool.
        weights_version: Version of ``weights``.
        weights: Parameters by name (``eagle_shapes``).
        rows: What the target lends.
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
        self.layer = EagleLayer(self.weights)
        self.rows = rows

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
        self.drafter = drafter
        self._cached = drafter.layer.keys_and_values(drafter.rows.head[:0])

    @torch.inference_mode()
    def draft(self, num_tokens: int, rng: np.random.Generator) -> Draft:
        """Unroll from the state behind the newest verified token."""
        length = len(self.trajectory)
        before = np.array([length])
        unroll = self._unroll(before)
        token_id = self.trajectory.token_ids[-1]
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        for _ in range(num_tokens):
            scaled = unroll.step(self._embedding(np.array([token_id])))
            logits = self.logits(self.rows.logits(scaled), scaled, before)
            if self.draws_drafts:
                probs.append(self.full_probs(logits)[0])
                token_id = draw(probs[-1][None], rng.random(1))[0]
            else:
                token_id = int(self.best(logits)[0])
            token_ids.append(token_id)
        return Draft(
            token_ids=tuple(token_ids), probs=torch.stack(probs) if self.draws_drafts else None
        )

    @torch.inference_mode()
    def predict(self, windows: WindowBatch) -> Predictions:
        """Unroll over verified windows, told the verified tokens."""
        unroll = self._unroll(windows.starts)
        verified = np.asarray(self.trajectory.token_ids, dtype=np.int64)
        found: list[torch.Tensor] = []
        for level in range(windows.num_speculative_tokens):
            newest = verified[np.minimum(windows.starts + level - 1, len(verified) - 1)]
            scaled = unroll.step(self._embedding(newest))
            if level < windows.num_known_levels:
                continue
            logits = self.logits(self.rows.logits(scaled), scaled, windows.starts)
            found.append(self.full_probs(logits) if self.draws_drafts else self.best(logits))
        return self.predictions(found, windows.num_known_levels)

    def _embedding(self, token_ids: NDArray[np.int64]) -> torch.Tensor:
        return normalised(self.rows.embeddings[torch.from_numpy(token_ids)])

    def _unroll(self, starts: NDArray[np.int64]) -> EagleUnroll:
        """Begin windows whose first level predicts positions ``starts``."""
        self.seen.catch_up()
        self._catch_up()
        first_output = self.trajectory.num_prompt_tokens
        newest = torch.from_numpy(starts).to(self.rows.device) - 1 - first_output
        states = self.trajectory.hidden(first_output, len(self.trajectory))[newest]
        back = torch.arange(-self.drafter.layer.num_context, 0, device=self.rows.device)
        places = newest[:, None] + back
        return EagleUnroll(
            self.drafter.layer, states, self._cached[places.clamp_min(0)], places < 0
        )

    def _catch_up(self) -> None:
        """Compute keys and values of the output positions that were verified since."""
        first_output, length = self.trajectory.num_prompt_tokens, len(self.trajectory)
        known = first_output + len(self._cached)
        if known < length:
            tokens = np.asarray(self.trajectory.token_ids[known:], dtype=np.int64)
            states = self.trajectory.hidden(known, length)
            pairs = self.drafter.layer.pair(states, self._embedding(tokens))
            self._cached = torch.cat([self._cached, self.drafter.layer.keys_and_values(pairs)])
