"""Prompt lookup: propose what followed the last occurrence of the newest n-gram."""

from __future__ import annotations

from inference.drafters.token_model import TokenModelSession
from inference.ports import NO_PROPOSAL
from inference.trajectory import Trajectory
from schemas.events import DrafterVersion

_Undo = list[tuple[tuple[int, ...], int | None]]


class PromptLookupDrafter:
    """Looks the last tokens up in the request itself (Saxena 2023, "prompt lookup decoding").

    Args:
        drafter_id: Name in the pool.
        longest: Longest n-gram that is looked up first.
        shortest: Shortest n-gram that may match, 1..longest.
    """

    def __init__(
        self, drafter_id: str = "prompt-lookup", *, longest: int = 3, shortest: int = 2
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest={shortest} outside 1..longest={longest}")
        self.version = DrafterVersion(drafter_id=drafter_id, weights_version=0)
        self._sizes = range(longest, shortest - 1, -1)

    def start(
        self, trajectory: Trajectory, *, stream: str, draws_drafts: bool
    ) -> TokenModelSession:
        """Begin a request with an empty table."""
        return TokenModelSession(LatestFollower(self._sizes), trajectory)


class LatestFollower:
    """Remembers, for every n-gram of the given sizes, the token that last followed it.

    Args:
        sizes: n-gram sizes, longest first.
    """

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._tokens: list[int] = []
        self._follower: dict[tuple[int, ...], int] = {}
        self._undo: list[_Undo] = []

    def propose(self) -> int:
        """Return the last follower of the longest known n-gram."""
        for gram in self._newest_grams():
            if gram in self._follower:
                return self._follower[gram]
        return NO_PROPOSAL

    def tell(self, token_id: int) -> None:
        """Let ``token_id`` follow every newest n-gram."""
        undo: _Undo = []
        for gram in self._newest_grams():
            undo.append((gram, self._follower.get(gram)))
            self._follower[gram] = token_id
        self._undo.append(undo)
        self._tokens.append(token_id)

    def take_back(self) -> None:
        """Undo the last ``tell``."""
        self._tokens.pop()
        for gram, before in self._undo.pop():
            if before is None:
                del self._follower[gram]
            else:
                self._follower[gram] = before

    def _newest_grams(self) -> list[tuple[int, ...]]:
        tokens = self._tokens
        return [tuple(tokens[-size:]) for size in self._sizes if len(tokens) >= size]
