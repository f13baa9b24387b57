"""Heads over the rows of a batch: one pass per level for all rows, ended when it no longer pays.

A head is the recurrent one of ``inference.drafters.hydra``, or the small language model of
``inference.drafters.token_lm``, which reads tokens alone. Its confidence is the probability that
it gives its own proposal; how often that comes true is counted per confidence and level. How well
each head does in a request, and in all of them, decides whether it is asked at all: a level of a
head costs about as much as a drafted token.

Axes: B rows, K levels, M heads.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from inference.drafters.hydra import HydraDrafter, HydraUnroll
from inference.drafters.token_lm import TokenLmDrafter, TokenLmUnroll
from inference.vllm_plugin.lookup_kernels import NO_TOKEN
from schemas.events import DrafterVersion

NUM_CONFIDENCES, NUM_LEVELS = 10, 3

COUNT_MEMORY = 0.995
PRIOR_OBSERVATIONS = 4.0
RATE_MEMORY = 0.99
"""Of a head's hits over all requests, per observation."""

PRIOR_WEIGHT = 4.0
"""Observations that all streams together count as in one, and a stream in one request."""

MOST_STREAMS = 256

FIRST_RATE = 0.5
"""Hits expected of a head that nothing is known of: it is tried."""

SECONDS_MEMORY = 0.95

ServedHead = HydraDrafter | TokenLmDrafter
"""Kinds of ``ports.HEAD_KINDS``."""

Stop = Callable[[NDArray[np.float64], int], bool]
"""Told the chances of a level, (B,), and the level, says whether to end the pass."""


@dataclass(slots=True)
class RowHeads:
    """What one request has seen of R records of heads, and which of them stands where in it.

    Attributes:
        counts: (R, 2, 2): per record, [first level, later levels], [hits, observations].
        asked: Per record that was asked in the step before: tokens and cells of its levels.
        order: Records in the order of the columns of its events: M in their own places, then those
            beside them.
        place_to_version: Versions in own places that are not those in force: a canary's.
        beside: Versions beside them.
    """

    counts: NDArray[np.float64]
    asked: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    order: tuple[int, ...] = ()
    place_to_version: dict[int, DrafterVersion] = field(default_factory=dict)
    beside: tuple[DrafterVersion, ...] = ()

    @classmethod
    def fresh(cls, num_heads: int) -> RowHeads:
        """Return the record of a request that begins, of M heads and of those beside them."""
        return cls(np.zeros((2 * num_heads, 2, 2)), order=tuple(range(num_heads)))


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """What a head proposes for B rows.

    Attributes:
        token_ids: int64 (B, L), L <= K levels.
        chances: (B, L), chance of each level given those before.
        cells: int64 (B, L), what each proposal counts as.
        seconds: The pass took.
    """

    token_ids: NDArray[np.int64]
    chances: NDArray[np.float64]
    cells: NDArray[np.int64]
    seconds: float


