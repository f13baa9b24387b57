"""Lookups of the requests of a batch: own tokens, shared history, and how sure proposals are."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from inference.vllm_plugin import lookup_kernels as kernels

NUM_HEADS = 2048
"""Chains of a request's own index."""

BYTES_PER_SHARED_TOKEN = 4 + 2 * (8 + 8)
"""Token, two chains, and as many chain heads as tokens."""

MOST_STREAMS = 16
"""Streams whose histories are kept apart; the least recently used goes first."""


def prior_chances() -> NDArray[np.float64]:
    """Return how probable proposals are to come true before any was seen, (C,).

    Longer matches, and those that agree, are surer; what is seen soon outweighs the guess.
    """
    lengths = np.array([0.15, 0.25, 0.35, 0.42, 0.5, 0.58, 0.66, 0.75, 0.85])
    shares = np.array([0.55, 0.75, 0.9, 1.0])
    grid = np.empty(
        (kernels.NUM_LENGTHS, kernels.NUM_SHARES, kernels.NUM_LEVELS, kernels.NUM_SUPPORTS)
    )
    grid[:] = (lengths[:, None] * shares)[:, :, None, None]
    return grid.ravel()


def compile_kernels() -> None:
    """Compile what steps run, so that no request waits for it."""
    history, certainty = SharedHistory(1 << 16), Certainty()
    for _ in range(2):
        one = RequestLookup(np.array([1, 2, 3, 1], np.int32), 2, 32, history, certainty)
        one.advance(np.array([2, 3, 1, 2], np.int32))
        one.share()


class Certainty:
    """How often proposals of each cell came true, over all requests of this process."""

    def __init__(self) -> None:
        self.prior = prior_chances()
        self.counts = np.zeros((kernels.NUM_LOOKUPS, kernels.NUM_CELLS, 2))


