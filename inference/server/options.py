"""What the HTTP server is told once: names, limits, keys and what it may ask of the outside."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class KeyRing:
    """A set of keys; a candidate is compared with every one of them in constant time.

    Args:
        keys: As clients send them.
    """

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"KeyRing({len(self)} keys)"

    def holds(self, candidate: bytes) -> bool:
        """Tell whether a key is one of these; how long it takes tells nothing."""
        digest = hashlib.sha256(candidate).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


class Administration(Protocol):
    """What admin routes ask of the worker's surroundings."""

    def swap(self, drafter_id: str, version: int) -> None:
        """Load a published version and have it taken up by the next request.

        Raises:
            KeyError: If there is no such drafter or version.
            ValueError: If it cannot be used here.
        """

    def describe(self) -> dict[str, Any]:
        """Return versions and counts for the info route; no key and no content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """How the server serves.

    Attributes:
        model_name: Name that clients ask for; ``name:stream`` names a stream as well.
        default_stream: Stream of requests that name none.
        streams: Streams that requests may name; empty = any identifier.
        consenting_streams: Streams whose content may be recorded unless a request says no.
        default_max_tokens: Most tokens of requests that do not say.
        max_body_bytes: Longest body; a longer one is refused unread.
        client_seconds: Longest time that a client may leave a chunk unread.
        api_keys: Keys of clients; empty = open to all who can connect.
        admin_keys: Keys of admin routes; empty = they are closed to all.
    """

    model_name: str
    default_stream: str = "default"
    streams: Sequence[str] = ()
    consenting_streams: Collection[str] = ()
    default_max_tokens: int = 256
    max_body_bytes: int = 4 * 2**20
    client_seconds: float = 60.0
    api_keys: KeyRing = field(default_factory=lambda: KeyRing(()))
    admin_keys: KeyRing = field(default_factory=lambda: KeyRing(()))


RenderMetrics = Callable[[], tuple[bytes, str]]
"""Returns what Prometheus reads, and its content type."""
