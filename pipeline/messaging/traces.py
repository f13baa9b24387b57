"""Trace contexts of requests on their way into the headers of their events (W3C traceparent)."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Mapping

TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

MOST_REQUESTS = 10_000


class TraceContexts:
    """Remembers the newest requests' trace contexts; the oldest are forgotten first."""

    def __init__(self, capacity: int = MOST_REQUESTS) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._request_to_trace: OrderedDict[str, bytes] = OrderedDict()

    def note(self, request_id: str, traceparent: str) -> None:
        """Remember a context; one that is not valid is passed over, as the standard asks."""
        if not TRACEPARENT.fullmatch(traceparent):
            return
        with self._lock:
            self._request_to_trace[request_id] = traceparent.encode()
            while len(self._request_to_trace) > self._capacity:
                self._request_to_trace.popitem(last=False)

    def headers(self, request_id: str) -> Mapping[str, bytes]:
        """Return the headers that an event of a request gets besides its own."""
        with self._lock:
            found = self._request_to_trace.get(request_id)
        return {} if found is None else {"traceparent": found}
