"""Suffix drafting: the most frequent continuation of the longest suffix seen before.

Counts come from the request itself and from earlier requests of the same stream (Oliaro et al.
2024, "SuffixDecoding"; the tree is kept as one table of n-grams of bounded size).
"""

from __future__ import annotations

import threading
from collections import OrderedDict

from inference.drafters.token_model import TokenModelSession
from inference.ports import NO_PROPOSAL
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion

_Followers = dict[int, int]


class SuffixDrafter:
    """Proposes from suffix counts, longest suffix first.

    Args:
        drafter_id: Name in the pool.
        longest: Longest suffix, in tokens.
        shortest: Shortest suffix that may match, 1..longest.
        max_suffixes: Suffixes remembered per stream; the least recently used go first.
        share_history: Whether requests of a stream see each other's text. Streams never do.
    """

    def __init__(
        self,
        drafter_id: str = "suffix",
        *,
        longest: int = 6,
        shortest: int = 2,
        max_suffixes: int = 500_000,
        share_history: bool = True,
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest={shortest} outside 1..longest={longest}")
        self.version = DrafterVersion(drafter_id=drafter_id, weights_version=0)
        self._sizes = range(longest, shortest - 1, -1)
        self._max_suffixes = max_suffixes
        self._share_history = share_history
        self._stream_to_history: dict[str, SharedHistory] = {}

    def start(
        self, trajectory: Trajectory, *, stream: str, draws_drafts: bool
    ) -> TokenModelSession:
        """Begin a request on top of what the stream has seen so far."""
        history = self._stream_to_history.setdefault(
            stream, SharedHistory(self._sizes, self._max_suffixes)
        )
        model = SuffixCounts(self._sizes, history)
        keep = history.add if self._share_history else None
        return TokenModelSession(model, trajectory, on_finish=keep)


class SharedHistory:
    """Suffix counts of finished requests of one stream.

    Args:
        sizes: Suffix sizes, longest first.
        max_suffixes: Bound on remembered suffixes.
    """

    def __init__(self, sizes: range, max_suffixes: int) -> None:
        self._sizes = sizes
        self._max_suffixes = max_suffixes
        self._followers: OrderedDict[tuple[int, ...], _Followers] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, suffix: tuple[int, ...]) -> _Followers:
        """Return how often each token followed ``suffix`` (empty if never)."""
        return self._followers.get(suffix, {})

    def add(self, token_ids: list[int]) -> None:
        """Count a finished request."""
        with self._lock:
            for end in range(1, len(token_ids)):
                for size in self._sizes:
                    if size <= end:
                        suffix = tuple(token_ids[end - size : end])
                        _count(self._followers.setdefault(suffix, {}), token_ids[end], 1)
                        self._followers.move_to_end(suffix)
            while len(self._followers) > self._max_suffixes:
                self._followers.popitem(last=False)


class SuffixCounts:
    """Suffix counts of one request on top of a shared history.

    Args:
        sizes: Suffix sizes, longest first.
        history: Read only.
    """

    def __init__(self, sizes: range, history: SharedHistory) -> None:
        self._sizes = sizes
        self._history = history
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], _Followers] = {}

    def propose(self) -> int:
        """Return the most frequent follower of the longest known suffix, lowest id on a tie."""
        for suffix in self._newest_suffixes():
            own, shared = self._followers.get(suffix, {}), self._history.get(suffix)
            if own or shared:
                return min(own.keys() | shared.keys(), key=lambda t: (-_total(own, shared, t), t))
        return NO_PROPOSAL

    def tell(self, token_id: int) -> None:
        """Count ``token_id`` behind every newest suffix."""
        for suffix in self._newest_suffixes():
            _count(self._followers.setdefault(suffix, {}), token_id, 1)
        self._tokens.append(token_id)

    def take_back(self) -> None:
        """Undo the last ``tell``."""
        token_id = self._tokens.pop()
        for suffix in self._newest_suffixes():
            _count(self._followers[suffix], token_id, -1)
            if not self._followers[suffix]:
                del self._followers[suffix]

    def _newest_suffixes(self) -> list[tuple[int, ...]]:
        tokens = self._tokens
        return [tuple(tokens[-size:]) for size in self._sizes if len(tokens) >= size]


def _total(own: _Followers, shared: _Followers, token_id: int) -> int:
    return own.get(token_id, 0) + shared.get(token_id, 0)


def _count(followers: _Followers, token_id: int, change: int) -> None:
    count = followers.get(token_id, 0) + change
    if count:
        followers[token_id] = count
    else:
        del followers[token_id]