class SharedHistory:
    """Tokens of finished requests, the newest of them, in a ring of fixed size.

    Args:
        max_bytes: Bound of its arrays; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        size = max(max_bytes // BYTES_PER_SHARED_TOKEN, 1)
        num_heads = 1 << max(size.bit_length() - 1, 0)
        self._is_kept = max_bytes >= BYTES_PER_SHARED_TOKEN * 64
        size = size if self._is_kept else 1
        self.tokens = np.full(size, kernels.NO_TOKEN, dtype=np.int32)
        chains = kernels.NUM_CHAINS
        self.previous = np.full((chains, size), -1, dtype=np.int64)
        self.head = np.full((chains, num_heads if self._is_kept else 1), -1, dtype=np.int64)
        self.num_tokens = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.tokens.nbytes + self.previous.nbytes + self.head.nbytes

    def add(self, token_ids: NDArray[np.int32]) -> None:
        """Remember what a request wrote; a sequence longer than the ring loses its beginning."""
        kept = token_ids[-(self.tokens.size - 1) :] if self._is_kept else token_ids[:0]
        if kept.size >= 3:
            self.num_tokens = kernels.add_shared(
                np.ascontiguousarray(kept, dtype=np.int32),
                self.tokens,
                self.previous,
                self.head,
                self.num_tokens,
            )


class Histories:
    """The shared histories of all streams, within one bound.

    Args:
        max_bytes: Bound over all streams.
        is_shared: Whether streams see each other's text.
    """

    def __init__(self, max_bytes: int, *, is_shared: bool) -> None:
        self._is_shared = is_shared
        self._bytes_per_stream = max_bytes if is_shared else max_bytes // MOST_STREAMS
        self._stream_to_history: OrderedDict[str, SharedHistory] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, stream: str) -> SharedHistory:
        """Return the history that a stream reads and writes."""
        key = "" if self._is_shared else stream
        with self._lock:
            history = self._stream_to_history.get(key)
            if history is None:
                history = self._stream_to_history[key] = SharedHistory(self._bytes_per_stream)
                while len(self._stream_to_history) > MOST_STREAMS:
                    self._stream_to_history.popitem(last=False)
            self._stream_to_history.move_to_end(key)
            return history

    @property
    def num_bytes(self) -> int:
        """Bytes of all histories."""
        with self._lock:
            return sum(one.num_bytes for one in self._stream_to_history.values())


class RequestLookup:
    """The lookups of one request, and the windows they gave at its positions.

    Args:
        prompt: Its tokens so far, at least one.
        num_levels: K.
        num_slots: R, positions whose windows are kept.
        history: What earlier requests wrote.
        certainty: Learned in place.

    Attributes:
        tokens: Verified tokens; the first ``num_tokens`` are valid.
        first_window: First position that a lookup was asked for.
        chances: (D, K), how probable each level of the newest draft is, given those before.
    """

    def __init__(
        self,
        prompt: NDArray[np.int32],
        num_levels: int,
        num_slots: int,
        history: SharedHistory,
        certainty: Certainty,
    ) -> None:
        self.num_tokens = int(prompt.size)
        capacity = max(256, 2 * self.num_tokens)
        self.tokens = np.empty(capacity, dtype=np.int32)
        self.tokens[: self.num_tokens] = prompt
        self._previous = np.full((kernels.NUM_CHAINS, capacity), -1, dtype=np.int32)
        self._head = np.empty((kernels.NUM_CHAINS, NUM_HEADS), dtype=np.int32)
        kernels.read_prompt(self.tokens, self.num_tokens, self._previous, self._head)
        self._history = history
        self._certainty = certainty
        self.first_window = self.num_tokens + 1
        shape = (num_slots, kernels.NUM_LOOKUPS, num_levels)
        self._proposals = np.full(shape, kernels.NO_TOKEN, dtype=np.int32)
        self._cells = np.full(shape, -1, dtype=np.int16)
        self._num_alive = np.zeros(shape[:2], dtype=np.int16)
        self._bias = np.zeros(kernels.NUM_LOOKUPS)
        self.chances = np.zeros(shape[1:])

    def advance(self, emitted: NDArray[np.int32]) -> None:
        """Take in the tokens that a step emitted."""
        if self.num_tokens + emitted.size > self.tokens.size:
            self._grow(2 * (self.num_tokens + emitted.size))
        history = self._history
        self.num_tokens = kernels.advance(
            emitted,
            self.tokens,
            self.num_tokens,
            self.first_window,
            self._previous,
            self._head,
            history.tokens,
            history.previous,
            history.head,
            history.num_tokens,
            self._proposals,
            self._cells,
            self._num_alive,
            self._certainty.counts,
            self._certainty.prior,
            self._bias,
            self.chances,
        )

    def draft(self, lookup: int, num_tokens: int) -> list[int]:
        """Return at most ``num_tokens`` tokens that a lookup proposes now."""
        slot = self.num_tokens % len(self._proposals)
        found: list[int] = self._proposals[slot, lookup, :num_tokens].tolist()
        return found[: found.index(kernels.NO_TOKEN)] if kernels.NO_TOKEN in found else found

    def newest(self, count: int) -> NDArray[np.int64]:
        """Return the last ``count`` tokens, the oldest first; ``NO_TOKEN`` where there is none."""
        found = np.full(count, kernels.NO_TOKEN, dtype=np.int64)
        kept = min(count, self.num_tokens)
        found[count - kept :] = self.tokens[self.num_tokens - kept : self.num_tokens]
        return found

    def proposals(self, starts: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return what was proposed at positions, (W, D, K); no older than R positions."""
        return self._proposals[starts % len(self._proposals)]

    def share(self) -> None:
        """Remember for later requests what this one wrote."""
        self._history.add(self.tokens[self.first_window - 1 : self.num_tokens])

    def _grow(self, capacity: int) -> None:
        tokens, previous = self.tokens, self._previous
        self.tokens = np.zeros(capacity, dtype=np.int32)
        self._previous = np.full((kernels.NUM_CHAINS, capacity), -1, dtype=np.int32)
        self.tokens[: self.num_tokens] = tokens[: self.num_tokens]
        self._previous[:, : self.num_tokens] = previous[:, : self.num_tokens]