class HeadRecord:
    """One head of the pool with what is known of it.

    Attributes:
        drafter: Its newest version; None before its first release.
        level_seconds: Of one level for a batch; NaN = never measured.
    """

    def __init__(self) -> None:
        self.drafter: ServedHead | None = None
        self.level_seconds = float("nan")
        self._counts = np.zeros((NUM_CONFIDENCES * NUM_LEVELS, 2))
        self._rates = np.zeros((2, 2))
        self._stream_to_rates: OrderedDict[str, NDArray[np.float64]] = OrderedDict()
        self._token_ids = torch.empty(0, dtype=torch.int64)

    @property
    def num_read(self) -> int:
        """Newest tokens of a row that it reads, >= 1."""
        return self.drafter.num_read if isinstance(self.drafter, TokenLmDrafter) else 1

    def renew(self, drafter: ServedHead | None) -> None:
        """Take up another version; what was known of the one before says little of it."""
        self.drafter = drafter
        self._counts *= 0.2
        self._rates *= 0.1
        for rates in self._stream_to_rates.values():
            rates *= 0.1
        if drafter is not None:
            device = drafter.rows.head.device
            self._token_ids = drafter.rows.vocabulary.token_ids.to(device)

    def expected(self, row: NDArray[np.float64], stream: str) -> tuple[float, float]:
        """Return the chances of the first and of later levels in a request, before it is asked.

        What its stream has seen counts before what all have seen, and its own before both.

        Args:
            row: Its counts there, (2, 2).
            stream: Its stream.
        """
        chances = (self._rates[:, 0] + 2.0 * FIRST_RATE) / (self._rates[:, 1] + 2.0)
        for counts in (self._of_stream(stream), row):
            chances = (counts[:, 0] + PRIOR_WEIGHT * chances) / (counts[:, 1] + PRIOR_WEIGHT)
        return float(chances[0]), float(chances[1])

    def start_from(self, stream: str, chance: float, observations: float) -> None:
        """Let a stream that was seen less here start from what was learned of it elsewhere.

        Args:
            stream: Its name.
            chance: Of every level.
            observations: What the chance counts as.
        """
        rates = self._of_stream(stream)
        rates[rates[:, 1] < observations] = (chance * observations, observations)

    def observe(
        self, row: NDArray[np.float64], stream: str, level: int, cell: int, came_true: bool
    ) -> None:
        """Learn whether a proposal came true, in a request, in its stream and in all."""
        hit, later = float(came_true), int(level > 0)
        row[later] = 0.97 * row[later] + (hit, 1.0)
        for rates in (self._of_stream(stream), self._rates):
            rates[later] = RATE_MEMORY * rates[later] + (hit, 1.0)
        self._counts[cell] = COUNT_MEMORY * self._counts[cell] + (hit, 1.0)

    def _of_stream(self, stream: str) -> NDArray[np.float64]:
        """Return a stream's hits and observations, (2, 2); of many streams the newest are kept."""
        rates = self._stream_to_rates.get(stream)
        if rates is None:
            rates = self._stream_to_rates[stream] = np.zeros((2, 2))
            while len(self._stream_to_rates) > MOST_STREAMS:
                self._stream_to_rates.popitem(last=False)
        return rates

    @torch.inference_mode()
    def unroll(
        self, states: torch.Tensor, token_ids: NDArray[np.int64], num_levels: int, stop: Stop
    ) -> HeadDrafts:
        """Propose for all rows, level by level, until ``stop`` says so.

        Args:
            states: (B, H), the states that predicted the newest tokens.
            token_ids: (B, ``num_read``), the newest tokens, the oldest first; negative = none.
            num_levels: Most levels, >= 1.
            stop: Asked after every level.

        Raises:
            FloatingPointError: If an output is not finite.
            RuntimeError: If there is no version yet.
        """
        if self.drafter is None:
            raise RuntimeError("the head has no version yet")
        began = time.perf_counter()
        levels: list[tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int64]]] = []
        tokens_read = torch.from_numpy(token_ids).to(states.device)
        rows, newest = unrolled(self.drafter, states, tokens_read[:, :-1]), tokens_read[:, -1]
        for level in range(num_levels):
            newest, sureness = self._level(rows, newest)
            confidence = (sureness * NUM_CONFIDENCES).astype(np.int64).clip(0, NUM_CONFIDENCES - 1)
            cells = confidence * NUM_LEVELS + min(level, NUM_LEVELS - 1)
            levels.append((newest.cpu().numpy(), self._chances(cells, sureness), cells))
            if stop(levels[-1][1], level):
                break
        seconds = time.perf_counter() - began
        self._note_seconds(seconds / len(levels))
        tokens, chances, cells = (np.stack(part, axis=1) for part in zip(*levels, strict=True))
        return HeadDrafts(tokens, chances, cells, seconds)

    def _level(
        self, rows: HydraUnroll | TokenLmUnroll, newest: torch.Tensor
    ) -> tuple[torch.Tensor, NDArray[np.float64]]:
        """Return (most probable token, its probability) of the next level, row by row."""
        head = self.drafter
        assert head is not None  # unroll has checked
        logits = head.rows.logits(rows.step(newest)).float()
        best = logits.max(-1)
        sureness = (best.values - logits.logsumexp(-1)).exp().cpu().numpy().astype(np.float64)
        if not np.isfinite(sureness).all():
            raise FloatingPointError("the head's output is not finite")
        return self._token_ids[best.indices], sureness

    def _chances(
        self, cells: NDArray[np.int64], sureness: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        hits, seen = self._counts[cells].T
        chances = (hits + PRIOR_OBSERVATIONS * 0.9 * sureness) / (seen + PRIOR_OBSERVATIONS)
        return np.asarray(chances)

    def _note_seconds(self, seconds: float) -> None:
        known = self.level_seconds
        kept = seconds if np.isnan(known) else min(seconds, 4.0 * known)
        self.level_seconds = (
            kept if np.isnan(known) else SECONDS_MEMORY * known + (1 - SECONDS_MEMORY) * kept
        )


def unrolled(
    head: ServedHead, states: torch.Tensor, token_ids: torch.Tensor
) -> HydraUnroll | TokenLmUnroll:
    """Begin to unroll a head over B rows.

    Args:
        head: Its version.
        states: (B, H), the states that predicted the newest tokens.
        token_ids: (B, ``num_read`` - 1), the tokens before the newest.
    """
    if isinstance(head, TokenLmDrafter):
        return TokenLmUnroll(head.weights, head.rows.embeddings, token_ids)
    state = states.to(head.rows.head.dtype)
    return HydraUnroll(state, head.rows.embeddings, head.mix, head.out, head.weights["gain"])


def learn_emitted(
    records: list[HeadRecord], heads: RowHeads, stream: str, emitted: NDArray[np.int32]
) -> None:
    """Judge what heads proposed for a row by what the step emitted there."""
    for index, (tokens, cells) in heads.asked.items():
        for level, (token, cell) in enumerate(zip(tokens, cells, strict=True)):
            if level >= emitted.size or token == NO_TOKEN:
                break
            came_true = token == int(emitted[level])
            records[index].observe(heads.counts[index], stream, level, cell, came_true)
            if not came_true:
                break
    heads.asked.clear()
